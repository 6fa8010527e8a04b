from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from edgevit.bundle import Bundle, write_bundle
from edgevit.errors import DataError, EdgevitError, UserError
from edgevit.report import benchmark
from edgevit.report.benchmark import Benchmark, Turn, bench, load_frames
from tests.tiny_bundle import SIZE, expected, picture, write_tiny_bundle

REPOSITORY = Path(__file__).resolve().parents[2]
FRAMES = np.zeros((4, SIZE, SIZE, 3), np.uint8)


def rewritten(bundle_path: Path, target: Path, **changes: object) -> Path:
    """A copy of a bundle with other entries in its manifest."""
    bundle = Bundle.load(bundle_path)
    manifest = {
        key: value
        for key, value in bundle.manifest.items()
        if key not in ("format", "version", "files")
    }
    files = {name: bundle.read(name) for name in bundle.manifest["files"]}
    return write_bundle(target, {**manifest, **changes}, files)


@pytest.fixture(scope="module")
def vit_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle, said to be made from a backbone that timm has, at the same size."""
    folder = tmp_path_factory.mktemp("bench")
    model = {"name": "vit_tiny_patch16_224", "image_size": SIZE, "patch_size": 16}
    return rewritten(write_tiny_bundle(folder / "tiny.evb"), folder / "vit.evb", model=model)


def test_speed_up_is_a_ratio_within_a_round():
    turns = (
        Turn("baseline", 1, 0.0, (10.0, 10.0, 40.0), (1, 1, 1)),  # mean 20, typical and median 10
        Turn("bundle", 1, 1.0, (1.0, 2.0, 6.0), (1, 1, 3)),  # mean 3, median 2, typical 3
        Turn("baseline", 2, 2.0, (12.0, 12.0, 12.0), (1, 1, 1)),  # mean 12, median 12
        Turn("bundle", 2, 3.0, (1.0, 1.0, 1.0), (1, 1, 3)),  # mean 1, median 1
        Turn("baseline", 3, 4.0, (8.0, 8.0, 8.0), (1, 1, 1)),  # mean 8, median 8
        Turn("bundle", 3, 5.0, (2.0, 2.0, 2.0), (1, 1, 3)),  # mean 2, median 2
    )
    report = Benchmark(
        {"engine": "e"}, {"name": "b"}, None, turns, 3, 3, 2, "2026-01-01", {}
    ).to_json()
    # typical, the first bundle turn: 1.5 for two thirds of the frames and 6 for one third, so 3
    assert report["speedup"] == {
        "median": 4.0,
        "min": 3.333,
        "max": 12.0,
        "statistic": "median latency of the frames that leave at an exit, weighted by their share",
        "per_round": [3.333, 12.0, 4.0],
    }
    assert report["speedup_mean"]["per_round"] == [6.667, 12.0, 4.0]
    assert report["speedup_p50"]["per_round"] == [5.0, 12.0, 4.0]
    assert report["bundle"]["latency_ms_p50"] == 2.0  # of 1 1 1 1 2 2 2 2 6
    assert report["bundle"]["latency_ms_typical"] == 2.0  # of 3, 1, 2
    assert report["bundle"]["latency_ms_typical_spread"] == [1.0, 3.0]
    assert report["baseline"]["latency_ms_mean"] == 13.3333  # 120 / 9
    assert report["bundle"]["mean_stages"] == 1.6667
    assert report["bundle"]["exit_share"] == [0.6667, 0.0, 0.3333]
    assert [(run["round"], run["side"]) for run in report["runs"]] == [
        (number, side) for number in (1, 2, 3) for side in ("baseline", "bundle")
    ]
    assert json.loads(json.dumps(report)) == report


def test_both_sides_run_for_real(vit_bundle: Path):
    seen: list[tuple[int, int]] = []
    frames = np.stack([Bundle.load(vit_bundle).preprocess(f) for f in real_frames()])
    report = bench(
        vit_bundle,
        frames,
        engine="onnxruntime",
        threads=1,
        rounds=2,
        progress=lambda done, total: seen.append((done, total)),
    ).to_json()
    assert report["baseline_reason"] is None
    assert report["baseline"]["name"] == "eager PyTorch float32"
    assert report["baseline"]["model"] == "vit_tiny_patch16_224"
    assert report["bundle"]["engine"] == "onnxruntime"
    assert report["threads"] == 1 and report["frames"] == 3
    assert report["speedup"]["min"] <= report["speedup"]["median"] <= report["speedup"]["max"]
    # Which exit a uniform frame takes follows from the arithmetic of the tiny bundle.
    stages = [stages_by_arithmetic(frame) for frame in real_frames()]
    assert sorted(stages) == [1, 2, 3]
    assert report["bundle"]["mean_stages"] == 2.0
    assert report["bundle"]["exit_share"] == [0.3333, 0.3333, 0.3333]
    for side in ("baseline", "bundle"):
        assert report[side]["latency_ms_p50"] > 0
        assert report[side]["peak_memory_bytes"] > 10e6
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert report["machine"]["versions"]["torch"]
    assert report["machine"]["cores_usable"] >= 1


def real_frames() -> list[np.ndarray]:
    return [picture(0, 1.0), picture(1, 0.5), picture(2, 0.05)]


def stages_by_arithmetic(frame: np.ndarray) -> int:
    for stage, threshold in enumerate((0.7, 0.9)):
        if expected(frame, stage)[1] >= threshold:
            return stage + 1
    return 3


def test_without_torch_the_bundle_is_still_measured(
    vit_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "torch.py").write_text("raise ImportError(\"No module named 'torch'\")\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # the workers inherit sys.path
    report = bench(vit_bundle, engine="onnxruntime", threads=1, rounds=2).to_json()
    assert report["baseline"] is None
    assert "No module named 'torch'" in report["baseline_reason"]
    assert report["speedup"] is None and report["speedup_p50"] is None
    assert report["bundle"]["latency_ms_p50"] > 0
    assert [run["side"] for run in report["runs"]] == ["bundle", "bundle"]


def test_a_model_that_timm_lacks_is_a_reason(tiny_bundle: Path):
    report = bench(tiny_bundle, engine="onnxruntime", threads=1, rounds=1).to_json()
    assert report["baseline"] is None
    assert "'tiny'" in report["baseline_reason"]


def test_an_engine_that_does_not_exist_is_a_user_error(tiny_bundle: Path):
    with pytest.raises(UserError, match="no-such-engine"):
        bench(tiny_bundle, engine="no-such-engine", threads=1, rounds=1)


# Stand-ins for a side. They are named, not defined inside tests: workers import them.


def _logging_side(log: str, name: str) -> benchmark._Side:
    def classify(frame: np.ndarray) -> int:
        with Path(log).open("a") as stream:
            stream.write(f"{name} {time.monotonic_ns()}\n")
        return 1

    return benchmark._Side(classify, lambda frame: None, {"name": name, "engine": name})


def _bundle_that_logs(path: str, engine: str, threads: int) -> benchmark._Side:
    return _logging_side(os.environ["EDGEVIT_TEST_LOG"], "bundle")


def _baseline_that_logs(*args: object) -> benchmark._Side:
    return _logging_side(os.environ["EDGEVIT_TEST_LOG"], "baseline")


def _killed(*args: object) -> benchmark._Side:
    def classify(frame: np.ndarray) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 1

    return benchmark._Side(classify, lambda frame: None, {})


def _crashes_at_start(*args: object) -> benchmark._Side:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def _leaves(*args: object) -> benchmark._Side:
    os._exit(7)


def _hangs(*args: object) -> benchmark._Side:
    time.sleep(600)
    raise AssertionError


def _fails(*args: object) -> benchmark._Side:
    raise ZeroDivisionError("a tensor of no size")


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEVIT_TEST_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(benchmark, "_bundle_side", _bundle_that_logs)
    monkeypatch.setattr(benchmark, "_baseline_side", _baseline_that_logs)
    monkeypatch.setattr(benchmark, "_SETTLE_S", 0.0)
    return tmp_path / "log"


def test_turns_alternate_and_never_overlap(tiny_bundle: Path, logged: Path):
    result = bench(tiny_bundle, FRAMES, rounds=3)
    assert [(turn.side, turn.round) for turn in result.turns] == [
        (side, number) for number in (1, 2, 3) for side in ("baseline", "bundle")
    ]
    # What the workers themselves wrote, by their clocks.
    lines = sorted((line.split() for line in logged.read_text().splitlines()), key=lambda x: x[1])
    assert len(lines) == 6 * 32  # 4 frames, repeated to 32
    assert [side for side, _ in itertools.groupby(line[0] for line in lines)] == [
        "baseline",
        "bundle",
    ] * 3


@pytest.mark.parametrize(
    ("stand_in", "message"),
    [
        (_killed, r"baseline's process was killed .*memory"),
        (_crashes_at_start, r"baseline's process crashed: SIGSEGV"),
        (_leaves, r"baseline's process ended early with status 7"),
        (_hangs, r"baseline's process gave no answer for 10 s"),
        (_fails, r"ZeroDivisionError .*: a tensor of no size"),
    ],
)
def test_a_worker_that_fails_is_an_error_and_leaves_no_process(
    tiny_bundle: Path, logged: Path, monkeypatch: pytest.MonkeyPatch, stand_in, message: str
):
    monkeypatch.setattr(benchmark, "_baseline_side", stand_in)
    monkeypatch.setattr(benchmark, "_ANSWER_S", 10.0)
    before = children(os.getpid())
    with pytest.raises(EdgevitError, match=message):
        bench(tiny_bundle, FRAMES, rounds=2)
    assert not [pid for pid in children(os.getpid()) - before if "_serve" in command(pid)]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_parent(tiny_bundle: Path, tmp_path: Path, how: signal.Signals):
    script = tmp_path / "endless.py"
    script.write_text(
        # No `if __name__ == "__main__"`: a worker must not run its caller's script again.
        "from tests.report import test_benchmark as t\n"
        "from edgevit.report import benchmark\n"
        "benchmark._bundle_side = t._bundle_that_logs\n"
        "benchmark._baseline_side = t._baseline_that_logs\n"
        "report = lambda done, total: print(done, flush=True)\n"
        f"benchmark.bench({str(tiny_bundle)!r}, t.FRAMES, rounds=10_000, progress=report)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "EDGEVIT_TEST_LOG": str(tmp_path / "log"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "0\n"
        assert parent.stdout.readline() == "1\n"
        workers = [pid for pid in children(parent.pid) if "_serve" in command(pid)]
        assert len(workers) == 2
        if how == signal.SIGINT:
            os.killpg(parent.pid, how)  # as a terminal does: to every process
        else:
            parent.kill()
        _, errors = parent.communicate(timeout=60)
        deadline = time.monotonic() + 30
        while any(map(command, workers)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(command, workers))
        # The parent's KeyboardInterrupt is for the command line to handle; workers print nothing.
        assert errors.count("Traceback") == (1 if how == signal.SIGINT else 0), errors
    finally:
        if parent.poll() is None:
            parent.kill()
            parent.wait()


def children(pid: int) -> set[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in found for child in file.read_text().split()}


def command(pid: int) -> str:
    """The command line of a living process, else nothing."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def test_frames_are_the_check_images(tiny_bundle: Path):
    bundle = Bundle.load(tiny_bundle)
    frames = load_frames(bundle)
    assert frames.dtype == np.uint8 and frames.shape == (3, SIZE, SIZE, 3)
    # Label 0 is the red picture; the first channel is red.
    assert frames[0, 0, 0].tolist() == [255, 0, 0]
    assert frames[2, 5, 9].tolist() == [0, 0, 255]


