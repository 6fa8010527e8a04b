"""The meter: opens what sources a machine has and samples them while something else works."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from edgevit.runtime.meter.boards import Board, identify_board
from edgevit.runtime.meter.energy import Energy, EnergyCounter
from edgevit.runtime.meter.ina import InaSource
from edgevit.runtime.meter.jtop import JtopSource
from edgevit.runtime.meter.linux import LinuxSource
from edgevit.runtime.meter.nvpmodel import NvpmodelSource
from edgevit.runtime.meter.psutil import PsutilSource
from edgevit.runtime.meter.rapl import RaplSource
from edgevit.runtime.meter.reading import CONDITIONS, FIGURES, Reading, merged
from edgevit.runtime.meter.source import Source, SourceUnavailableError
from edgevit.runtime.meter.tegrastats import TegrastatsSource

_log = logging.getLogger(__name__)

_PERIOD_S = 0.2
_WINDOW_S = 2.0


@dataclass(frozen=True)
class Opener:
    """A source to try: opened while one of the figures or conditions that it ``gives`` is missing.

    ``open`` raises ``SourceUnavailableError`` where this machine lacks it.
    """

    name: str
    gives: Tuple[str, ...]
    open: Callable[[], Source]


def open_meter(board: Optional[Board] = None) -> Meter:
    """A meter of this machine, sampling. Returns at once: sources are opened in its thread.

    The sources, best first: on a Jetson jtop, the board's power sensors, the kernel, nvpmodel,
    tegrastats; on a PC the kernel, psutil, RAPL. ``board`` defines the total power; without it the
    board that the device tree names.
    """
    return Meter(machine_sources(board if board is not None else identify_board()))


def machine_sources(board: Optional[Board], root: Path = Path("/")) -> List[Opener]:
    """What to try on the machine whose /proc and /sys are under ``root``, best first."""
    if not (root / "proc/device-tree/compatible").exists():
        return [
            Opener("kernel", FIGURES, lambda: LinuxSource(root)),
            Opener("psutil", ("temperature_c", "ram_used_bytes"), PsutilSource),
            Opener("RAPL", ("power_mw",), lambda: RaplSource(root)),
        ]
    return [
        Opener("jtop", (*FIGURES, *CONDITIONS), lambda: JtopSource(board)),
        Opener("power sensors", ("power_mw",), lambda: InaSource(board, root)),
        Opener("kernel", (*FIGURES, *CONDITIONS), lambda: LinuxSource(root)),
        Opener("nvpmodel", ("power_mode",), NvpmodelSource),
        # A program that keeps running: last, for what nothing else gave.
        Opener(
            "tegrastats",
            ("power_mw", "ram_used_bytes", "temperature_c", "gpu_load_percent"),
            lambda: TegrastatsSource(board),
        ),
    ]


class Meter:
    """Samples power, memory, temperature and loads five times a second, in a thread of its own.

    Figures come from the first source that has them; a further source is opened only while a figure
    is missing. A source that dies is left, with one warning, and the next is tried.
    """

    def __init__(
        self,
        sources: Sequence[Opener],
        period_s: float = _PERIOD_S,
        window_s: float = _WINDOW_S,
    ) -> None:
        self._untried = list(sources)
        self._open: List[Tuple[Opener, Source]] = []
        self._unavailable: Dict[Opener, str] = {}
        self._period_s = period_s
        self._window_s = window_s
        self._reading = Reading(absent=dict.fromkeys(FIGURES, "no reading yet"))
        self._lock = threading.Lock()
        self._energy = EnergyCounter(window_s)
        self._idle: Optional[EnergyCounter] = None
        self._idle_power_mw: Optional[float] = None
        self._first = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)
        self._thread.start()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def read(self, wait_s: float = 0.0) -> Reading:
        """The newest reading; waits up to ``wait_s`` for the first one."""
        self._first.wait(wait_s)
        return self._reading

    def add_frame(self) -> None:
        """Count a frame for the energy per frame."""
        with self._lock:
            self._energy.add_frame()

    def measure_idle(self, seconds: float) -> Optional[float]:
        """Mean power in mW over ``seconds``, to be called while nothing runs; None without a sensor.

        It is what ``marginal_energy_mj_per_frame`` leaves out from then on.
        """
        self._first.wait(max(seconds, 10.0))
        counter = EnergyCounter(window_s=0.0)
        counter.begin()
        with self._lock:
            self._idle = counter
        self._stop.wait(seconds)
        with self._lock:
            self._idle = None
            measured = counter.whole()
            self._idle_power_mw = measured.mean_power_mw if measured else None
            return self._idle_power_mw

    def energy(self) -> Optional[Energy]:
        """From the first frame on; None until power was measured for a whole window (2 s)."""
        with self._lock:
            return self._energy.whole(self._idle_power_mw)

    def recent_energy(self) -> Optional[Energy]:
        """Over the last window; None until it is full."""
        with self._lock:
            return self._energy.window(self._idle_power_mw)

    def close(self) -> None:
        """Stop sampling and close the sources."""
        self._stop.set()
        self._thread.join(3)  # a service that hangs while it is opened is left to the process's end

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                reading = self._sample()
                now_s = time.monotonic()
                with self._lock:
                    self._energy.add_power(now_s, reading.power_mw)
                    if self._idle is not None:
                        self._idle.add_power(now_s, reading.power_mw)
                self._reading = reading
                self._first.set()
                self._stop.wait(self._period_s)
        finally:
            self._first.set()
            for _, source in self._open:
                with contextlib.suppress(Exception):
                    source.close()

    def _sample(self) -> Reading:
        readings: List[Tuple[str, Reading]] = []
        for opener, source in tuple(self._open):
            newest = self._read(opener, source)
            if newest is not None:
                readings.append((source.name, newest))
        untried, self._untried = self._untried, []
        for opener in untried:
            reading = merged(readings)
            if self._stop.is_set() or all(
                getattr(reading, name) is not None for name in opener.gives
            ):
                self._untried.append(opener)
                continue
            try:
                source = opener.open()
            except SourceUnavailableError as error:
                self._unavailable[opener] = str(error)
                continue
            except Exception as error:  # what a broken driver or package raises
                self._unavailable[opener] = f"failed: {error!r}"
                continue
            self._open.append((opener, source))
            newest = self._read(opener, source)
            if newest is not None:
                readings.append((source.name, newest))
        return self._explained(merged(readings))

    def _explained(self, reading: Reading) -> Reading:
        """``reading`` with the reason for each figure it lacks."""
        absent = {}
        for name in FIGURES:
            if getattr(reading, name) is None:
                reasons = [
                    f"{o.name}: {w}" for o, w in self._unavailable.items() if name in o.gives
                ]
                reasons += [reading.absent[name]] if name in reading.absent else []
                absent[name] = "; ".join(reasons) or "no sensor here has it"
        return replace(reading, absent=absent)

    def _read(self, opener: Opener, source: Source) -> Optional[Reading]:
        """What the source says; None, and the source is left, where it can't any more."""
        try:
            return source.read()
        except SourceUnavailableError as error:
            why = str(error)
        except Exception as error:  # a source must never end the run that it measures
            why = f"failed: {error!r}"
        self._open.remove((opener, source))
        self._unavailable[opener] = why
        _log.warning("Telemetry: %s is left: %s", source.name, why)
        with contextlib.suppress(Exception):
            source.close()
        return None
