from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgevit.compress.thresholds import choose_thresholds
from edgevit.policy import ExitPolicy


def replay(policy: ExitPolicy, confidence: np.ndarray, correct: np.ndarray) -> tuple[list, list]:
    """Which stage each frame leaves at and whether it is right, through the policy's own decision."""
    exits, right = [], []
    for column in range(confidence.shape[1]):
        stage = next(
            s for s in range(len(confidence)) if policy.leaves_at(s, confidence[s, column])
        )
        exits.append(stage)
        right.append(bool(correct[stage, column]))
    return exits, right


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 60),
    early=st.integers(0, 3),
    max_lost=st.sampled_from([0.0, 0.02, 0.1, 1.0]),
)
def test_nothing_is_lost_beyond_what_is_allowed(
    seed: int, n: int, early: int, max_lost: float
) -> None:
    generator = np.random.default_rng(seed)
    confidence = generator.uniform(size=(early + 1, n)).round(2)
    correct = generator.uniform(size=(early + 1, n)) < 0.7
    policy = choose_thresholds(confidence, correct, [1.0] * (early + 1), max_lost)
    _, right = replay(policy, confidence, correct)
    lost = sum(full and not found for full, found in zip(correct[-1], right, strict=True))
    assert sum(right) >= correct[-1].sum()
    assert lost <= max_lost * n


def test_the_cheapest_choice_is_found() -> None:
    """Against every pair of thresholds on a small set."""
    generator = np.random.default_rng(3)
    correct = generator.uniform(size=(3, 30)) < [[0.7], [0.8], [0.9]]
    confidence = np.where(correct, 0.6, 0.3) + generator.uniform(0, 0.4, (3, 30))
    costs = [5.0, 2.0, 3.0]

    def cost_of(policy: ExitPolicy) -> float:
        return float(sum(np.cumsum(costs)[s] for s in replay(policy, confidence, correct)[0]))

    def allowed(policy: ExitPolicy) -> bool:
        right = replay(policy, confidence, correct)[1]
        lost = sum(full and not ok for full, ok in zip(correct[-1], right, strict=True))
        return sum(right) >= correct[-1].sum() and lost <= 0.05 * 30

    every = [
        ExitPolicy(pair)
        for pair in itertools.product(np.append(confidence[0], 2), np.append(confidence[1], 2))
    ]
    cheapest = min(cost_of(policy) for policy in every if allowed(policy))
    chosen = choose_thresholds(confidence, correct, costs, 0.05)
    assert allowed(chosen)
    # Thresholds lie between observations, so the very lowest confidence is never let out.
    assert cost_of(chosen) <= cheapest + max(costs)


def test_without_predictions_nothing_leaves_early() -> None:
    policy = choose_thresholds(np.zeros((3, 0)), np.zeros((3, 0), bool), [1.0] * 3, 0.01)
    assert not policy.leaves_at(0, 1.0) and not policy.leaves_at(1, 1.0)
