from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Iterator

import cv2
import numpy as np
import pytest

from edgevit.cli.run import usage_lines
from edgevit.policy import ExitPolicy
from edgevit.runtime.camera import open_camera
from edgevit.runtime.meter import Energy, Reading
from tests.tiny_bundle import GAINS, LABELS, expected, picture
from tests.videos import write_video

KEYS = ["frame", "time_s", "label", "score", "exit", "latency_ms", "age_ms"]
PROGRAM = "import sys; from edgevit.cli import main; sys.exit(main())"
TIMEOUT_S = 120


def start(bundle: Path, source: object, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "run", str(bundle), "--source", str(source), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(bundle: Path, source: object, *more: str) -> tuple[int, str, str]:
    with start(bundle, source, *more) as process, killed_late(process):
        out, err = process.communicate()
    return process.returncode, out, err


@contextlib.contextmanager
def killed_late(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the program where it hangs, so that reading from it ends."""
    timer = threading.Timer(TIMEOUT_S, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def decide(frame_bgr: np.ndarray) -> tuple[str, int, float]:
    """Label, exit and score of a uniform frame in the tiny bundle, by its arithmetic."""
    policy = ExitPolicy((0.7, 0.9))
    for stage in range(len(GAINS)):
        label, confidence = expected(frame_bgr, stage)
        if policy.leaves_at(stage, confidence):
            return LABELS[label], stage + 1, confidence
    raise AssertionError("the last stage always ends it")


# In this order the frames leave at exits 1, 2 and 3, in each colour.
PICTURES = [
    picture(label, strength) for strength in (1.0, 0.6, 0.2) for label in (2, 0, 1) for _ in "ab"
]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("clip") / "colours.avi", PICTURES, fps=10)


@pytest.fixture(scope="module")
def long_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its lines do not fit into a pipe, so that the program waits where a test does not read."""
    return write_video(tmp_path_factory.mktemp("clip") / "long.avi", [picture(0)] * 3000)


def test_every_frame_of_a_video_gets_the_right_label(tiny_bundle: Path, clip: Path) -> None:
    status, out, err = run(tiny_bundle, clip, "--json-lines")
    assert status == 0, err
    lines = objects(out)
    assert [list(line) for line in lines] == [KEYS] * len(PICTURES)
    assert [line["frame"] for line in lines] == list(range(len(PICTURES)))
    assert [line["time_s"] for line in lines] == pytest.approx(
        [i / 10 for i in range(len(PICTURES))]
    )
    decided = [decide(frame) for frame in PICTURES]
    assert {exit_ for _, exit_, _ in decided} == {1, 2, 3}
    assert [(line["label"], line["exit"]) for line in lines] == [d[:2] for d in decided]
    # JPEG moves the colours by a little.
    assert [line["score"] for line in lines] == pytest.approx([d[2] for d in decided], abs=0.03)
    for line in lines:
        assert 0 < line["latency_ms"] <= line["age_ms"]
    assert f"{len(PICTURES)} frames in" in err
    mean = sum(exit_ for _, exit_, _ in decided) / len(decided)
    assert f"Stages run: {mean:.2f} on average" in err
    assert "p50" in err
    assert "p90" in err
    assert "p99" in err


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_each_engine_gives_the_same_labels(tiny_bundle: Path, clip: Path, engine: str) -> None:
    pytest.importorskip(engine)
    status, out, err = run(tiny_bundle, clip, "--json-lines", "--engine", engine, "--threads", "1")
    assert status == 0, err
    assert [(line["label"], line["exit"]) for line in objects(out)] == [
        decide(frame)[:2] for frame in PICTURES
    ]
    assert f"latency on {engine} p50" in err


def test_plain_lines_without_a_terminal(tiny_bundle: Path, clip: Path) -> None:
    status, out, err = run(tiny_bundle, clip)
    assert status == 0, err
    lines = out.splitlines()
    assert len(lines) == len(PICTURES)
    for line, frame in zip(lines, PICTURES):
        assert decide(frame)[0] in line
    assert "frames in" not in out  # the summary is not for those who read the labels
    assert "frames in" in err


def test_it_stops_after_the_frames_asked_for(tiny_bundle: Path, clip: Path) -> None:
    status, out, err = run(tiny_bundle, clip, "--json-lines", "--frames", "3")
    assert status == 0, err
    assert [line["frame"] for line in objects(out)] == [0, 1, 2]
    assert "3 frames in" in err


def test_a_folder_of_odd_pictures(tiny_bundle: Path, tmp_path: Path) -> None:
    pictures = {
        "a/one_pixel.png": picture(2, height=1, width=1),
        "a/wide.png": picture(1, height=3, width=301),
        "b/grey.png": np.full((20, 21), 99, np.uint8),
        "b/red.png": picture(0, height=47, width=31),
    }
    for name, pixels in pictures.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        cv2.imwrite(str(tmp_path / name), pixels)
    status, out, err = run(tiny_bundle, tmp_path, "--json-lines")
    assert status == 0, err
    lines = objects(out)
    assert [lines[i]["label"] for i in (0, 1, 3)] == ["blue", "green", "red"]
    assert lines[2]["score"] == pytest.approx(1 / 3, abs=1e-3)  # grey is none of the three
    assert lines[2]["exit"] == 3


def test_a_truncated_video_warns_and_succeeds(
    tiny_bundle: Path, clip: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.avi"
    cut.write_bytes(clip.read_bytes()[: clip.stat().st_size * 4 // 5])
    with open_camera(cut) as camera:
        whole_frames = len(list(camera))
    assert 0 < whole_frames < len(PICTURES)
    status, out, err = run(tiny_bundle, cut, "--json-lines")
    assert status == 0
    assert len(objects(out)) == whole_frames
    assert err.count("cut.avi ends after") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_ends_it_with_whole_lines_and_the_summary(
    tiny_bundle: Path, long_clip: Path, number: signal.Signals, status: int
) -> None:
    with start(tiny_bundle, long_clip, "--json-lines") as process, killed_late(process):
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.send_signal(number)
        rest, err = process.stdout.read(), process.stderr.read()
    lines = objects(first + rest)
    assert process.returncode == status, err
    assert [line["frame"] for line in lines] == list(range(len(lines)))
    assert len(lines) < 3000
    assert re.search(rf"^{len(lines)} frames? in", err)
    assert "p99" in err
    assert "Traceback" not in err


def test_a_reader_that_leaves_ends_it_quietly(tiny_bundle: Path, long_clip: Path) -> None:
    with start(tiny_bundle, long_clip, "--json-lines") as process, killed_late(process):
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1
    assert "frames in" in err
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize(
    ("source", "named"),
    [("missing.mp4", "missing.mp4"), ("text.mp4", "text.mp4"), ("97", "/dev/video97")],
)
def test_a_source_that_cannot_be_opened_is_one_line(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, named: str
) -> None:
    (tmp_path / "text.mp4").write_text("not a video\n" * 100)
    monkeypatch.chdir(tmp_path)
    status, out, err = run(tiny_bundle, source, "--json-lines")
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert named in err


def test_a_damaged_picture_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "1.png"), picture(0))
    (tmp_path / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    status, out, err = run(tiny_bundle, tmp_path, "--json-lines")
    assert status == 2
    assert [line["label"] for line in objects(out)] == ["red"]
    assert "2.png" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "option", ["--frames=0", "--frames=-1", "--frames=many", "--frames=1.5", "--threads=-1"]
)
def test_a_number_that_cannot_be_meant(tiny_bundle: Path, clip: Path, option: str) -> None:
    status, out, err = run(tiny_bundle, clip, option)
    assert (status, out) == (2, "")
    assert "is not a whole number of at least" in err


def test_the_shared_clip_runs_to_its_end(tiny_bundle: Path, shared: Path) -> None:
    facts = json.loads((shared / "data/video/clothing_pan.json").read_text())
    status, out, err = run(tiny_bundle, shared / "data/video/clothing_pan.mp4", "--json-lines")
    assert status == 0, err
    assert [line["frame"] for line in objects(out)] == list(range(facts["frames"]))


def test_each_figure_is_there_or_why_not_is_said_once(tiny_bundle: Path, clip: Path) -> None:
    status, _, err = run(tiny_bundle, clip, "--json-lines")
    assert status == 0, err
    for name in ("Power", "Memory", "Temperature"):
        lines = [line for line in err.splitlines() if line.startswith(f"{name}: ")]
        assert len(lines) == 1
        assert re.search(r"\d|not measured \(.+\)", lines[0])


MEASURED = Reading(
    power_mw=6100.0,
    ram_used_bytes=2 << 30,
    ram_total_bytes=8 << 30,
    temperature_c=48.5,
    power_mode="MAXN",
    jetson_clocks=True,
    throttled=True,
    dropped=("NOISE: -5 mW is negative",),
    sources={"power_mw": "jtop 7.2.2"},
    points={"power_mw": "VDD_IN (module)", "temperature_c": "tj"},
)


def test_what_was_measured_is_said_with_where_and_under_what() -> None:
    energy = Energy(10.0, 500, 6000.0, 120.0, 80.0)
    assert usage_lines(MEASURED, energy, 2000.0) == [
        "Power: 6000 mW at VDD_IN (module), from jtop 7.2.2, power mode MAXN, jetson_clocks on; "
        "120.00 mJ a frame, 80.00 mJ above the idle 2000 mW",
        "Memory: 2.0 of 8.0 GiB in use on the whole machine",
        "Temperature: 48.5 °C (tj), clocks held down by heat",
        "Power rail left out: NOISE: -5 mW is negative",
    ]


def test_a_short_run_has_power_and_no_energy() -> None:
    (line, *_) = usage_lines(MEASURED, None, None)
    assert line.startswith("Power: 6100 mW at VDD_IN (module)")
    assert line.endswith("no energy per frame: power was measured for less than 2 s")


def test_an_idle_time_too_short_to_measure_is_refused(tiny_bundle: Path, clip: Path) -> None:
    status, out, err = run(tiny_bundle, clip, "--idle", "1")
    assert (status, out) == (2, "")
    assert "is not a whole number of at least 2" in err
