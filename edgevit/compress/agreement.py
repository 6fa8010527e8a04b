"""Which calibrator is best is decided by the task: by what the quantized stages answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx

from edgevit.compress.calibration import Calibration
from edgevit.compress.calibrators import CALIBRATORS
from edgevit.compress.quantize import quantize_stages
from edgevit.engines.onnxruntime import OnnxRuntimeStage


@dataclass(frozen=True)
class Candidate:
    """How a calibrator's stages compare with the float ones.

    ``agreement`` is the share of equal labels over all images and exits, ``logit_error`` the mean
    squared difference of the logits.
    """

    calibrator: str
    agreement: float
    logit_error: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_calibrators(
    stages: Mapping[str, onnx.ModelProto],
    calibration: Calibration,
    images: np.ndarray,
    threads: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Candidate]:
    """Quantize the float ``stages`` with every calibrator and run them; the best comes first.

    ``images`` is uint8 ``[n, S, S, 3]``, at least one, none of them among the calibration images: on
    those the ranges fit too well. The most equal labels win, then the smallest error of the logits.
    """
    steps = 1 + len(CALIBRATORS)
    wanted = exit_logits(stages, images, threads)
    progress(1, steps)
    candidates = []
    for number, name in enumerate(CALIBRATORS, 2):
        graphs, _ = quantize_stages(stages, calibration.table(name), calibration.means)
        found = exit_logits(graphs, images, threads)
        candidates.append(
            Candidate(
                name,
                float((found.argmax(-1) == wanted.argmax(-1)).mean()),
                float(np.square(found - wanted, dtype=np.float64).mean()),
            )
        )
        progress(number, steps)
    # The sort is stable: of equals, the one that the table of calibrators names first.
    return sorted(candidates, key=lambda found: (-found.agreement, found.logit_error))


def exit_logits(
    stages: Mapping[str, onnx.ModelProto], images: np.ndarray, threads: int = 0
) -> np.ndarray:
    """Logits at every exit, float32 ``[n, exits, C]``, by the engine that runs everywhere."""
    last = len(stages) - 1
    opened = [
        OnnxRuntimeStage(graph.SerializeToString(), name, threads, number == 0, number == last)
        for number, (name, graph) in enumerate(stages.items())
    ]
    logits = []
    for image in images:
        value: Any = image[None]
        for stage in opened:
            output = stage.run(value)
            logits.append(output.logits)
            value = output.tokens
    return np.stack(logits).reshape(len(images), len(stages), -1)
