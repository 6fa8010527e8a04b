from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import cv2
import pytest

from edgevit.cli import bench as command
from edgevit.errors import DataError
from edgevit.report import benchmark
from tests.tiny_bundle import picture


def parsed(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_json_alone_on_standard_output(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]):
    words = (tiny_bundle, "--engine", "onnxruntime", "--threads", 1, "--rounds", 2, "--json")
    assert command.run(parsed(*words)) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["bundle"]["engine"] == "onnxruntime"
    assert report["bundle"]["latency_ms_p50"] > 0
    assert len(report["runs"]) == 2  # timm has no model 'tiny', so there is no baseline
    assert report["baseline"] is None and "'tiny'" in report["baseline_reason"]
    assert "2 of 2" in captured.err


def test_a_folder_of_images(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # Grey: sure nowhere but at the end. Red: sure at the first exit.
    cv2.imwrite(str(tmp_path / "grey.png"), picture(0, 0.0))
    cv2.imwrite(str(tmp_path / "red.png"), picture(0, 1.0))
    words = (tiny_bundle, "--data", tmp_path, "--engine", "onnxruntime", "--rounds", 1)
    assert command.run(parsed(*words)) == 0
    printed = capsys.readouterr().out
    assert "2 frames" in printed
    assert "Stages run: 2.00 of 3" in printed
    assert "50 %, 0 %, 50 %" in printed
    assert "no baseline" in printed


def test_a_folder_that_is_not_there(tiny_bundle: Path, tmp_path: Path):
    with pytest.raises(DataError, match="--data"):
        command.run(parsed(tiny_bundle, "--data", tmp_path / "nowhere"))


def test_text_names_every_statistic(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    turns = (
        benchmark.Turn("baseline", 1, 0.0, (30.0, 30.0, 60.0), (1, 1, 1)),  # mean 40, typical 30
        benchmark.Turn(
            "bundle", 1, 1.0, (5.0, 5.0, 14.0), (1, 1, 3)
        ),  # mean 8, typical 5 * 2/3 + 14 / 3 = 8
    )
    machine = {"cpu_model": "Some CPU", "cpu_flags": ["avx2"], "load_1min": 0.1}
    sides = {"peak_memory_bytes": 200_000_000}
    result = benchmark.Benchmark(
        {"name": "ponds", "engine": "openvino", **sides},
        {"name": benchmark.BASELINE, "peak_memory_bytes": None},
        None,
        turns,
        stages=3,
        frames=3,
        threads=2,
        created="2026-01-01",
        machine=machine,
    )
    monkeypatch.setattr(benchmark, "bench", lambda *args: result)
    assert command.run(parsed(tiny_bundle)) == 0
    printed = capsys.readouterr().out
    assert "3.8 times faster by typical latency" in printed
    assert "5.0 times by mean, 6.0 by median" in printed
    assert "200 MB" in printed and "unknown" in printed


def test_help_imports_nothing_heavy():
    script = (
        "import argparse, sys\n"
        "from edgevit.cli import bench\n"
        "bench.add_arguments(argparse.ArgumentParser())\n"
        "print([m for m in ('numpy', 'cv2', 'torch', 'onnxruntime', 'openvino', 'rich') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
