"""The bundle (``.evb``): one zip with the stage graphs and all that running them truthfully needs.

    manifest.json            what it is; lists every other file with its size and sha256
    stages/1.onnx ...        one graph a stage, in the order they run
    calibration.json         the ranges behind the INT8, with their evidence
    check/*.png              preprocessed validation images, for benchmarks and self-tests
    report.json              what was measured when it was made

Files are stored, not compressed: there is nothing to inflate, so a small hostile file can't become
a large one, and weights do not compress anyway. A bundle is hostile until its hashes are checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple, Union

from edgevit.errors import BundleError
from edgevit.images import is_label
from edgevit.policy import ExitPolicy
from edgevit.preprocess import Preprocess

FORMAT = "edgevit-bundle"
VERSION = 1
MANIFEST = "manifest.json"

_MAX_FILES = 10_000
_MAX_FILE_BYTES = 4 << 30
_MAX_MANIFEST_BYTES = 16 << 20
_CHUNK = 1 << 20
# What zipfile raises for an archive that is cut short or altered, in one Python version or another.
_UNREADABLE = (
    zipfile.BadZipFile,
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
)
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


@dataclass(frozen=True)
class Stage:
    """A part of the network that ends in an exit. ``macs`` counts its multiply-accumulates."""

    file: str
    exit_block: int
    precision: str
    macs: int


@dataclass(frozen=True)
class CheckImage:
    """A preprocessed validation image (RGB PNG of the input size) and its label's index."""

    file: str
    label: int


