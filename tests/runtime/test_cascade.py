from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevit.engines.stage import StageOutput
from edgevit.policy import NEVER, ExitPolicy
from edgevit.runtime.cascade import Cascade

IMAGE = np.arange(2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 3)


class Scripted:
    """A stage that answers what it is told and keeps what it was given."""

    def __init__(self, number: int, confidence: float, logits: np.ndarray, final: bool) -> None:
        self.number, self.confidence, self.logits, self.final = number, confidence, logits, final
        self.given: list[Any] = []

    def run(self, value: Any) -> StageOutput:
        self.given.append(value)
        self.logits[:] = self.number  # all stages share one buffer, as an engine may
        tokens = None if self.final else f"tokens {self.number}"
        return StageOutput(10 + self.number, self.confidence, self.logits, tokens)

    def linear_layers(self) -> list[tuple[str, bool]]:
        return []


class Chain(list[Scripted]):
    engine = "scripted"

    def __init__(self, *confidences: float) -> None:
        logits = np.zeros(3, np.float32)
        last = len(confidences) - 1
        super().__init__(Scripted(n, c, logits, n == last) for n, c in enumerate(confidences))

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("confidences", "thresholds", "exit_"),
    [
        ([0.9, 0.1, 0.1], (0.9, 0.9), 1),
        ([0.89, 0.9, 0.1], (0.9, 0.9), 2),
        ([0.89, 0.89, 0.1], (0.9, 0.9), 3),
        ([1.0, 0.89, 0.1], (NEVER, 0.9), 3),
        ([0.1], (), 1),
        ([float("nan"), 0.9, 0.1], (0.5, 0.5), 2),
    ],
)
def test_it_stops_at_the_first_exit_that_is_sure(
    confidences: list[float], thresholds: tuple[float, ...], exit_: int
) -> None:
    chain = Chain(*confidences)
    decision = Cascade(chain, ExitPolicy(thresholds)).run(IMAGE)
    assert decision.exit == exit_
    assert decision.label_index == 10 + exit_ - 1
    assert decision.confidence == confidences[exit_ - 1]
    assert [len(stage.given) for stage in chain] == [1] * exit_ + [0] * (len(chain) - exit_)


def test_each_stage_gets_the_tokens_of_the_one_before() -> None:
    chain = Chain(0.0, 0.0, 0.0)
    Cascade(chain, ExitPolicy((NEVER, NEVER))).run(IMAGE)
    (image,) = chain[0].given
    assert image.shape == (1, 2, 2, 3)
    np.testing.assert_array_equal(image[0], IMAGE)
    assert chain[1].given == ["tokens 0"]
    assert chain[2].given == ["tokens 1"]


def test_a_trace_runs_every_stage_whatever_the_policy() -> None:
    chain = Chain(1.0, 1.0, 1.0)
    outputs = Cascade(chain, ExitPolicy((0.0, 0.0))).trace(IMAGE)
    assert [output.top1 for output in outputs] == [10, 11, 12]
    # Copies: the buffer has been written to by the stages after.
    assert [output.logits[0] for output in outputs] == [0, 1, 2]


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=5).flatmap(
        lambda sure: st.tuples(
            st.just(sure),
            st.lists(st.floats(0, 1), min_size=len(sure) - 1, max_size=len(sure) - 1),
        )
    )
)
def test_run_is_what_the_policy_makes_of_the_trace(
    case: tuple[list[float], list[float]],
) -> None:
    confidences, thresholds = case
    cascade = Cascade(Chain(*confidences), ExitPolicy(tuple(thresholds)))
    decision = cascade.run(IMAGE)
    outputs = cascade.trace(IMAGE)
    passed = [n for n, limit in enumerate(thresholds) if outputs[n].confidence >= limit]
    assert decision.exit - 1 == min([*passed, len(outputs) - 1])
    assert decision.label_index == outputs[decision.exit - 1].top1
