"""Photographs: decoding to pixels, and folders with one folder a class. Both machines use it."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import List, Tuple, Union

import cv2
import numpy as np

from edgevit.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")


def read_image(path: Union[str, Path]) -> np.ndarray:
    """Decode an image file to ``uint8 [H, W, 3]``, BGR, with its EXIF rotation applied.

    Greyscale is repeated over the channels, 16 bits are scaled to 8, an alpha channel is dropped,
    CMYK is converted. Raises :class:`DataError`, which names the file, for one that can't be decoded
    or is cut short: a decoder would fill the missing part with grey and say nothing. A JPEG that is
    whole but altered in the middle is decoded, as by every decoder, as far as it goes.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}") from None
    image = None
    if data and not _is_cut_short(data):
        try:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        except cv2.error:  # absurd sizes
            image = None
    if image is None:
        raise DataError(f"{path} is damaged or not an image; replace or remove it")
    return image


# A marker in a JPEG: 0xFF (repeated as filling) and a code. In compressed data 0xFF is followed by 00
# or by a restart marker (D0 to D7).
_JPEG_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])", re.DOTALL)
_END_OF_IMAGE = b"\xd9"


def _is_cut_short(data: bytes) -> bool:
    """Whether a JPEG or PNG ends before its end marker; what follows the marker does not count.

    Cameras append films and depth maps, and embed thumbnails, whose markers are not the image's.
    """
    if data.startswith(b"\xff\xd8"):
        position = 2
        while True:
            marker = _JPEG_MARKER.search(data, position)
            if marker is None:
                return True
            if marker.group(1) == _END_OF_IMAGE:
                return False
            # Every other marker heads a segment that says its length.
            length = int.from_bytes(data[marker.end() : marker.end() + 2], "big")
            position = marker.end() + max(length, 2)
    if data.startswith(b"\x89PNG"):
        position = 8
        while position + 12 <= len(data):
            if data[position + 4 : position + 8] == b"IEND":
                return False
            position += 12 + int.from_bytes(data[position : position + 4], "big")
        return True
    return False


def is_label(name: str) -> bool:
    """Whether ``name`` can be a class's: not empty, and safe to print in any script and encode.

    Control characters would let a bundle write to the terminal of who runs it; surrogates stand for
    file names that are not UTF-8.
    """
    return bool(name) and not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name)


@dataclass(frozen=True)
class ImageFolder:
    """Labelled images: ``root/<class>/<image>``, classes and images in name order."""

    root: Path
    classes: Tuple[str, ...]
    paths: Tuple[Path, ...]
    labels: Tuple[int, ...]

    def __len__(self) -> int:
        return len(self.paths)

    @classmethod
    def scan(cls, root: Union[str, Path], classes: Tuple[str, ...] = ()) -> ImageFolder:
        """List a folder; nothing is decoded.

        With ``classes``, labels index into it and a class folder outside it is an error. Raises
        :class:`DataError` for a missing folder, no class folders or a class without images.
        """
        root = Path(root)
        if not root.is_dir():
            raise DataError(f"{root} is not a folder; it must hold one folder of images a class")
        folders = sorted(
            entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
        )
        if not folders:
            raise DataError(f"{root} holds no class folders; put the images in {root}/<class>/")
        for folder in folders:
            if not is_label(folder.name):
                raise DataError(
                    f"class folder {str(folder)!r} has control characters in its name or is not UTF-8; "
                    "rename it"
                )
        unknown = [folder.name for folder in folders if classes and folder.name not in classes]
        if unknown:
            raise DataError(
                f"{root} has class folders that the model was not trained on: {', '.join(unknown)}; "
                f"remove them or train with them (known: {', '.join(classes)})"
            )
        names = classes or tuple(folder.name for folder in folders)
        paths: List[Path] = []
        labels: List[int] = []
        for folder in folders:
            images = sorted(
                path
                for path in folder.iterdir()
                if path.suffix.lower() in SUFFIXES
                and not path.name.startswith(".")
                and path.is_file()  # not a folder, nor a pipe, whose reading would never end
            )
            if not images:
                raise DataError(
                    f"class folder {folder} holds no images ({', '.join(SUFFIXES)}); "
                    "add some or remove the folder"
                )
            paths += images
            labels += [names.index(folder.name)] * len(images)
        return cls(root, names, tuple(paths), tuple(labels))
