from __future__ import annotations

import json
from pathlib import Path
from typing import Callable

import cv2
import pytest

from edgevit import cli
from tests.tiny_bundle import GAINS, LABELS, expected, picture

Evaluate = Callable[..., "tuple[int, str, str]"]
THRESHOLDS = (0.7, 0.9, 0.0)
STRENGTHS = (0.0, 0.4, 1.0)


@pytest.fixture
def evaluate(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Run `edgevit eval` on the tiny bundle and return its status, output and messages."""

    def run(folder: Path, *words: str) -> tuple[int, str, str]:
        status = cli.main(
            ["eval", str(tiny_bundle), "--data", str(folder), "--engine", "onnxruntime", *words]
        )
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine pictures; two of grey, which is no colour: argmax then says red, so two are wrong."""
    for label, name in enumerate(LABELS):
        (tmp_path / name).mkdir()
        for number, strength in enumerate(STRENGTHS):
            cv2.imwrite(str(tmp_path / name / f"{number}.png"), picture(label, strength))
    return tmp_path


def by_arithmetic() -> tuple[int, list[int]]:
    """How many of the folder's pictures are right, and how many leave at each exit."""
    right, exits = 0, [0] * len(GAINS)
    for label in range(len(LABELS)):
        for strength in STRENGTHS:
            for stage in range(len(GAINS)):
                index, confidence = expected(picture(label, strength), stage)
                if confidence >= THRESHOLDS[stage]:
                    break
            right += index == label
            exits[stage] += 1
    return right, exits


def test_json_alone_on_standard_output(evaluate: Evaluate, folder: Path) -> None:
    status, out, err = evaluate(folder, "--json")
    found = json.loads(out)
    right, exits = by_arithmetic()
    assert status == 0
    assert (found["n"], found["top1"]) == (9, pytest.approx(7 / 9)) and right == 7
    assert found["exit_counts"] == exits
    assert found["mean_stages"] == pytest.approx((exits[0] + 2 * exits[1] + 3 * exits[2]) / 9)
    assert found["engine"] == "onnxruntime"
    latency_ms = found["latency_ms"]
    assert 0 < latency_ms["p50"] <= latency_ms["p90"] <= latency_ms["p99"]
    assert found["skipped"] == []
    assert "9 of 9" in err


def test_exits_are_all_in_play() -> None:
    assert by_arithmetic()[1][0] and by_arithmetic()[1][2]


def test_for_a_person(evaluate: Evaluate, folder: Path) -> None:
    status, out, _ = evaluate(folder)
    assert status == 0
    assert "0.7778 (7 of 9 images)" in out and "onnxruntime" in out


def test_classes_that_the_folder_lacks_keep_their_labels(
    evaluate: Evaluate, tmp_path: Path
) -> None:
    (tmp_path / "blue").mkdir()
    cv2.imwrite(str(tmp_path / "blue" / "a.png"), picture(2))
    status, out, _ = evaluate(tmp_path, "--json")
    assert status == 0
    assert (json.loads(out)["n"], json.loads(out)["top1"]) == (1, 1.0)


def test_a_corrupt_image_is_named(evaluate: Evaluate, folder: Path) -> None:
    (folder / "red" / "bad.jpg").write_bytes(b"no image")
    status, out, err = evaluate(folder, "--json")
    assert (status, out) == (2, "")
    assert str(folder / "red" / "bad.jpg") in err.splitlines()[-1]


def test_a_corrupt_image_is_skipped_only_on_purpose(evaluate: Evaluate, folder: Path) -> None:
    (folder / "red" / "bad.jpg").write_bytes(b"no image")
    status, out, _ = evaluate(folder, "--json", "--skip-corrupt")
    assert status == 0
    assert json.loads(out)["n"] == 9
    assert json.loads(out)["skipped"] == [str(folder / "red" / "bad.jpg")]
    assert "1 that can't be read" in evaluate(folder, "--skip-corrupt")[1]


def test_nothing_but_corrupt_images(evaluate: Evaluate, tmp_path: Path) -> None:
    (tmp_path / "red").mkdir()
    (tmp_path / "red" / "bad.jpg").write_bytes(b"no image")
    status, out, err = evaluate(tmp_path, "--json", "--skip-corrupt")
    assert (status, out) == (2, "")
    assert str(tmp_path) in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "said"), [("unknown", "purple"), ("empty", "red"), ("nothing", "class folders")]
)
def test_a_folder_that_does_not_fit(
    name: str, said: str, evaluate: Evaluate, tmp_path: Path
) -> None:
    if name == "unknown":
        (tmp_path / "purple").mkdir()
        cv2.imwrite(str(tmp_path / "purple" / "a.png"), picture(0))
    if name == "empty":
        (tmp_path / "red").mkdir()
    status, out, err = evaluate(tmp_path)
    assert (status, out) == (2, "")
    assert said in err and err.count("\n") == 1


def test_a_damaged_bundle(
    tiny_bundle: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = folder / "cut.evb"
    cut.write_bytes(tiny_bundle.read_bytes()[:-40])
    assert cli.main(["eval", str(cut), "--data", str(folder)]) == 2
    captured = capsys.readouterr()
    assert not captured.out and str(cut) in captured.err and captured.err.count("\n") == 1


def test_an_unknown_engine(
    tiny_bundle: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(tiny_bundle), "--data", str(folder), "--engine", "abacus"]
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert not captured.out and "abacus" in captured.err and "onnxruntime" in captured.err


@pytest.mark.parametrize("threads", ["-1", "two", "1.5", ""])
def test_threads_that_can_not_be(threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["eval", "b.evb", "--data", "d", f"--threads={threads}"])
    assert "--threads" in capsys.readouterr().err
