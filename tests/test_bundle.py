from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgevit import bundle as bundle_module
from edgevit.bundle import Bundle, write_bundle
from edgevit.errors import BundleError
from edgevit.policy import ExitPolicy
from edgevit.preprocess import Preprocess

FILES = {
    "stages/1.onnx": b"first graph " * 40,
    "stages/2.onnx": b"second graph " * 30,
    "check/0000.png": b"picture",
    "report.json": b"{}",
}


def manifest() -> dict[str, Any]:
    return {
        "name": "small",
        "labels": ["cat", "dog"],
        "preprocess": Preprocess(size=32).to_json(),
        "policy": ExitPolicy((0.5,)).to_json(),
        "stages": [
            {"file": "stages/1.onnx", "exit_block": 6, "precision": "int8", "macs": 10},
            {"file": "stages/2.onnx", "exit_block": 12, "precision": "int8", "macs": 12},
        ],
        "check_images": [{"file": "check/0000.png", "label": 1}],
    }


def whole_manifest(files: dict[str, bytes] = FILES, **changes: Any) -> dict[str, Any]:
    """As it stands in the file, put together by hand."""
    listed = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }
    return {"format": "edgevit-bundle", "version": 1, "files": listed, **manifest(), **changes}


Entry = tuple[str, bytes]


def write_zip(path: Path, entries: list[Entry], how: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=how)
    return path


def bundle_of(path: Path, value: Any, files: dict[str, bytes] = FILES, *more: Entry) -> Path:
    return write_zip(path, [("manifest.json", json.dumps(value).encode()), *files.items(), *more])


