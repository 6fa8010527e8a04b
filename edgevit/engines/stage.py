"""What every engine offers: a stage that runs, and what comes out of it."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Protocol, Sequence, Tuple

import numpy as np

from edgevit.errors import BundleError


class StageOutput(NamedTuple):
    """``logits`` is float32 ``[C]``. ``tokens`` is what the next stage's ``run`` takes, in the
    engine's own form, None in the final stage. Both hold until the same stage runs again."""

    top1: int
    confidence: float
    logits: np.ndarray
    tokens: Any


class Stage(Protocol):
    def run(self, value: Any) -> StageOutput:
        """Run on ``uint8 [1, S, S, 3]`` RGB (first stage) or the ``tokens`` of the stage before."""

    def linear_layers(self) -> List[Tuple[str, bool]]:
        """``(kernel, whether it computes in INT8)`` of every linear layer as it really runs."""


def output_names(
    where: str, inputs: Sequence[str], outputs: Sequence[str], first: bool, final: bool
) -> List[str]:
    """The outputs to ask a stage for; raises :class:`BundleError` for a graph that is no stage."""
    names = [*([] if final else ["tokens"]), "logits", "top1", "confidence"]
    wanted = "image" if first else "tokens_in"
    if list(inputs) != [wanted] or not set(names) <= set(outputs):
        raise BundleError(
            f"{where} is not a stage of a bundle: it must take '{wanted}' and give {', '.join(names)}, "
            f"but it takes {', '.join(inputs)} and gives {', '.join(outputs)}; make the bundle again"
        )
    return names
