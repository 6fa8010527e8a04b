from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from edgevit.errors import DataError
from edgevit.images import ImageFolder, read_image
from edgevit.runtime.classifier import Classifier
from edgevit.runtime.evaluate import Evaluation, evaluate
from tests.tiny_bundle import GAINS, LABELS, expected, picture


@pytest.fixture(scope="module")
def classifier(tiny_bundle: Path) -> Classifier:
    return Classifier.load(tiny_bundle, threads=1)


# What is shown, what its folder says, how strong the colour is: two of seven are in the wrong folder.
SHOWN = [
    (0, 0, 1.0),
    (0, 1, 1.0),
    (1, 1, 0.6),
    (1, 1, 0.2),
    (2, 2, 0.2),
    (2, 0, 0.6),
    (2, 2, 1.0),
]


def write(root: Path) -> ImageFolder:
    for number, (colour, label, strength) in enumerate(SHOWN):
        path = root / LABELS[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), picture(colour, strength))
    return ImageFolder.scan(root, LABELS)


def exit_of(colour: int, strength: float) -> int:
    sure = [expected(picture(colour, strength), stage)[1] for stage in range(len(GAINS))]
    return 1 if sure[0] >= 0.7 else 2 if sure[1] >= 0.9 else 3


def test_the_figures_are_what_counting_says(classifier: Classifier, tmp_path: Path) -> None:
    found = evaluate(classifier, write(tmp_path))
    exits = [exit_of(colour, strength) for colour, _, strength in SHOWN]
    assert set(exits) == {1, 2, 3}
    assert found.n == 7
    assert found.top1 == 5 / 7
    assert found.exit_counts == tuple(exits.count(number) for number in (1, 2, 3))
    assert found.mean_stages == sum(exits) / 7
    assert found.engine == classifier.engine
    assert found.skipped == ()
    assert len(found.latency_ms) == 7


def test_it_agrees_with_the_classifier_image_by_image(
    classifier: Classifier, tmp_path: Path
) -> None:
    folder = write(tmp_path)
    results = [classifier(read_image(path)) for path in folder.paths]
    found = evaluate(classifier, folder)
    right = [result.index == label for result, label in zip(results, folder.labels)]
    assert found.top1 == sum(right) / len(right)
    assert list(found.exit_counts) == [
        sum(result.exit == number for result in results) for number in (1, 2, 3)
    ]


def test_json_has_the_keys_others_rely_on(classifier: Classifier, tmp_path: Path) -> None:
    value = json.loads(json.dumps(evaluate(classifier, write(tmp_path)).to_json(), allow_nan=False))
    assert {"n", "top1", "mean_stages", "exit_counts", "latency_ms", "engine"} <= set(value)
    assert set(value["latency_ms"]) == {"p50", "p90", "p99"}
    assert (
        0 < value["latency_ms"]["p50"] <= value["latency_ms"]["p90"] <= value["latency_ms"]["p99"]
    )


def test_percentiles_are_of_the_images() -> None:
    found = Evaluation(0, (101,), np.arange(101.0), "none", ())
    assert found.to_json()["latency_ms"] == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_progress_reaches_the_end(classifier: Classifier, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    evaluate(classifier, write(tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(number, 7) for number in range(1, 8)]


def damage(folder: ImageFolder, row: int) -> Path:
    path = folder.paths[row]
    path.write_bytes(path.read_bytes()[:-20])
    return path


@pytest.mark.parametrize("row", [0, 3, 6])
def test_a_corrupt_image_is_named(classifier: Classifier, tmp_path: Path, row: int) -> None:
    folder = write(tmp_path)
    path = damage(folder, row)
    with pytest.raises(DataError, match=str(path)):
        evaluate(classifier, folder)


def test_corrupt_images_are_skipped_on_request_and_listed(
    classifier: Classifier, tmp_path: Path
) -> None:
    folder = write(tmp_path)
    damaged = (damage(folder, 1), damage(folder, 6))
    seen: list[int] = []
    found = evaluate(
        classifier, folder, skip_corrupt=True, progress=lambda done, _: seen.append(done)
    )
    assert found.skipped == damaged
    assert found.n == 5
    assert seen[-1] == 7
    assert found.to_json()["skipped"] == [str(path) for path in damaged]


def test_nothing_that_can_be_read_is_an_error(classifier: Classifier, tmp_path: Path) -> None:
    folder = write(tmp_path)
    for row in range(len(folder)):
        damage(folder, row)
    with pytest.raises(DataError, match=str(tmp_path)):
        evaluate(classifier, folder, skip_corrupt=True)


def test_a_class_that_the_bundle_lacks_is_an_error(classifier: Classifier, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "violet").mkdir()
    with pytest.raises(DataError, match="violet"):
        ImageFolder.scan(tmp_path, classifier.bundle.labels)


def test_some_classes_may_be_missing(classifier: Classifier, tmp_path: Path) -> None:
    (tmp_path / "blue").mkdir()
    cv2.imwrite(str(tmp_path / "blue/1.png"), picture(2))
    found = evaluate(classifier, ImageFolder.scan(tmp_path, classifier.bundle.labels))
    assert (found.n, found.top1) == (1, 1.0)