def test_frames_of_a_folder(tiny_bundle: Path, tmp_path: Path):
    bundle = Bundle.load(tiny_bundle)
    (tmp_path / "a").mkdir()
    cv2.imwrite(str(tmp_path / "a" / "0.png"), picture(1))
    cv2.imwrite(str(tmp_path / "1.png"), picture(2))
    (tmp_path / "notes.txt").write_text("no image")
    frames = load_frames(bundle, tmp_path)
    assert frames[:, 0, 0].tolist() == [[0, 0, 255], [0, 255, 0]]  # by path: 1.png, a/0.png
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut short")
    with pytest.raises(DataError, match=r"broken\.jpg"):
        load_frames(bundle, tmp_path)


def test_a_large_folder_is_sampled_evenly(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for number in range(9):
        cv2.imwrite(str(tmp_path / f"{number}.png"), np.full((8, 8, 3), 10 * number, np.uint8))
    monkeypatch.setattr(benchmark, "_MAX_FRAMES", 3)
    frames = load_frames(Bundle.load(tiny_bundle), tmp_path)
    assert frames[:, 0, 0, 0].tolist() == [0, 40, 80]


def test_no_frames_is_a_user_error(tiny_bundle: Path, tmp_path: Path):
    empty = rewritten(tiny_bundle, tmp_path / "none.evb", check_images=[])
    with pytest.raises(UserError, match="--data"):
        bench(empty)
    with pytest.raises(DataError, match="holds no images"):
        load_frames(Bundle.load(tiny_bundle), tmp_path)
    with pytest.raises(DataError, match="not a folder"):
        load_frames(Bundle.load(tiny_bundle), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds = 0"),
        ({"threads": -1}, "threads = -1"),
        ({"images": FRAMES.astype(np.float32)}, "uint8"),
        ({"images": FRAMES[:, :16]}, r"\[n, 32, 32, 3\]"),
        ({"images": FRAMES[:0]}, r"\[0, 32, 32, 3\]"),
    ],
)
def test_a_request_that_makes_no_sense(tiny_bundle: Path, changes, message: str):
    with pytest.raises(UserError, match=message):
        bench(tiny_bundle, **changes)
