from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edgevit.errors import DataError
from edgevit.images import ImageFolder, read_image

ORIENTATION = 0x0112
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def quadrants(height: int = 64, width: int = 96) -> np.ndarray:
    """RGB: red top left, green top right, blue bottom left, white bottom right."""
    corners = np.array([[RED, GREEN], [BLUE, WHITE]], np.uint8)
    return corners.repeat(height // 2, 0).repeat(width // 2, 1)


def noise(height: int = 64, width: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def encode(pixels: np.ndarray, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


def read(folder: Path, data: bytes, name: str = "image.jpg") -> np.ndarray:
    path = folder / name
    path.write_bytes(data)
    return read_image(path)


def assert_close(bgr: np.ndarray, rgb: np.ndarray, tolerance: int) -> None:
    """JPEG changes colours a little, and where two of them meet by a lot: compare the rest."""
    assert bgr.dtype == np.uint8
    assert bgr.shape == rgb.shape
    off = np.abs(bgr[:, :, ::-1].astype(int) - rgb.astype(int)).max(2) > tolerance
    assert off.mean() < 0.05


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {"lossless": True}),
    ],
)
def test_lossless_formats_give_the_very_pixels_in_bgr(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    pixels = noise(17, 23)
    found = read(tmp_path, encode(pixels, kind, **options), f"image.{kind.lower()}")
    np.testing.assert_array_equal(found, pixels[:, :, ::-1])


def test_the_content_decides_what_it_is_not_the_name(tmp_path: Path) -> None:
    found = read(tmp_path, encode(noise(), "PNG"), "image.jpg")
    np.testing.assert_array_equal(found, noise()[:, :, ::-1])


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_grey_is_repeated_over_the_channels(tmp_path: Path, kind: str) -> None:
    grey = np.arange(0, 256, 4, dtype=np.uint8)[None].repeat(32, 0)
    found = read(tmp_path, encode(grey, kind))
    assert found.shape == (32, 64, 3)
    assert (found == found[:, :, :1]).all()
    assert np.abs(found[:, :, 0].astype(int) - grey).max() <= 3


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    grey = np.array([[0, 0x3FFF, 0x8000, 0xFFFF]], np.uint16)
    found = read(tmp_path, encode(grey, "PNG"), "image.png")
    assert found.shape == (1, 4, 3)
    assert np.abs(found[0, :, 0].astype(int) - [0, 63, 128, 255]).max() <= 1


def test_alpha_is_dropped(tmp_path: Path) -> None:
    rgba = np.dstack([noise(8, 8), np.tile(np.array([0, 255], np.uint8), (8, 4))])
    found = read(tmp_path, encode(rgba, "PNG"), "image.png")
    np.testing.assert_array_equal(found, rgba[:, :, 2::-1])


def test_a_palette_becomes_colours(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(quadrants()).convert("P", palette=Image.Palette.ADAPTIVE, colors=4).save(
        stream, "PNG"
    )
    found = read(tmp_path, stream.getvalue(), "image.png")
    np.testing.assert_array_equal(found, quadrants()[:, :, ::-1])


def test_cmyk_is_converted(tmp_path: Path) -> None:
    # In inks, 255 is full: red is no cyan, and white is no ink at all.
    inks = np.array([[(0, 255, 255, 0), (255, 0, 255, 0)], [(255, 255, 0, 0), (0, 0, 0, 0)]])
    stream = io.BytesIO()
    Image.frombytes(
        "CMYK", (96, 64), inks.astype(np.uint8).repeat(32, 0).repeat(48, 1).tobytes()
    ).save(stream, "JPEG", quality=95)
    assert_close(read(tmp_path, stream.getvalue()), quadrants(), tolerance=12)


# What an EXIF orientation says is stored, turned back: EXIF 2.32, tag 0x0112.
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).transpose(1, 0, 2),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_rotation_is_applied(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encode(quadrants(), "JPEG", quality=95, subsampling=0, exif=exif)
    assert_close(read(tmp_path, data), UPRIGHT[orientation](quadrants()), tolerance=12)


def test_one_pixel(tmp_path: Path) -> None:
    for kind in ("PNG", "JPEG", "BMP"):
        found = read(tmp_path, encode(np.full((1, 1, 3), 200, np.uint8), kind))
        assert found.shape == (1, 1, 3)
        assert np.abs(found.astype(int) - 200).max() <= 2


# A photograph as a camera writes it: its thumbnail holds start and end markers of its own.
def with_thumbnail() -> bytes:
    thumbnail = encode(noise(16, 16), "JPEG")
    app1 = b"Exif\0\0" + thumbnail
    whole = encode(noise(), "JPEG", quality=90)
    return whole[:2] + b"\xff\xe1" + (len(app1) + 2).to_bytes(2, "big") + app1 + whole[2:]


FILES = {
    "baseline.jpg": encode(noise(), "JPEG", quality=90),
    "progressive.jpg": encode(noise(), "JPEG", quality=90, progressive=True),
    "thumbnail.jpg": with_thumbnail(),
    "picture.png": encode(noise(), "PNG"),
    "picture.bmp": encode(noise(), "BMP"),
    "picture.webp": encode(noise(), "WEBP"),
    "picture.tif": encode(noise(), "TIFF"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_whole_file_can_be_read(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, FILES[name], name).shape == (64, 64, 3)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(FILES)))
def test_a_file_cut_anywhere_is_refused_and_named(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    whole = FILES[name]
    # From a picture's last bytes on only its end marker is missing, which is still an incomplete file.
    kept = data.draw(
        st.one_of(st.integers(0, len(whole) - 1), st.integers(len(whole) - 40, len(whole) - 1))
    )
    folder = tmp_path_factory.mktemp("cut")
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        read(folder, whole[:kept], name)


@settings(max_examples=60, deadline=None)
@given(position=st.integers(8, len(FILES["picture.png"]) - 13), flip=st.integers(1, 255))
def test_a_damaged_png_is_refused_or_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, position: int, flip: int
) -> None:
    damaged = bytearray(FILES["picture.png"])
    damaged[position] ^= flip
    try:
        found = read(tmp_path_factory.mktemp("damaged"), bytes(damaged), "picture.png")
    except DataError:
        return
    np.testing.assert_array_equal(found, noise()[:, :, ::-1])


@pytest.mark.parametrize("data", [b"", b"\n", b"not an image\n" * 40, b"\xff\xd8\xff", b"\x89PNG"])
def test_what_is_no_image_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DataError, match=r"odd\.jpg is damaged or not an image"):
        read(tmp_path, data, "odd.jpg")


def test_a_png_that_claims_an_absurd_size_is_refused(tmp_path: Path) -> None:
    import zlib

    data = bytearray(encode(noise(), "PNG"))
    data[16:24] = (0x7FFFFFFF).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    with pytest.raises(DataError, match="huge"):
        read(tmp_path, bytes(data), "huge.png")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jpg"):
        read_image(tmp_path / "gone.jpg")
    with pytest.raises(DataError, match=str(tmp_path)):
        read_image(tmp_path)


def folder_of(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


def test_a_folder_is_listed_in_name_order(tmp_path: Path) -> None:
    folder_of(
        tmp_path,
        "b/2.PNG",
        "b/10.jpg",
        "a/x.jpeg",
        "a/notes.txt",
        "a/._x.jpg",
        ".cache/y.jpg",
        "z.jpg",
    )
    found = ImageFolder.scan(tmp_path)
    assert found.classes == ("a", "b")
    assert [str(path.relative_to(tmp_path)) for path in found.paths] == [
        "a/x.jpeg",
        "b/10.jpg",
        "b/2.PNG",
    ]
    assert found.labels == (0, 1, 1)
    assert len(found) == 3


def test_labels_index_into_the_classes_given(tmp_path: Path) -> None:
    folder_of(tmp_path, "cat/1.jpg", "ant/1.jpg")
    found = ImageFolder.scan(tmp_path, ("dog", "cat", "ant"))
    assert found.classes == ("dog", "cat", "ant")
    assert found.labels == (2, 1)


def test_a_class_that_the_model_lacks_is_named(tmp_path: Path) -> None:
    folder_of(tmp_path, "cat/1.jpg", "cow/1.jpg")
    with pytest.raises(DataError, match=r"not trained on: cow;.*known: cat, dog"):
        ImageFolder.scan(tmp_path, ("cat", "dog"))


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    folder_of(tmp_path, "cat/1.jpg", "dog/readme.txt")
    with pytest.raises(DataError, match="dog holds no images"):
        ImageFolder.scan(tmp_path)


def test_a_folder_named_like_an_image_is_not_one(tmp_path: Path) -> None:
    folder_of(tmp_path, "cat/1.jpg", "cat/old.jpg/2.jpg")
    assert len(ImageFolder.scan(tmp_path)) == 1


def test_folders_that_hold_no_classes(tmp_path: Path) -> None:
    folder_of(tmp_path / "flat", "1.jpg")
    for root in (tmp_path / "missing", tmp_path / "flat", tmp_path / "flat/1.jpg"):
        with pytest.raises(DataError, match=str(root)):
            ImageFolder.scan(root)


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[31mred", "not-utf-8-\udcff"])
def test_a_class_that_could_not_be_printed_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match="rename it") as caught:
        ImageFolder.scan(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "trailer", [b"\0" * 200, b"film \xff\xda\0\x08 and no end", b"\xff\xd8\xff"]
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_what_follows_a_whole_image_does_not_count(
    tmp_path: Path, kind: str, trailer: bytes
) -> None:
    """Phones append films and depth maps."""
    data = encode(noise(40, 30), kind)
    (tmp_path / "alone").write_bytes(data)
    (tmp_path / "followed").write_bytes(data + trailer)
    np.testing.assert_array_equal(read_image(tmp_path / "followed"), read_image(tmp_path / "alone"))


def test_a_pipe_named_as_an_image_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    (tmp_path / "a" / "real.png").write_bytes(encode(noise(4, 4), "PNG"))
    assert [path.name for path in ImageFolder.scan(tmp_path).paths] == ["real.png"]
