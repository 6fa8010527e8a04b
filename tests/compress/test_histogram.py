from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgevit.compress.histogram import BINS, Histogram


def histogram(*parts: np.ndarray) -> Histogram:
    found = Histogram()
    for part in parts:
        found.add(part)
    return found


magnitudes = hnp.arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.floats(-(2.0**100), 2.0**100, width=32)
    | st.floats(-1, 1, width=32)
    | st.sampled_from([0.0, 1.0, 2.0, 4.0, 1e-45, 3.4028234663852886e38]),
)


@given(values=magnitudes, data=st.data())
def test_the_result_depends_on_the_values_alone(values: np.ndarray, data: st.DataObject) -> None:
    """In whatever order they come, and in whatever parts."""
    whole = histogram(values)
    shuffled = values[data.draw(st.permutations(range(len(values))))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=5)))
    split = histogram(*np.split(shuffled, cuts))
    assert (split.maximum, split.width) == (whole.maximum, whole.width)
    np.testing.assert_array_equal(split.counts, whole.counts)


@given(values=magnitudes)
def test_counts_and_maximum_are_exact(values: np.ndarray) -> None:
    found = histogram(*values[:, None])
    exact = np.abs(values.astype(np.float64))
    assert found.maximum == exact.max()
    assert found.total == len(values)
    wanted = np.bincount((exact // found.width).astype(int), minlength=BINS)
    np.testing.assert_array_equal(found.counts, wanted)
    assert found.used[-1] > 0 and found.used.sum() == len(values)


def test_the_maximum_lies_in_the_upper_half() -> None:
    for largest in (0.013, 1.0, 1.999, 300.0):
        assert len(histogram(np.array([largest, 1e-3])).used) > BINS / 2


def test_memory_does_not_grow_with_the_values() -> None:
    generator = np.random.default_rng(0)
    found = Histogram()
    for scale in (1e-3, 1.0, 1e6) * 20:
        found.add(generator.normal(size=(3, 500)) * scale)
        assert found.counts.nbytes == BINS * 8
    assert found.total == 60 * 1500
    arrays = [value for value in vars(found).values() if not isinstance(value, (int, float))]
    assert len(arrays) == 1  # the counts are all that it holds


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_and_not_counted(bad: float) -> None:
    found = histogram(np.array([1.0]))
    with pytest.raises(ValueError, match="not finite"):
        found.add(np.array([1.0, bad, 2.0]))
    assert (found.total, found.maximum) == (1, 1.0)


def test_share_above() -> None:
    values = np.random.default_rng(1).exponential(size=20_000).astype(np.float32)
    found = histogram(values)
    for bound in (0.0, 0.01, 0.5, 2.0, float(values.max()), 100.0):
        # Off by what one bin holds, at most.
        assert found.share_above(bound) == pytest.approx((values > bound).mean(), abs=0.005)
    assert found.share_above(float(values.max())) == 0
    assert Histogram().share_above(0.0) == 0


def test_nothing_added_and_half_precision() -> None:
    found = histogram(np.zeros((0, 3), np.float32), np.array([1.5, -3.0], np.float16))
    assert (found.total, found.maximum) == (2, 3.0)
