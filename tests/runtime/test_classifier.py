from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import edgevit
from edgevit.bundle import Bundle
from edgevit.errors import BundleError, DataError, EngineUnavailableError
from edgevit.preprocess import Preprocess
from edgevit.runtime.classifier import Classifier
from tests.tiny_bundle import GAINS, LABELS, expected, picture, write_tiny_bundle


@pytest.fixture(scope="module")
def classifier(tiny_bundle: Path) -> Classifier:
    return Classifier.load(tiny_bundle, threads=1)


@pytest.mark.parametrize("strength", [1.0, 0.6, 0.2])
@pytest.mark.parametrize("label", range(3))
def test_the_answer_is_what_arithmetic_says(
    classifier: Classifier, label: int, strength: float
) -> None:
    frame = picture(label, strength)
    sure = [expected(frame, stage)[1] for stage in range(len(GAINS))]
    exit_ = 1 if sure[0] >= 0.7 else 2 if sure[1] >= 0.9 else 3
    result = classifier(frame)
    assert (result.label, result.index, result.exit) == (LABELS[label], label, exit_)
    assert result.score == pytest.approx(sure[exit_ - 1], abs=1e-5)
    assert type(result.score) is float
    assert type(result.index) is int


def test_the_cases_above_take_every_exit(classifier: Classifier) -> None:
    assert {classifier(picture(0, s)).exit for s in (1.0, 0.6, 0.2)} == {1, 2, 3}


def test_frames_are_numbered_and_timed(tiny_bundle: Path) -> None:
    classifier = Classifier.load(tiny_bundle, threads=1)
    start = time.perf_counter()
    results = [classifier(picture(0)) for _ in range(3)]
    whole_ms = (time.perf_counter() - start) * 1e3
    assert [result.frame for result in results] == [0, 1, 2]  # the warm-up is not counted
    assert all(result.latency_ms > 0 for result in results)
    assert sum(result.latency_ms for result in results) <= whole_ms
    assert all(result.age_ms == result.latency_ms for result in results)


def test_preprocessing_is_part_of_the_latency(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = Classifier.load(tiny_bundle, threads=1)
    real = Preprocess.__call__

    def slow(spec: Preprocess, frame: np.ndarray) -> np.ndarray:
        time.sleep(0.05)
        return real(spec, frame)

    monkeypatch.setattr(Preprocess, "__call__", slow)
    assert classifier(picture(0)).latency_ms >= 50


def test_equal_frames_get_equal_answers(classifier: Classifier) -> None:
    frames = [picture(label, 0.3) for label in (0, 1, 2, 1, 0, 2)] * 3
    scores: dict[int, set[float]] = {}
    for frame in frames:
        result = classifier(frame)
        scores.setdefault(result.index, set()).add(result.score)
    assert {label: len(found) for label, found in scores.items()} == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("shape", [(1, 1), (1, 500), (500, 1), (32, 32), (33, 31), (1080, 1920)])
def test_frames_of_any_size(classifier: Classifier, shape: tuple[int, int]) -> None:
    assert classifier(picture(2, height=shape[0], width=shape[1])).label == "blue"


@pytest.mark.parametrize(
    "frame", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)]
)
def test_what_is_no_frame_is_refused(classifier: Classifier, frame: np.ndarray) -> None:
    with pytest.raises(DataError, match="a frame must"):
        classifier(frame)
    assert classifier(picture(1)).label == "green"


def test_it_says_what_it_is(tiny_bundle: Path) -> None:
    with Classifier.load(str(tiny_bundle), engine="onnxruntime", threads=1) as classifier:
        assert classifier.engine == "onnxruntime"
        assert isinstance(classifier.bundle, Bundle)
        assert classifier.bundle.labels == LABELS
        outputs = classifier.cascade.trace(classifier.bundle.preprocess(picture(1)))
        assert [output.top1 for output in outputs] == [1, 1, 1]


def test_it_is_public() -> None:
    assert edgevit.Classifier is Classifier
    with pytest.raises(AttributeError, match="no attribute 'Classifer'"):
        _ = edgevit.Classifer


def test_thresholds_of_the_bundle_are_obeyed(tmp_path: Path) -> None:
    for thresholds, exit_ in (((0.0, 0.0), 1), ((2.0, 0.0), 2), ((2.0, 2.0), 3)):
        path = write_tiny_bundle(tmp_path / "b.evb", thresholds)
        assert Classifier.load(path, threads=1)(picture(0)).exit == exit_


def test_what_can_not_be_loaded(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        Classifier.load(tmp_path / "gone.evb")
    with pytest.raises(EngineUnavailableError):
        Classifier.load(tiny_bundle, engine="none")
