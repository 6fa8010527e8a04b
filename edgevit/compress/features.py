"""Exit features of a whole image folder, computed once and kept: heads then train in seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from edgevit.compress.exits import Stage
from edgevit.errors import DataError
from edgevit.images import ImageFolder, read_image
from edgevit.preprocess import Preprocess

_BATCH = 16
# Images in a part file: what a kill can lose at most is one part's work.
_PART = 128


@dataclass(frozen=True)
class Features:
    """``values [exits, n, D]`` float32 and ``labels [n]`` of the images that could be read."""

    values: np.ndarray
    labels: np.ndarray
    paths: tuple[Path, ...]
    skipped: tuple[Path, ...]


def extract_features(
    stages: Sequence[Stage],
    folder: ImageFolder,
    preprocess: Preprocess,
    cache: Path,
    *,
    skip_corrupt: bool,
    progress: Callable[[int, int], None],
) -> Features:
    """Run every image through the float backbone; parts already in ``cache`` are read back.

    ``progress`` gets images done and in all. Raises :class:`DataError` for an image that can't be
    read, unless ``skip_corrupt``, and for a folder in which a class has none that can.
    """
    cache.mkdir(parents=True, exist_ok=True)
    values: list[np.ndarray] = []
    kept: list[int] = []
    for start in range(0, len(folder), _PART):
        rows = range(start, min(start + _PART, len(folder)))
        part = cache / f"{start:06d}.npz"
        if not part.is_file():
            computed, readable = _extract_part(
                stages, folder, rows, preprocess, skip_corrupt, progress
            )
            temporary = part.with_suffix(".partial")
            with temporary.open("wb") as stream:
                np.savez(stream, values=computed, kept=np.array(readable, np.int64))
            temporary.replace(part)
        with np.load(part, allow_pickle=False) as saved:
            values.append(saved["values"])
            kept += saved["kept"].tolist()
    labels = np.array([folder.labels[i] for i in kept], np.int64)
    for index in set(folder.labels) - set(labels.tolist()):
        raise DataError(
            f"class '{folder.classes[index]}' in {folder.root} has no image that can be read; replace them"
        )
    keep = set(kept)
    return Features(
        np.concatenate(values, axis=1),
        labels,
        tuple(folder.paths[i] for i in kept),
        tuple(path for i, path in enumerate(folder.paths) if i not in keep),
    )


def _extract_part(
    stages: Sequence[Stage],
    folder: ImageFolder,
    rows: Sequence[int],
    preprocess: Preprocess,
    skip_corrupt: bool,
    progress: Callable[[int, int], None],
) -> tuple[np.ndarray, list[int]]:
    values: list[np.ndarray] = []
    kept: list[int] = []
    for start in range(0, len(rows), _BATCH):
        images = []
        for row in rows[start : start + _BATCH]:
            try:
                images.append(preprocess(read_image(folder.paths[row])))
            except DataError as error:
                if not skip_corrupt:
                    raise DataError(
                        f"{error}, or set data.skip_corrupt = true to leave such images out"
                    ) from None
                continue
            kept.append(row)
        if images:
            values.append(exit_features(stages, np.stack(images)))
        progress(rows[0] + min(start + _BATCH, len(rows)), len(folder))
    if not values:
        width = stages[0].head.linear.in_features
        return np.zeros((len(stages), 0, width), np.float32), kept
    return np.concatenate(values, axis=1), kept


@torch.inference_mode()
def exit_features(stages: Sequence[Stage], images: np.ndarray) -> np.ndarray:
    """``uint8 [B, S, S, 3]`` RGB to ``float32 [exits, B, D]``."""
    x = torch.from_numpy(images)
    found = []
    for stage in stages:
        x = stage.tokens(x)
        found.append(stage.head.features(x).numpy())
    return np.stack(found)