def refusal(path: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "small.evb"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a good bundle."""
    return write_bundle(tmp_path_factory.mktemp("good") / "b.evb", manifest(), FILES).read_bytes()


def test_what_was_written_is_read(path: Path) -> None:
    assert write_bundle(path, manifest(), FILES) == path
    bundle = Bundle.load(str(path))
    assert bundle.path == path
    assert bundle.name == "small"
    assert bundle.labels == ("cat", "dog")
    assert bundle.preprocess == Preprocess(size=32)
    assert bundle.policy == ExitPolicy((0.5,))
    assert [(s.file, s.exit_block, s.precision, s.macs) for s in bundle.stages] == [
        ("stages/1.onnx", 6, "int8", 10),
        ("stages/2.onnx", 12, "int8", 12),
    ]
    assert [(image.file, image.label) for image in bundle.check_images] == [("check/0000.png", 1)]
    assert {name: bundle.read(name) for name in bundle.manifest["files"]} == FILES


def test_one_made_by_hand_is_read(path: Path) -> None:
    """The format is what is documented, not whatever the writer does."""
    assert Bundle.load(bundle_of(path, whole_manifest())).labels == ("cat", "dog")


def test_equal_content_gives_equal_bytes(tmp_path: Path, data: bytes) -> None:
    shuffled = dict(reversed(FILES.items()))
    again = write_bundle(tmp_path / "other.evb", dict(reversed(manifest().items())), shuffled)
    assert again.read_bytes() == data


def test_nothing_is_compressed(path: Path) -> None:
    write_bundle(path, manifest(), FILES)
    with zipfile.ZipFile(path) as archive:
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}


# Writing whole or not at all.


def leftovers(path: Path) -> list[str]:
    return sorted(other.name for other in path.parent.iterdir() if other != path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(
    path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    path.write_bytes(data)

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(*((os, "fsync") if where == "fsync" else (Path, "replace")), fails)
    with pytest.raises(type(error)):
        write_bundle(path, {**manifest(), "name": "new"}, FILES)
    assert path.read_bytes() == data
    assert leftovers(path) == []


def test_a_bundle_that_could_not_be_read_is_not_written(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    for change in ({"labels": []}, {"policy": None}, {"stages": [{"file": "gone.onnx"}]}):
        with pytest.raises(BundleError):
            write_bundle(path, {**manifest(), **change}, FILES)
    for name in ("../up.onnx", "/root.onnx", "a//b"):
        with pytest.raises(BundleError, match="not allowed"):
            write_bundle(path, manifest(), {**FILES, name: b""})
    assert path.read_bytes() == data
    assert leftovers(path) == []


def test_it_is_on_the_disk_before_it_gets_its_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note(what: str, does: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            happened.append(what)
            return does(*arguments)

        return noted

    monkeypatch.setattr(os, "fsync", note("sync", fsync))
    monkeypatch.setattr(Path, "replace", note("rename", replace))
    write_bundle(path, manifest(), FILES)
    assert happened == ["sync", "rename", "sync"]


def test_being_killed_while_writing_leaves_the_old_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    script = (
        "import os, signal, sys\n"
        "from tests.test_bundle import *\n"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_bundle(Path(sys.argv[1]), {**manifest(), 'name': 'new'}, FILES)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=Path(__file__).resolve().parents[1]
    )
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == data
    assert Bundle.load(path).name == "small"


# Damage.


@settings(max_examples=150, deadline=None)
@given(kept=st.floats(0, 1, exclude_max=True))
@example(kept=0.0)
def test_a_file_cut_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, kept: float
) -> None:
    path = tmp_path_factory.mktemp("cut") / "cut.evb"
    path.write_bytes(data[: int(kept * len(data))])
    assert "copy" in refusal(path)


@pytest.mark.parametrize("missing", [1, 2, 21, 22, 23, 100])
def test_a_file_cut_in_its_directory_is_refused(path: Path, data: bytes, missing: int) -> None:
    path.write_bytes(data[:-missing])
    refusal(path)


@settings(max_examples=400, deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, position: float, flip: int
) -> None:
    """A zip's headers hold bytes that mean nothing here, such as times. All else is noticed."""
    damaged = bytearray(data)
    damaged[int(position * len(data))] ^= flip
    path = tmp_path_factory.mktemp("flip") / "flip.evb"
    path.write_bytes(damaged)
    try:
        bundle = Bundle.load(path)
    except BundleError:
        return
    assert bundle.manifest == json.loads(json.dumps(whole_manifest()))
    assert {name: bundle.read(name) for name in FILES} == FILES


def test_any_changed_byte_of_any_content_is_refused(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(write_bundle(path, manifest(), FILES)) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    for name, content in contents.items():
        start = data.index(content)
        for position in {start, start + len(content) // 2, start + len(content) - 1}:
            damaged = bytearray(data)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            assert name in refusal(path)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
@example(b"PK\x05\x06" + bytes(18))  # an empty zip
def test_other_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("other") / "other.evb"
    path.write_bytes(content)
    refusal(path)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "not a file" in refusal(tmp_path)
    assert "not a file" in refusal(tmp_path / "gone.evb")


def test_a_file_that_changes_after_loading_is_noticed(path: Path, data: bytes) -> None:
    bundle = Bundle.load(write_bundle(path, manifest(), FILES))
    position = data.index(FILES["report.json"])
    path.write_bytes(data[:position] + b"[]" + data[position + 2 :])
    with pytest.raises(BundleError, match=r"report\.json"):
        bundle.read("report.json")
    for content in (b"", data[: len(data) // 2]):
        path.write_bytes(content)
        with pytest.raises(BundleError, match=r"report\.json"):
            bundle.read("report.json")
    path.unlink()
    with pytest.raises(BundleError, match=r"report\.json"):
        bundle.read("report.json")


def test_a_name_that_is_not_in_it_is_refused(path: Path) -> None:
    bundle = Bundle.load(write_bundle(path, manifest(), FILES))
    with pytest.raises(BundleError, match=r"calibration\.json"):
        bundle.read("calibration.json")


# Hostile archives.

NAMES = [
    "../x",
    "a/../../x",
    "/etc/x",
    "C:/x",
    "a\\x",
    "~/x",
    ".x",
    "a/.x",
    "a//x",
    "a/",
    "a\nx",
    " x",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_could_leave_its_folder_is_refused(path: Path, name: str) -> None:
    files = {**FILES, name: b"x"}
    bundle_of(path, whole_manifest(files), files)
    assert f"{name!r} is not allowed" in refusal(path)


def test_a_name_twice_is_refused(path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        bundle_of(path, whole_manifest(), {}, *FILES.items(), ("report.json", b"other"))
    assert "twice" in refusal(path)


@pytest.mark.parametrize("how", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_content_is_refused(path: Path, how: int) -> None:
    write_zip(path, [("manifest.json", json.dumps(whole_manifest()).encode()), *FILES.items()], how)
    assert "compressed" in refusal(path)


def test_encrypted_content_is_refused(path: Path, data: bytes) -> None:
    damaged = bytearray(data)
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        position = data.index(signature)
        damaged[position + offset] |= 1
    path.write_bytes(damaged)
    assert "encrypted" in refusal(path)


def patched_directory(data: bytes, offset: int, value: bytes) -> bytes:
    """The archive with a field of its first directory entry replaced."""
    position = data.index(b"PK\x01\x02") + offset
    return data[:position] + value + data[position + len(value) :]


def test_a_name_that_is_no_text_is_refused(path: Path, data: bytes) -> None:
    utf8_flag = patched_directory(data, 8, (0x800).to_bytes(2, "little"))
    path.write_bytes(patched_directory(utf8_flag, 46, b"\xff"))
    refusal(path)


@pytest.mark.parametrize("size", [0, 1, 1 << 30, 0xFFFF_FFFE, 0xFFFF_FFFF])
@pytest.mark.parametrize("field", ["compressed", "uncompressed", "both"])
def test_a_false_size_is_refused(path: Path, data: bytes, size: int, field: str) -> None:
    number = size.to_bytes(4, "little")
    value = {"compressed": number, "uncompressed": number, "both": number * 2}[field]
    path.write_bytes(patched_directory(data, 24 if field == "uncompressed" else 20, value))
    refusal(path)


def test_a_size_in_64_bits_is_refused(path: Path) -> None:
    """Zip64 allows a claim of 2^60 bytes."""
    info = zipfile.ZipInfo("manifest.json")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, json.dumps(whole_manifest()))
        info.file_size = info.compress_size = 1 << 60
    assert "impossible size" in refusal(path)


def test_a_huge_manifest_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "_MAX_MANIFEST_BYTES", 1000)
    bundle_of(path, whole_manifest(name="x" * 1000))
    assert "manifest.json is larger than 1000 bytes" in refusal(path)


def test_too_many_files_are_refused(path: Path) -> None:
    write_zip(path, [(f"f{number}", b"") for number in range(10_001)])
    assert "10001 files" in refusal(path)


# What the manifest must say.


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not JSON",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": 1',
        b'{"version": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_manifest_that_is_no_json_is_refused(path: Path, content: bytes) -> None:
    write_zip(path, [("manifest.json", content), *FILES.items()])
    assert "not JSON" in refusal(path)


@pytest.mark.parametrize("content", [b"[]", b"null", b"3", b'"edgevit-bundle"', b"{}"])
def test_another_json_is_refused(path: Path, content: bytes) -> None:
    write_zip(path, [("manifest.json", content)])
    assert "not an edgevit manifest" in refusal(path)


def test_a_zip_without_a_manifest_is_refused(path: Path) -> None:
    assert "no manifest.json" in refusal(write_zip(path, list(FILES.items())))


@pytest.mark.parametrize("version", [0, 2, -1, "1", None, 1.0, True, [1]])
def test_an_unknown_version_is_refused(path: Path, version: Any) -> None:
    bundle_of(path, whole_manifest(version=version))
    message = refusal(path)
    assert f"version {version!r}" in message
    assert "reads 1" in message


def test_a_missing_file_is_named(path: Path) -> None:
    some = {name: content for name, content in FILES.items() if name != "stages/2.onnx"}
    bundle_of(path, whole_manifest(), some)
    assert "'stages/2.onnx' is missing" in refusal(path)


def test_a_file_that_is_not_listed_is_named(path: Path) -> None:
    bundle_of(path, whole_manifest(), {**FILES, "more.bin": b"x"})
    assert "'more.bin' is not listed" in refusal(path)


@pytest.mark.parametrize(
    "change",
    [{"bytes": 1}, {"bytes": -1}, {"bytes": 1 << 70}, {"sha256": "0" * 64}, {"sha256": ""}],
)
def test_content_that_differs_from_the_list_is_named(path: Path, change: dict[str, Any]) -> None:
    value = whole_manifest()
    value["files"]["stages/1.onnx"].update(change)
    bundle_of(path, value)
    assert "'stages/1.onnx' is not what manifest.json says" in refusal(path)


@pytest.mark.parametrize(
    "files", [None, [], "x", {"report.json": None}, {"report.json": {"bytes": True, "sha256": ""}}]
)
def test_a_list_of_files_that_is_none_is_refused(path: Path, files: Any) -> None:
    bundle_of(path, {**whole_manifest(), "files": files})
    assert "does not list its files" in refusal(path)


STAGE = manifest()["stages"][0]


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"labels": []},
        {"labels": "ab"},
        {"labels": [1, 2]},
        {"labels": ["cat", "cat"]},
        {"labels": {"cat": 0}},
        {"stages": []},
        {"stages": {}},
        {"stages": [3]},
        {"stages": [{**STAGE, "file": "gone.onnx"}]},
        {"stages": [{**STAGE, "file": ["stages/1.onnx"]}]},
        {"stages": [{**STAGE, "exit_block": True}]},
        {"stages": [{**STAGE, "macs": -1}]},
        {"stages": [{**STAGE, "macs": 1.5}]},
        {"stages": [{**STAGE, "precision": None}]},
        {"stages": [STAGE]},  # a threshold too many
        {"policy": None},
        {"policy": {"score": "max_softmax", "thresholds": [10**400]}},
        {"preprocess": None},
        {"preprocess": {**Preprocess(size=32).to_json(), "size": 64}},
        {"preprocess": {**Preprocess(size=32).to_json(), "mean": [10**400, 0, 0]}},
        {"check_images": None},
        {"check_images": [{"file": "gone.png", "label": 0}]},
        {"check_images": [{"file": "check/0000.png", "label": 2}]},
        {"check_images": [{"file": "check/0000.png", "label": -1}]},
        {"check_images": [{"file": "check/0000.png"}]},
    ],
)
def test_a_manifest_that_can_not_be_meant_is_refused(path: Path, change: dict[str, Any]) -> None:
    bundle_of(path, whole_manifest(**change))
    assert "make the bundle again" in refusal(path)


@pytest.mark.parametrize("key", sorted(manifest()))
def test_every_key_is_needed(path: Path, key: str) -> None:
    value = whole_manifest()
    del value[key]
    bundle_of(path, value)
    assert key in refusal(path)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside a manifest."""
    if not isinstance(value, (dict, list)):
        return [at]
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    return [at, *(way for key, item in inside for way in places(item, (*at, key)))]


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**400, -1, 2**63, "stages/1.onnx", "center", "../x", "\x00", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=600, deadline=None)
@given(way=st.sampled_from(places(whole_manifest())), value=ANY_JSON)
def test_any_value_anywhere_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, way: tuple[Any, ...], value: Any
) -> None:
    """Never another exception; and what is read is fit to be printed and indexed."""
    changed = holder = json.loads(json.dumps({"manifest": whole_manifest()}))
    for key in ("manifest", *way)[:-1]:
        holder = holder[key]
    holder[("manifest", *way)[-1]] = value
    path = bundle_of(tmp_path_factory.mktemp("any") / "any.evb", changed["manifest"])
    try:
        bundle = Bundle.load(path)
    except BundleError:
        return
    json.dumps(bundle.manifest, allow_nan=False)
    for text in (bundle.name, *bundle.labels, *(stage.precision for stage in bundle.stages)):
        text.encode("utf-8")
        assert not any(character in text for character in "\n\r\x00\x1b")
    assert len(bundle.policy.thresholds) == len(bundle.stages) - 1
    for image in bundle.check_images:
        assert bundle.labels[image.label]
        bundle.read(image.file)


@pytest.mark.parametrize("label", ["", "two\nlines", "\x1b[31mred", "bell\x07", "\ud800"])
def test_a_label_that_would_spoil_a_terminal_is_refused(path: Path, label: str) -> None:
    bundle_of(path, whole_manifest(labels=["cat", label]))
    assert "make the bundle again" in refusal(path)


@pytest.mark.parametrize("label", ["Löwe", "猫", "می‌خواهم", "👩‍🌾", "two words", "a/b"])
def test_a_label_may_be_in_any_script(path: Path, label: str) -> None:
    assert Bundle.load(bundle_of(path, whole_manifest(labels=["cat", label]))).labels[1] == label


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_json_does_not_have_is_refused(path: Path, number: str) -> None:
    text = json.dumps(whole_manifest(extra="HERE")).replace('"HERE"', number)
    write_zip(path, [("manifest.json", text.encode()), *FILES.items()])
    assert "is not JSON" in refusal(path)


def test_a_kill_at_any_moment_leaves_one_whole_bundle(path: Path) -> None:
    """A process that writes without end, killed again and again."""
    script = (
        "import sys\n"
        "from tests.test_bundle import *\n"
        "files = {**FILES, 'large': bytes(4_000_000)}\n"
        "for number in range(10**9):\n"
        "    write_bundle(Path(sys.argv[1]), {**manifest(), 'name': str(number)}, files)\n"
        "    print(number, flush=True)\n"
    )
    root = Path(__file__).resolve().parents[1]
    for moment in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", script, str(path)], cwd=root, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            finished = int(process.stdout.readline())
            time.sleep(0.006 * moment)
            process.kill()
            finished = int((process.stdout.read().split() or [str(finished)])[-1])
        # The one after the last that was reported may have got its name already.
        assert int(Bundle.load(path).name) in (finished, finished + 1)
