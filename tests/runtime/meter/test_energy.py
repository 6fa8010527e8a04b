from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevit.runtime.meter.energy import EnergyCounter


def steady(power_mw: float, seconds: int, frames_per_second: int) -> EnergyCounter:
    """Samples every quarter second, frames in between."""
    counter = EnergyCounter(window_s=2.0)
    counter.begin()
    for quarter in range(4 * seconds + 1):
        counter.add_power(quarter / 4, power_mw)
        if quarter < 4 * seconds:
            for _ in range(frames_per_second // 4):
                counter.add_frame()
    return counter


def test_energy_is_power_by_time_by_frames() -> None:
    energy = steady(6000, 10, 20).whole(idle_power_mw=2000)
    assert energy is not None
    assert (energy.seconds, energy.frames) == (10, 200)
    assert energy.mean_power_mw == pytest.approx(6000)
    assert energy.energy_mj_per_frame == pytest.approx(6000 * 10 / 200)
    assert energy.marginal_energy_mj_per_frame == pytest.approx(4000 * 10 / 200)


def test_without_an_idle_power_nothing_is_marginal() -> None:
    energy = steady(6000, 10, 20).whole()
    assert energy is not None
    assert energy.marginal_energy_mj_per_frame is None


def test_power_is_integrated_and_not_averaged_over_samples() -> None:
    counter = EnergyCounter()
    counter.begin()
    # Uneven samples: 0 to 1 s a ramp from 0 to 1000 mW, then 1000 mW for 2 s.
    for time_s, power_mw in [(0.0, 0.0), (0.1, 100.0), (0.2, 200.0), (1.0, 1000.0), (3.0, 1000.0)]:
        counter.add_power(time_s, power_mw)
    energy = counter.whole()
    assert energy is not None
    assert energy.mean_power_mw == pytest.approx((500 + 2000) / 3)
    assert energy.energy_mj_per_frame is None  # no frames


def test_less_than_a_window_is_no_figure() -> None:
    assert steady(6000, 1, 20).whole() is None
    assert steady(6000, 1, 20).window() is None
    assert steady(6000, 2, 20).whole() is not None


def test_the_window_forgets() -> None:
    counter = steady(1000, 10, 20)
    for quarter in range(41, 61):
        counter.add_frame()
        counter.add_power(quarter / 4, 9000)
    recent, whole = counter.window(), counter.whole()
    assert recent is not None
    assert whole is not None
    assert recent.seconds == 2
    assert recent.energy_mj_per_frame == pytest.approx(9000 * 2 / 8)
    assert 1000 < whole.mean_power_mw < 9000


@pytest.mark.parametrize("hole", ["none", "late"])
def test_nothing_is_drawn_across_a_hole(hole: str) -> None:
    counter = steady(4000, 4, 20)
    for _ in range(1000):
        counter.add_frame()  # frames that nobody measured
    if hole == "none":
        counter.add_power(4.5, None)
    else:
        pass  # and no sample at all for 96 s
    for quarter in range(17):
        counter.add_power(100 + quarter / 4, 4000)
        if quarter < 16:
            counter.add_frame()
    energy = counter.whole()
    assert energy is not None
    assert (energy.seconds, energy.frames) == (8, 80 + 16)
    assert energy.mean_power_mw == pytest.approx(4000)


def test_it_begins_with_the_first_frame() -> None:
    counter = EnergyCounter()
    for second in range(10):
        counter.add_power(second, 9000)  # the model is loading
    counter.add_frame()
    for second in range(10, 14):
        counter.add_power(second, 3000)
        counter.add_frame()
    energy = counter.whole()
    assert energy is not None
    assert (energy.seconds, energy.mean_power_mw, energy.frames) == (3, 3000, 3)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 3), st.one_of(st.none(), st.floats(0, 3e5)), st.integers(0, 5)),
        min_size=1,
        max_size=60,
    )
)
def test_against_plain_arithmetic(steps: list[tuple[float, float | None, int]]) -> None:
    """The whole and the mean never leave what the samples allow, whatever the holes."""
    counter = EnergyCounter(window_s=1.0)
    counter.begin()
    now_s, seconds, energy_mj, frames = 0.0, 0.0, 0.0, 0
    before: tuple[float, float] | None = None
    between = 0
    for span_s, power_mw, new in steps:
        now_s += span_s
        counter.add_power(now_s, power_mw)
        if before is not None and power_mw is not None and now_s - before[0] <= 2:
            seconds += now_s - before[0]
            energy_mj += (now_s - before[0]) * (power_mw + before[1]) / 2
            frames += between
        before = None if power_mw is None else (now_s, power_mw)
        between = new
        for _ in range(new):
            counter.add_frame()
    whole = counter.whole()
    if whole is None:
        assert seconds < 1.0 + 1e-6
    else:
        assert whole.seconds == pytest.approx(seconds)
        assert whole.mean_power_mw == pytest.approx(energy_mj / seconds)
        assert whole.frames == frames
