"""What `scripts/demo` does after the set-up, with what ships and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def edgevit(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "edgevit", *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    edgevit("compress", "models/clothing10_vit_small_192.toml", "--out", str(out))
    return out


def test_the_bundle_is_what_the_report_says(run_folder: Path) -> None:
    report = json.loads((run_folder / "report.json").read_text())
    measured = json.loads(
        edgevit(
            "eval", f"{run_folder}/bundle.evb", "--data", "calibration/clothing10/val", "--json"
        )
    )
    for key in ("n", "top1", "mean_stages", "exit_counts"):
        assert measured[key] == report["bundle"][key]
    assert report["budget"]["met"]
    assert report["size_bytes"]["bundle"] < report["size_bytes"]["float"] / 3
    assert "<html" in (run_folder / "report.html").read_text()


def test_every_frame_of_the_clip_gets_a_label(run_folder: Path) -> None:
    """The clip shows images of the val folder; they must be told right far above chance."""
    truth = json.loads((ROOT / "examples" / "clothing_pan.json").read_text())
    lines = edgevit(
        "run", f"{run_folder}/bundle.evb", "--source", "examples/clothing_pan.mp4", "--json-lines"
    ).splitlines()
    frames = [json.loads(line) for line in lines]
    assert [frame["frame"] for frame in frames] == list(range(truth["frames"]))
    right = Counter(
        frames[number]["label"] == segment["label"]
        for segment in truth["segments"]
        for number in range(segment["first_frame"], segment["last_frame"] + 1)
    )
    # Ten pictures alone, so that one garment is a tenth of the frames; chance is one in ten.
    assert right[True] / truth["frames"] > 0.3


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_no_linear_layer_falls_back_to_float(run_folder: Path, engine: str) -> None:
    from edgevit.bundle import Bundle
    from edgevit.engines import open_stages

    stages = open_stages(Bundle.load(run_folder / "bundle.evb"), engine=engine)
    kernels = [stages[number].linear_layers() for number in range(len(stages))]
    # Four layers a block, a head a stage, and the patch embedding in the first.
    assert [len(found) for found in kernels] == [6 * 4 + 2, 3 * 4 + 1, 3 * 4 + 1]
    assert [kernel for found in kernels for kernel, int8 in found if not int8] == []
