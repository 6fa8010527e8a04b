"""Energy per frame: power integrated over time, divided by the frames in it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Deque, Optional, Tuple

# Sensors renew their value a few times a second; over a longer hole nobody knows what was used.
_LONGEST_GAP_S = 2.0


@dataclass(frozen=True)
class Energy:
    """What ``frames`` frames in ``seconds`` seconds of measured power cost.

    ``marginal_energy_mj_per_frame`` is without what the machine uses idle, None where that was not
    measured. With noise and little work it can be negative.
    """

    seconds: float
    frames: int
    mean_power_mw: float
    energy_mj_per_frame: Optional[float]
    marginal_energy_mj_per_frame: Optional[float]


class EnergyCounter:
    """Integrates power samples (trapezoids) and counts frames between them.

    Time that no two samples at most 2 s apart enclose counts neither energy nor frames. It begins
    with the first frame; for a mean without frames call ``begin``. Not thread-safe.
    """

    def __init__(self, window_s: float = 2.0) -> None:
        self._window_s = window_s
        self._begun = False
        self._frames = 0
        # Sums over covered time up to each sample: its time, seconds, mJ, frames.
        self._sums: Deque[Tuple[float, float, float, int]] = deque()
        self._latest: Optional[Tuple[float, float, int]] = None  # time, mW, frames counted then

    def begin(self) -> None:
        self._begun = True

    def add_frame(self) -> None:
        self._begun = True
        self._frames += 1

    def add_power(self, time_s: float, power_mw: Optional[float]) -> None:
        """A sample; None says that there is none now, so that nothing is drawn across the hole."""
        if not self._begun:
            return
        before = self._latest
        self._latest = None if power_mw is None else (time_s, power_mw, self._frames)
        if power_mw is None:
            return
        if before is not None and 0 < time_s - before[0] <= _LONGEST_GAP_S:
            span_s = time_s - before[0]
            _, seconds, energy_mj, frames = self._sums[-1]
            self._sums.append(
                (
                    time_s,
                    seconds + span_s,
                    energy_mj + span_s * (before[1] + power_mw) / 2,
                    frames + self._frames - before[2],
                )
            )
        else:
            # A new start: what is before it stays in the sums of the whole, not in the window.
            _, seconds, energy_mj, frames = self._sums[-1] if self._sums else (0.0, 0.0, 0.0, 0)
            self._sums.clear()
            self._sums.append((time_s, seconds, energy_mj, frames))
        # Keep one sample at or before the window's start.
        while len(self._sums) > 1 and self._sums[1][0] <= time_s - self._window_s:
            self._sums.popleft()

    def whole(self, idle_power_mw: Optional[float] = None) -> Optional[Energy]:
        """Since the beginning; None until a whole window is measured."""
        if not self._sums or self._sums[-1][1] < max(self._window_s, 1e-9):
            return None
        _, seconds, energy_mj, frames = self._sums[-1]
        return _energy(seconds, energy_mj, frames, idle_power_mw)

    def window(self, idle_power_mw: Optional[float] = None) -> Optional[Energy]:
        """Over the last window; None until it is full."""
        if not self._sums or self._sums[-1][1] - self._sums[0][1] < self._window_s:
            return None
        first, last = self._sums[0], self._sums[-1]
        return _energy(last[1] - first[1], last[2] - first[2], last[3] - first[3], idle_power_mw)


def _energy(
    seconds: float, energy_mj: float, frames: int, idle_power_mw: Optional[float]
) -> Energy:
    per_frame = energy_mj / frames if frames else None
    marginal = (
        (energy_mj - idle_power_mw * seconds) / frames
        if frames and idle_power_mw is not None
        else None
    )
    return Energy(seconds, frames, energy_mj / seconds, per_frame, marginal)
