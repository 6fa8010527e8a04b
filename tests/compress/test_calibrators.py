from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgevit.compress.calibrators import CALIBRATORS, LEVELS, divergences
from edgevit.compress.histogram import Histogram
from edgevit.recipe import Quantize


def histogram(values: np.ndarray) -> Histogram:
    found = Histogram()
    found.add(values)
    return found


def draws(name: str) -> np.ndarray:
    generator = np.random.default_rng(0)
    values = {
        "normal": lambda: generator.normal(size=50_000),
        "heavy tails": lambda: generator.standard_t(3, 50_000),
        "one sided": lambda: np.maximum(generator.normal(size=50_000), -0.17),
        "outlier": lambda: np.append(generator.normal(size=50_000), 60.0),
        "uniform": lambda: generator.uniform(-3, 3, 50_000),
    }[name]()
    return np.asarray(values, np.float32)


NAMES = ("normal", "heavy tails", "one sided", "outlier", "uniform")


def slow_divergence(counts: list[int], kept: int) -> float:
    """As the slides of TensorRT's calibration have it, one number at a time."""
    p = [float(c) for c in counts[:kept]]
    p[-1] += sum(counts[kept:])
    q = [0.0] * kept
    for level in range(LEVELS):
        start, end = level * kept // LEVELS, (level + 1) * kept // LEVELS
        amount = sum(counts[start:end])
        filled = [i for i in range(start, end) if p[i] > 0]
        for i in filled:
            q[i] = amount / len(filled)
    p_total, q_total = sum(p), sum(q)
    divergence = 0.0
    for p_i, q_i in zip(p, q, strict=True):
        if p_i > 0:
            if q_i == 0:
                return math.inf
            divergence += p_i / p_total * math.log((p_i / p_total) / (q_i / q_total))
    return divergence


@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 5, 1000]), min_size=128, max_size=300).filter(any)
)
@settings(max_examples=15, deadline=None)
def test_divergences_against_a_slow_direct_computation(counts: list[int]) -> None:
    wanted = [slow_divergence(counts, kept) for kept in range(LEVELS, len(counts) + 1)]
    np.testing.assert_allclose(divergences(np.array(counts)), wanted, rtol=1e-9, atol=1e-11)


def test_divergence_of_counts_known_by_hand() -> None:
    """256 bins, flat but for one pair: 128 levels of two bins lose what tells its halves apart."""
    counts = np.ones(256, np.int64)
    counts[0], counts[1] = 3, 1
    wanted = 3 / 258 * math.log(3 / 2) + 1 / 258 * math.log(1 / 2)
    found = divergences(counts)
    assert found[-1] == pytest.approx(wanted)
    # 128 bins are their own levels: only the 127 clipped values, put on the last bin, are lost.
    kept = np.full(128, 1.0)
    kept[0] = 3
    p = kept.copy()
    p[-1] += 128
    assert found[0] == pytest.approx((p / 258 * np.log(p / 258 / (kept / 130))).sum())


def test_entropy_keeps_the_range_with_the_smallest_divergence() -> None:
    values = draws("heavy tails")
    found = histogram(values)
    amax = CALIBRATORS["entropy"](found)
    kept = round(amax / found.width)
    counts = found.used.tolist()
    best = slow_divergence(counts, kept)
    for other in (*range(LEVELS, len(counts), 97), kept - 1, kept + 1, len(counts)):
        assert best <= slow_divergence(counts, other) + 1e-12
    assert amax < np.abs(values).max()  # it does clip tails like these


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("percent", [99.9, 99.99, 99.999])
def test_percentiles_against_the_sorted_values(name: str, percent: float) -> None:
    values = np.abs(draws(name))
    found = histogram(values)
    amax = CALIBRATORS[f"percentile-{percent:g}"](found)
    # The two values between which the percentile lies, and a bin's width either side.
    low, high = (np.percentile(values, percent, method=method) for method in ("lower", "higher"))
    assert low - found.width <= amax <= high + found.width
    assert found.share_above(amax) == pytest.approx(1 - percent / 100, abs=2e-5)


def squared_error(values: np.ndarray, amax: float) -> float:
    step = amax / 127
    rounded = np.clip(np.rint(values.astype(np.float64) / step), -127, 127) * step
    return float(np.square(rounded - values).mean())


@pytest.mark.parametrize("name", NAMES)
def test_mse_against_brute_force(name: str) -> None:
    """On the values themselves, over an even grid of ranges: none is better by more than what a
    histogram can't know, which is where in its bin a value lies that two fifths of them share."""
    closeness = 1.03 if name == "one sided" else 1.005
    values = draws(name)
    amax = CALIBRATORS["mse"](histogram(values))
    largest = float(np.abs(values).max())
    best = min(squared_error(values, largest * share) for share in np.linspace(0.01, 1, 300))
    assert squared_error(values, amax) <= closeness * best


def test_mse_where_clipping_pays_and_where_it_does_not() -> None:
    outlier, uniform = draws("outlier"), draws("uniform")
    # One value in 50,001 is lost so that all the others have finer steps.
    assert CALIBRATORS["mse"](histogram(outlier)) < 60
    assert CALIBRATORS["mse"](histogram(uniform)) > 0.98 * np.abs(uniform).max()


@pytest.mark.parametrize("name", CALIBRATORS)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50),
    power=st.integers(-8, 8),
)
@settings(max_examples=25, deadline=None)
def test_no_range_exceeds_the_maximum_and_all_scale_with_the_values(
    name: str, values: list[float], power: int
) -> None:
    array = np.array(values, np.float32)
    array[np.abs(array) < 1e-3] = 0
    amax = CALIBRATORS[name](histogram(array))
    assert 0 <= amax <= np.abs(array).max()
    assert (amax > 0) == bool(array.any())
    scaled = CALIBRATORS[name](histogram(array * np.float32(2.0**power)))
    assert scaled == pytest.approx(amax * 2.0**power)


def test_the_recipe_knows_each_of_them() -> None:
    allowed = Quantize.__dataclass_fields__["calibrator"].metadata["check"]
    assert all(allowed(name) for name in (*CALIBRATORS, "auto"))
