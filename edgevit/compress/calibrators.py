"""Calibrators: from the histogram of a tensor to the range that INT8 should cover.

A wide range clips nothing and has coarse steps; a narrow one has fine steps and clips the largest
values. Which is better depends on the network: transformers keep information in a few very large
activations (arXiv 2402.17762), and clipping those can cost more than any rounding.

Each calibrator takes a :class:`~edgevit.compress.histogram.Histogram` and returns ``amax``, the
largest magnitude that is kept: INT8 steps are ``amax / 127``. None returns more than the maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from edgevit.compress.histogram import Histogram

LEVELS = 128
_STEPS = 127
# Ranges tried for the mean squared error: from the maximum down to 1/256 of it, 4 % apart, then 0.5 %
# apart around the best of them.
_COARSE = 2.0 ** -(np.arange(129) / 16)
_FINE = 2.0 ** (np.arange(-8, 9) / 128)


def min_max(histogram: Histogram) -> float:
    """The largest magnitude: nothing is clipped."""
    return histogram.maximum


def percentile(histogram: Histogram, percent: float) -> float:
    """The magnitude that ``percent`` of the values do not exceed (arXiv 2004.09602)."""
    counts = histogram.used
    if not counts.any():
        return histogram.maximum
    cumulative = np.cumsum(counts)
    wanted = percent / 100 * cumulative[-1]
    bin_number = int(np.searchsorted(cumulative, wanted))
    # Within a bin the values count as spread evenly.
    missing = float((cumulative[bin_number] - wanted) / counts[bin_number])
    return min((bin_number + 1 - missing) * histogram.width, histogram.maximum)


def entropy(histogram: Histogram) -> float:
    """The range whose 128 levels lose the least information, by Kullback-Leibler divergence.

    After S. Migacz, "8-bit inference with TensorRT", GTC 2017: see :func:`divergences`.
    """
    used = len(histogram.used)
    if used <= LEVELS or not histogram.maximum:
        return histogram.maximum
    # Of equals the widest, which clips least.
    kept = used - int(np.argmin(divergences(histogram.used)[::-1]))
    return min(kept * histogram.width, histogram.maximum)


def divergences(counts: np.ndarray) -> np.ndarray:
    """Divergence in nats for each number of bins kept, from 128 to all ``n``: ``[n - 127]``.

    For ``k`` bins: P is the counts of those bins, the rest added to the last. Q is the counts of those
    bins without the rest, added up into 128 levels, and each level spread evenly over its bins that
    are not empty in P. Where Q has nothing and P something, the divergence is infinite.

    With P and Q flat within a level, ``sum(p * log(p / q))`` needs of each level only its sum and the
    number of its bins that are not empty, which come from running sums: all ``k`` in one go.
    """
    counts = counts.astype(np.float64)
    n, total = len(counts), counts.sum()
    kept = np.arange(LEVELS, n + 1)
    edges = kept[:, None] * np.arange(LEVELS + 1) // LEVELS
    below = np.concatenate([[0.0], np.cumsum(counts)])
    occupied_below = np.concatenate([[0], np.cumsum(counts > 0)])
    terms_below = np.concatenate([[0.0], np.cumsum(_x_log_x(counts))])

    level = np.diff(below[edges], axis=1)
    occupied = np.diff(occupied_below[edges], axis=1)
    last, clipped = counts[kept - 1], total - below[kept]
    occupied[:, -1] += (last == 0) & (clipped > 0)
    level_of_p = level.copy()
    level_of_p[:, -1] += clipped

    own = terms_below[kept - 1] + _x_log_x(last + clipped)
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.log(level / occupied)
        cross = np.where(level_of_p > 0, level_of_p * spread, 0.0).sum(1)
        found: np.ndarray = (own - cross) / total + np.log(below[kept] / total)
    return np.where(np.isfinite(found), found, np.inf)


def mean_squared_error(histogram: Histogram) -> float:
    """The range with the smallest expected squared error of rounding and clipping.

    As in "A white paper on neural network quantization", arXiv 2106.08295. Rounding is to -127 to 127
    steps; within a bin the values count as spread evenly, and the error is integrated exactly.
    """
    counts = histogram.used
    if not histogram.maximum:
        return histogram.maximum
    edges = np.arange(len(counts) + 1) * histogram.width

    def best(ranges: np.ndarray) -> float:
        errors = [float(counts @ np.diff(_error_integral(edges, amax / _STEPS))) for amax in ranges]
        return float(ranges[np.argmin(errors)])

    coarse = best(histogram.maximum * _COARSE)
    return best(np.minimum(coarse * _FINE, histogram.maximum))


def _error_integral(x: np.ndarray, step: float) -> np.ndarray:
    """The integral from 0 to ``x`` of the squared error of rounding and clipping to 127 steps.

    One step contributes ``step ** 3 / 12``; what is left to the nearest level, or to the last one,
    contributes a third of its cube.
    """
    steps = np.minimum(np.rint(x / step), _STEPS)
    integral: np.ndarray = steps * (step**3 / 12) + (x - steps * step) ** 3 / 3
    return integral


def _x_log_x(x: np.ndarray) -> np.ndarray:
    product: np.ndarray = x * np.log(np.where(x > 0, x, 1.0))
    return product


Calibrator = Callable[[Histogram], float]
# In the order of preference between equals: what clips nothing comes first.
CALIBRATORS: dict[str, Calibrator] = {
    "min-max": min_max,
    "percentile-99.999": partial(percentile, percent=99.999),
    "percentile-99.99": partial(percentile, percent=99.99),
    "percentile-99.9": partial(percentile, percent=99.9),
    "entropy": entropy,
    "mse": mean_squared_error,
}
