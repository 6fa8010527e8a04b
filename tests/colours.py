"""A small compression task that takes seconds: photographs of three colours, a backbone of random
weights at 32 pixels and a recipe for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

CLASSES = ("blue", "green", "red")
TRAIN_IMAGES, VAL_IMAGES = 24, 30  # a class
BLOCKS = (4, 8)
SIZE = 32


def write_photographs(root: Path, images: int, seed: int) -> None:
    """``images`` a class. Each has a tint of its own, so that some are hard to tell apart."""
    generator = np.random.default_rng(seed)
    for channel, name in zip((2, 1, 0), CLASSES, strict=True):
        (root / name).mkdir(parents=True)
        for number in range(images):
            colour = 110 + generator.normal(0, 12, 3)
            colour[channel] += 22
            pixels = colour + generator.normal(0, 20, (40, 52, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(root / name / f"{number:02d}.png")


def write_task(root: Path) -> Path:
    """Everything a run needs, in ``root``; returns the recipe."""
    write_photographs(root / "train", TRAIN_IMAGES, seed=0)
    write_photographs(root / "val", VAL_IMAGES, seed=1)
    torch.manual_seed(0)
    backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    save_file(backbone.state_dict(), root / "weights.safetensors")
    recipe = root / "colours.toml"
    recipe.write_text(
        f"""
        [model]
        name = "vit_tiny_patch16_224"
        checkpoint = "weights.safetensors"
        image_size = {SIZE}
        [data]
        train = "train"
        val = "val"
        [train]
        folds = 2
        [quantize]
        calibration_images = 24
        [exits]
        blocks = {list(BLOCKS)}
        max_lost = 0.1
        [target]
        engine = "onnxruntime"
        threads = 1
        check_images = 6
        [budget]
        max_drop_points = 100
        """
    )
    return recipe


class FakeBenchmark:
    """In the place of a benchmark, which takes long and is tested by itself."""

    def to_json(self) -> dict[str, Any]:
        side = {"latency_ms_p50": 1.0, "latency_ms_mean": 1.0}
        return {
            "baseline": {"name": "nothing", **side},
            "baseline_reason": None,
            "bundle": {"engine": "none", **side},
            "speedup": {"median": 1.0, "min": 1.0, "max": 1.0},
            "runs": [],
        }


def fake_bench(
    bundle: Path, frames: np.ndarray, *, progress: Callable[[int, int], None], **request: Any
) -> FakeBenchmark:
    progress(1, 1)
    return FakeBenchmark()
