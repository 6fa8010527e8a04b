"""What ``report.json`` says of a run of ``edgevit compress``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from edgevit.machine import machine_facts
from edgevit.policy import ExitPolicy
from edgevit.recipe import Recipe


@dataclass(frozen=True)
class Measurements:
    """Everything that the steps of a run measured; the report is arithmetic on it.

    ``labels [n]`` are the validation images', ``float_top1`` and ``bundle_top1 [exits, n]`` the
    labels found at every exit, at full depth, by PyTorch and by the bundle. ``evaluation`` is the
    runtime's, with frames leaving where they are sure.
    """

    recipe: Recipe
    classes: tuple[str, ...]
    train_images: int
    val_images_in_train: int
    lone_classes: tuple[str, ...]
    skipped: tuple[Path, ...]
    exit_blocks: tuple[int, ...]
    policy: ExitPolicy
    labels: np.ndarray
    float_top1: np.ndarray
    bundle_top1: np.ndarray
    evaluation: dict[str, Any]
    benchmark: dict[str, Any]
    layers: list[dict[str, Any]]
    macs: int
    calibration: dict[str, Any] | None
    parity: dict[str, Any]
    float_bytes: int
    bundle_bytes: int
    seconds: dict[str, float]

    @property
    def drop_points(self) -> float:
        """Top-1 of the float model minus that of the bundle, in percentage points."""
        float_right = int((self.float_top1[-1] == self.labels).sum())
        bundle_right = int(0.5 + self.evaluation["top1"] * self.evaluation["n"])
        return 100.0 * (float_right - bundle_right) / len(self.labels)

    @property
    def within_budget(self) -> bool:
        return self.drop_points <= self.recipe.budget.max_drop_points


def build_report(found: Measurements) -> dict[str, Any]:
    """The content of ``report.json``; ``size_bytes.bundle`` is without the report inside it."""
    labels = found.labels
    speedup = found.benchmark["speedup"]
    int8_macs = sum(layer["macs"] for layer in found.layers if layer["quantized"])
    return {
        "format": "edgevit-report",
        "version": 1,
        "name": run_name(found.recipe),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "recipe": found.recipe.to_json(),
        "float": {
            "top1": float((found.float_top1[-1] == labels).mean()),
            "n": len(labels),
            "exits": [
                {"block": block, "top1": float((top1 == labels).mean())}
                for block, top1 in zip(found.exit_blocks, found.float_top1, strict=True)
            ],
        },
        "bundle": {**found.evaluation, "exits": _exits(found)},
        "drop_points": found.drop_points,
        "agreement": float((found.bundle_top1[-1] == found.float_top1[-1]).mean()),
        "speedup": speedup and speedup["median"],
        "benchmark": found.benchmark,
        "size_bytes": {"float": found.float_bytes, "bundle": found.bundle_bytes},
        "quantization": {
            "mode": found.recipe.quantize.mode,
            "layers": found.layers,
            "macs_int8_share": int8_macs / found.macs,
        },
        "calibration": found.calibration,
        "parity": found.parity,
        "data": {
            "train": found.train_images,
            "val": len(labels),
            # Images that were trained on: above zero, the accuracies here are too good.
            "val_in_train": found.val_images_in_train,
            "classes": list(found.classes),
            # Classes with one training image: no exit was judged on them.
            "lone_classes": list(found.lone_classes),
            "skipped": [_printable(str(path)) for path in found.skipped],
        },
        "policy": found.policy.to_json(),
        "budget": {
            "max_drop_points": found.recipe.budget.max_drop_points,
            "met": found.within_budget,
        },
        "steps": [{"name": name, "seconds": seconds} for name, seconds in found.seconds.items()],
        "machine": machine_facts(),
    }


def run_name(recipe: Recipe) -> str:
    """What bundle and report are called: the recipe's file name without its ending."""
    return _printable(Path(recipe.source).stem) or recipe.model.name


def _printable(text: str) -> str:
    """File names may hold line breaks and bytes that are not UTF-8, which text must not."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _exits(found: Measurements) -> list[dict[str, Any]]:
    counts = found.evaluation["exit_counts"]
    rows = zip(
        found.exit_blocks,
        found.bundle_top1,
        found.float_top1,
        [*found.policy.thresholds, None],
        counts,
        strict=True,
    )
    return [
        {
            "block": block,
            "top1": float((top1 == found.labels).mean()),
            "agreement": float((top1 == float_top1).mean()),
            "threshold": threshold,
            "share": count / sum(counts),
        }
        for block, top1, float_top1, threshold, count in rows
    ]
