"""Choose the exit thresholds on predictions for images that the heads had not seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from edgevit.policy import NEVER, ExitPolicy

# Combinations tried in all; each exit's grid has the matching number of candidate thresholds.
_COMBINATIONS = 20_000


def choose_thresholds(
    confidence: np.ndarray, correct: np.ndarray, costs: Sequence[float], max_lost: float
) -> ExitPolicy:
    """The thresholds that skip most compute at no loss of accuracy on these predictions.

    ``confidence [exits, n]`` (0 to 1) and ``correct [exits, n]`` (bool) are of all exits, the final
    one last; ``costs [exits]`` is the compute of each stage. Two conditions hold: the accuracy is at
    least the full model's, and at most a share ``max_lost`` of the images goes from right to wrong.
    The second is the stricter one: answers that an exit wins by luck may pay for answers it loses
    here, but will not on new images.

    The search is over a grid of quantiles of each early exit's confidence, all combinations. A
    threshold lies halfway between two observed confidences, so that it does not hang on the last
    digit of one of them.
    """
    early = len(confidence) - 1
    size = max(2, int(_COMBINATIONS ** (1 / max(1, early))))
    grids = [_candidates(confidence[exit_], size) for exit_ in range(early)]
    spent = np.cumsum(costs)
    if not confidence.shape[1]:
        return ExitPolicy((NEVER,) * early)  # nothing to judge an exit by
    best, best_cost = (NEVER,) * early, float(spent[-1])
    for thresholds in itertools.product(*grids):
        open_ = np.ones(confidence.shape[1], bool)
        right, lost, cost = 0.0, 0.0, 0.0
        for exit_ in range(early + 1):
            leaves = open_ if exit_ == early else open_ & (confidence[exit_] >= thresholds[exit_])
            right += correct[exit_][leaves].sum()
            lost += (correct[-1] & ~correct[exit_])[leaves].sum()
            cost += spent[exit_] * leaves.sum()
            open_ = open_ & ~leaves
        cost /= len(open_)
        if right >= correct[-1].sum() and lost <= max_lost * len(open_) and cost < best_cost:
            best, best_cost = thresholds, cost
    return ExitPolicy(tuple(float(t) for t in best))


def _candidates(confidence: np.ndarray, size: int) -> np.ndarray:
    observed = np.unique(confidence)
    halfway = (observed[:-1] + observed[1:]) / 2
    if len(halfway) > size - 1:
        halfway = halfway[np.linspace(0, len(halfway) - 1, size - 1).round().astype(int)]
    return np.append(halfway, NEVER)
