"""The cascade: run stage after stage until the policy says that an answer is sure enough."""

from __future__ import annotations

from typing import List, NamedTuple

import numpy as np

from edgevit.engines import Stages
from edgevit.engines.stage import StageOutput
from edgevit.policy import ExitPolicy


class Decision(NamedTuple):
    """An answer and the exit it came from; exits count from 1, so that is also the stages run."""

    label_index: int
    confidence: float
    exit: int


class Cascade:
    """Stages under a policy. Not for several threads at once: stages reuse their buffers."""

    def __init__(self, stages: Stages, policy: ExitPolicy) -> None:
        self._stages = stages
        self._policy = policy

    def run(self, image: np.ndarray) -> Decision:
        """Classify a preprocessed image, ``uint8 [S, S, 3]`` RGB."""
        value = image[np.newaxis]
        for number in range(len(self._stages)):
            output = self._stages[number].run(value)
            if self._policy.leaves_at(number, output.confidence):
                break
            value = output.tokens
        return Decision(output.top1, output.confidence, number + 1)

    def trace(self, image: np.ndarray) -> List[StageOutput]:
        """The output of every exit, whatever the policy says; for reports and self-tests."""
        outputs = []
        value = image[np.newaxis]
        for number in range(len(self._stages)):
            output = self._stages[number].run(value)
            outputs.append(output._replace(logits=output.logits.copy(), tokens=None))
            value = output.tokens
        return outputs
