"""The shipped recipe on real data sets, as a user runs it: what must be reached and what may be lost.

The floors are those of linear probes on the same frozen backbone, measured with other code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[1] / "models" / "clothing10_vit_small_192.toml"


@dataclass(frozen=True)
class Floor:
    """Top-1 of the float model at each exit, the largest loss in points, the mean stages."""

    images: int
    exits: tuple[float, float, float]
    drop_points: float
    mean_stages: float = 3.0


FLOORS = {
    "flowers17": Floor(272, (0.85, 0.93, 0.955), 0.75, 2.1),
    "clothing10": Floor(341, (0.75, 0.79, 0.80), 0.6),
}


@pytest.mark.parametrize("name", FLOORS)
def test_accuracy_is_reached_and_kept(name: str, shared: Path, tmp_path: Path) -> None:
    floor = FLOORS[name]
    data = shared / "data" / name
    command = [sys.executable, "-m", "edgevit", "compress", str(RECIPE), "--out", str(tmp_path)]
    for key, value in (
        ("data.train", data / "train"),
        ("data.val", data / "val"),
        ("budget.max_drop_points", floor.drop_points),
    ):
        command += ["--set", f"{key}={value}"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["float"]["n"] == report["bundle"]["n"] == floor.images
    assert report["data"]["val_in_train"] == 0
    for reached, wanted in zip(report["float"]["exits"], floor.exits, strict=True):
        assert reached["top1"] >= wanted, reached
    assert report["drop_points"] <= floor.drop_points
    assert report["bundle"]["mean_stages"] <= floor.mean_stages
    assert report["quantization"]["macs_int8_share"] > 0.9
