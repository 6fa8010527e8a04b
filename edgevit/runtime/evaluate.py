"""Accuracy of a bundle on a folder of labelled images, through the very code that runs live."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np

from edgevit.errors import DataError
from edgevit.images import ImageFolder, read_image
from edgevit.runtime.classifier import Classifier


@dataclass(frozen=True)
class Evaluation:
    """``exit_counts[k]`` images left at exit k + 1; ``latency_ms`` is each image's; ``skipped``
    are the images that could not be read."""

    right: int
    exit_counts: Tuple[int, ...]
    latency_ms: np.ndarray
    engine: str
    skipped: Tuple[Path, ...]

    @property
    def n(self) -> int:
        return sum(self.exit_counts)

    @property
    def top1(self) -> float:
        return self.right / self.n

    @property
    def mean_stages(self) -> float:
        return sum(k * count for k, count in enumerate(self.exit_counts, 1)) / self.n

    def to_json(self) -> Dict[str, Any]:
        p50, p90, p99 = (float(v) for v in np.percentile(self.latency_ms, (50, 90, 99)))
        return {
            "n": self.n,
            "top1": self.top1,
            "mean_stages": self.mean_stages,
            "exit_counts": list(self.exit_counts),
            "latency_ms": {"p50": p50, "p90": p90, "p99": p99},
            "engine": self.engine,
            "skipped": [str(path) for path in self.skipped],
        }


def evaluate(
    classifier: Classifier,
    folder: ImageFolder,
    skip_corrupt: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Classify every image of ``folder``, whose labels index the bundle's labels.

    ``progress`` gets images done and in all. Raises :class:`DataError` for an image that can't be
    read, unless ``skip_corrupt``, and where none can.
    """
    right = 0
    exits = [0] * len(classifier.bundle.stages)
    latency_ms: List[float] = []
    skipped: List[Path] = []
    for number, (path, label) in enumerate(zip(folder.paths, folder.labels)):
        try:
            frame = read_image(path)
        except DataError as error:
            if not skip_corrupt:
                raise DataError(f"{error}, or leave such images out with --skip-corrupt") from None
            skipped.append(path)
            progress(number + 1, len(folder))
            continue
        result = classifier(frame)
        right += result.index == label
        exits[result.exit - 1] += 1
        latency_ms.append(result.latency_ms)
        progress(number + 1, len(folder))
    if not latency_ms:
        raise DataError(f"no image in {folder.root} can be read; give a folder of real images")
    return Evaluation(right, tuple(exits), np.array(latency_ms), classifier.engine, tuple(skipped))