@dataclass(frozen=True)
class Bundle:
    """A verified bundle. :meth:`load` reads one, :func:`write_bundle` makes one."""

    path: Path
    name: str
    labels: Tuple[str, ...]
    preprocess: Preprocess
    policy: ExitPolicy
    stages: Tuple[Stage, ...]
    check_images: Tuple[CheckImage, ...]
    manifest: Dict[str, Any]

    @classmethod
    def load(cls, path: Union[str, Path]) -> Bundle:
        """Read a bundle and check every file's hash.

        Raises :class:`BundleError`, which names the file inside, for one that is cut short, altered,
        written by a newer edgevit, or that holds names which would leave the folder it is unpacked to.
        """
        path = Path(path)
        if not path.is_file():
            raise BundleError(f"{path} is not a file; give the path of a .evb bundle")
        try:
            with zipfile.ZipFile(path) as archive:
                manifest = _read_manifest(path, archive)
                for name in manifest["files"]:
                    _read_verified(path, archive, manifest["files"], name, keep=False)
        except _UNREADABLE as error:
            raise BundleError(
                f"{path} is cut short or not a bundle ({error}); copy or make it again"
            ) from None
        return cls._from_manifest(path, manifest)

    def read(self, name: str) -> bytes:
        """The content of one file, its hash checked again: the file may have changed since."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                return _read_verified(self.path, archive, self.manifest["files"], name, keep=True)
        except _UNREADABLE as error:
            raise BundleError(
                f"{self.path}: '{name}' can't be read any more ({error}); copy the bundle again"
            ) from None

    @classmethod
    def _from_manifest(cls, path: Path, manifest: Dict[str, Any]) -> Bundle:
        try:
            labels = tuple(_text(label) for label in _list(manifest["labels"]))
            stages = tuple(
                Stage(
                    file=_listed(manifest, stage["file"]),
                    exit_block=_count(stage["exit_block"]),
                    precision=_text(stage["precision"]),
                    macs=_count(stage["macs"]),
                )
                for stage in _list(manifest["stages"])
            )
            if not labels or not stages:
                raise ValueError("no labels or no stages")
            if len(set(labels)) != len(labels):
                raise ValueError("a label twice")
            check_images = tuple(
                CheckImage(_listed(manifest, image["file"]), _index(image["label"], labels))
                for image in _list(manifest["check_images"])
            )
            return cls(
                path=path,
                name=_text(manifest["name"]),
                labels=labels,
                preprocess=Preprocess.from_json(manifest["preprocess"]),
                policy=ExitPolicy.from_json(manifest["policy"], len(stages) - 1),
                stages=stages,
                check_images=check_images,
                manifest=manifest,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(
                f"{path}: {MANIFEST} is incomplete ({error!r}); make the bundle again"
            ) from None
        except BundleError as error:
            raise BundleError(f"{path}: {error}") from None


def write_bundle(
    path: Union[str, Path], manifest: Mapping[str, Any], files: Mapping[str, bytes]
) -> Path:
    """Write a bundle whole or not at all, then read it back. Equal content gives equal bytes.

    ``manifest`` lacks ``format``, ``version`` and ``files``, which are added here.
    """
    path = Path(path)
    whole = {
        "format": FORMAT,
        "version": VERSION,
        **manifest,
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in sorted(files.items())
        },
    }
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
                entries = [(MANIFEST, json.dumps(whole, indent=1, sort_keys=True).encode())]
                entries += sorted(files.items())
                for name, data in entries:
                    # A fixed time, so that the same content gives the same file.
                    archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Bundle.load(temporary)
        Path(temporary).replace(path)
        _sync_folder(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(path: Path, archive: zipfile.ZipFile) -> Dict[str, Any]:
    """The manifest, its version checked and its file list equal to what the archive holds."""
    infos = archive.infolist()
    if len(infos) > _MAX_FILES:
        raise BundleError(f"{path} holds {len(infos)} files; a bundle holds at most {_MAX_FILES}")
    names: List[str] = [info.filename for info in infos]
    for info in infos:
        if not _SAFE_NAME.fullmatch(info.filename):
            raise BundleError(
                f"{path}: the name {info.filename!r} is not allowed in a bundle; "
                "do not unpack this file, and get it from a source that you trust"
            )
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
            raise BundleError(
                f"{path}: '{info.filename}' is compressed or encrypted, which a bundle never is; "
                "make it with edgevit, not with a zip tool"
            )
        if info.file_size > _MAX_FILE_BYTES or info.file_size != info.compress_size:
            raise BundleError(f"{path}: '{info.filename}' states an impossible size; copy it again")
    if MANIFEST not in names:
        raise BundleError(f"{path} has no {MANIFEST}, so it is not a bundle; give a .evb file")
    if len(set(names)) != len(names):
        raise BundleError(f"{path} holds a name twice; make the bundle again")
    if archive.getinfo(MANIFEST).file_size > _MAX_MANIFEST_BYTES:
        raise BundleError(f"{path}: {MANIFEST} is larger than {_MAX_MANIFEST_BYTES} bytes")
    try:
        text = archive.read(MANIFEST).decode("utf-8")
        manifest = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise BundleError(
            f"{path}: {MANIFEST} is not JSON; copy or make the bundle again"
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BundleError(f"{path}: {MANIFEST} is not an edgevit manifest; give a .evb file")
    if type(manifest.get("version")) is not int or manifest["version"] != VERSION:
        raise BundleError(
            f"{path} has bundle version {manifest.get('version')!r} and this edgevit reads {VERSION}; "
            "install the edgevit that made it, or make the bundle again"
        )
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not all(
        isinstance(entry, dict)
        and type(entry.get("bytes")) is int
        and isinstance(entry.get("sha256"), str)
        for entry in listed.values()
    ):
        raise BundleError(f"{path}: {MANIFEST} does not list its files; make the bundle again")
    for name in sorted(set(listed) - set(names)):
        raise BundleError(f"{path}: '{name}' is missing; copy or make the bundle again")
    for name in sorted(set(names) - set(listed) - {MANIFEST}):
        raise BundleError(f"{path}: '{name}' is not listed in {MANIFEST}; do not trust this bundle")
    return manifest


def _read_verified(
    path: Path, archive: zipfile.ZipFile, listed: Mapping[str, Any], name: str, keep: bool
) -> bytes:
    """The file's bytes (empty unless ``keep``), after their number and hash were checked."""
    entry = listed[name]
    digest = hashlib.sha256()
    kept: List[bytes] = []
    size = 0
    try:
        with archive.open(name) as stream:
            for chunk in iter(lambda: stream.read(_CHUNK), b""):
                digest.update(chunk)
                size += len(chunk)
                if keep:
                    kept.append(chunk)
    except _UNREADABLE as error:
        raise BundleError(f"{path}: '{name}' is damaged ({error}); copy the bundle again") from None
    if size != entry["bytes"] or digest.hexdigest() != entry["sha256"]:
        raise BundleError(
            f"{path}: '{name}' is not what {MANIFEST} says (its hash differs); copy the bundle again"
        )
    return b"".join(kept)


def _no_constant(name: str) -> None:
    """Python would read NaN and Infinity, which JSON does not have, and write them again."""
    raise ValueError(f"{name} is not JSON")


def _list(value: Any) -> List[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not is_label(value):
        raise ValueError(f"{value!r} is not text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _index(value: Any, labels: Tuple[str, ...]) -> int:
    if _count(value) >= len(labels):
        raise ValueError(f"label {value} of {len(labels)}")
    return int(value)


def _listed(manifest: Mapping[str, Any], name: Any) -> str:
    if name not in manifest["files"]:
        raise ValueError(f"{name!r} is not in the bundle")
    return str(name)
