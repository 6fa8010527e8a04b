"""A histogram of magnitudes that takes any number of values in one pass and a fixed amount of memory.

Bins are a power of two wide and start at zero. A value beyond the range doubles the range as often as
needed, each time by adding pairs of bins: the counts are then exactly those of wider bins from the
start, so the result depends on the values alone, not on their order or on how they were split.
"""

from __future__ import annotations

import math

import numpy as np

# After the last doubling the largest value lies in the upper half, so at least 2,048 bins are in use.
BINS = 4096
# Values below are all in the first bin: an activation this small is zero.
_SMALLEST_RANGE_EXPONENT = -64


class Histogram:
    """Counts of ``|x|``: ``counts[i]`` of the values in ``[i * width, (i + 1) * width)``.

    ``counts`` is int64 ``[BINS]`` and exact; so is ``maximum``, the largest magnitude.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, np.int64)
        self.maximum = 0.0
        self._range_exponent = _SMALLEST_RANGE_EXPONENT

    @property
    def width(self) -> float:
        """Width of a bin, a power of two."""
        return math.ldexp(1.0, self._range_exponent) / BINS

    @property
    def total(self) -> int:
        """Number of values."""
        return int(self.counts.sum())

    @property
    def used(self) -> np.ndarray:
        """``counts`` up to the bin of the largest value."""
        return self.counts[: int(self.maximum / self.width) + 1]

    def add(self, values: np.ndarray) -> None:
        """Count values of any shape. Raises :class:`ValueError` for NaN or an infinity."""
        magnitudes = np.abs(values.astype(np.float32, copy=False)).ravel()
        largest = float(magnitudes.max(initial=0.0))
        if not math.isfinite(largest):
            raise ValueError("not finite")
        self.maximum = max(self.maximum, largest)
        if largest:
            self._widen(math.frexp(largest)[1])  # largest < 2 ** exponent, whatever the rounding
        # Both factors of the product are exact but where it is too small to matter.
        magnitudes *= np.float32(1 / self.width)
        self.counts += np.bincount(magnitudes.astype(np.intp), minlength=BINS)

    def share_above(self, value: float) -> float:
        """Share of the values that are larger; within a bin they count as spread evenly."""
        if value >= self.maximum or not self.total:
            return 0.0
        position = value / self.width
        bin_number = int(position)
        above = self.counts[bin_number + 1 :].sum()
        above += self.counts[bin_number] * (1 - (position - bin_number))
        return float(above / self.total)

    def _widen(self, exponent: int) -> None:
        while self._range_exponent < exponent:
            half = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.concatenate([half, np.zeros_like(half)])
            self._range_exponent += 1
