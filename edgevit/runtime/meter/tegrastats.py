"""Figures from NVIDIA's tegrastats, which every Jetson has."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from typing import Dict, List, Optional, Tuple

from edgevit.runtime.meter.boards import Board, checked_rails, total_power
from edgevit.runtime.meter.reading import Reading
from edgevit.runtime.meter.source import SourceUnavailableError
from edgevit.runtime.meter.temperature import chip_temperature

_INTERVAL_MS = 200
_FIRST_LINE_S = 3.0
_STALE_S = 5.0

_RAM = re.compile(r"\bRAM (\d+)/(\d+)MB")
_CORES = re.compile(r"\bCPU \[([^\]]*)\](?:@(\d+))?")
_CORE = re.compile(r"^(\d+)%(?:@(\d+))?$")
_GPU = re.compile(r"\bGR3D_FREQ (?:(\d+)%)?(?:@\[?(\d+(?:,\d+)*)\]?)?")
_MEMORY = re.compile(r"\bEMC_FREQ (?:\d+%)?@(\d+)")
_ZONE = re.compile(r"(?<!\S)([A-Za-z]\w*)@(-?\d+(?:\.\d+)?)C(?!\S)")
# `VDD_IN 5480mW/5510mW` and, without units, `GPU 463/463`: now, and the mean since it began.
# `CPU` is a list of cores, a temperature and a rail in one line; RAM and SWAP end in MB.
_RAIL = re.compile(r"(?<!\S)([A-Za-z]\w*) (-?\d+)(?:mW)?/-?\d+(?:mW)?(?!\S)")


def parse_line(line: str, board: Optional[Board] = None) -> Reading:
    """The figures in one line of tegrastats; those it does not have are absent. Raises nothing.

    Rails are in mW with or without their unit, memory in units of 2**20 bytes, clocks in MHz. The CPU load
    is the mean over the cores that are on.
    """
    absent: Dict[str, str] = {}
    points: Dict[str, str] = {}
    rails, dropped = checked_rails((name, float(now)) for name, now in _RAIL.findall(line))
    power_mw, point, why = total_power(board, rails)
    if point is not None:
        points["power_mw"] = point
    if why is not None:
        absent["power_mw"] = "; ".join([why, *dropped])
    ram = _RAM.search(line)
    hottest = chip_temperature({name: float(c) for name, c in _ZONE.findall(line)})
    if hottest is not None:
        points["temperature_c"] = hottest[0]
    gpu = _GPU.search(line)
    loads, clocks = _cores(line)
    memory = _MEMORY.search(line)
    return Reading(
        power_mw=power_mw,
        ram_used_bytes=int(ram.group(1)) << 20 if ram else None,
        ram_total_bytes=int(ram.group(2)) << 20 if ram else None,
        temperature_c=hottest[1] if hottest else None,
        gpu_load_percent=float(gpu.group(1)) if gpu and gpu.group(1) else None,
        cpu_load_percent=sum(loads) / len(loads) if loads else None,
        cpu_clock_mhz=max(clocks) if clocks else None,
        gpu_clock_mhz=max(map(float, gpu.group(2).split(","))) if gpu and gpu.group(2) else None,
        memory_clock_mhz=float(memory.group(1)) if memory else None,
        rails=rails,
        dropped=tuple(dropped),
        points=points,
        absent=absent,
    )


def _cores(line: str) -> Tuple[List[float], List[float]]:
    """Loads in percent and clocks in MHz of the cores that are on."""
    cores = _CORES.search(line)
    if cores is None:
        return [], []
    on = [core for core in map(_CORE.match, cores.group(1).split(",")) if core]
    clocks = [float(core.group(2)) for core in on if core.group(2)]
    if cores.group(2):
        clocks.append(float(cores.group(2)))  # older releases: one clock behind the list
    return [float(core.group(1)) for core in on], clocks


class TegrastatsSource:
    """Keeps the newest line of a tegrastats that it starts and ends."""

    name = "tegrastats"

    def __init__(self, board: Optional[Board] = None, program: str = "tegrastats") -> None:
        path = shutil.which(program)
        if path is None:
            raise SourceUnavailableError("not installed")
        self._board = board
        self._line = ""
        self._line_s = time.monotonic()
        self._arrived = threading.Event()
        try:
            self._process = subprocess.Popen(  # noqa: S603  # NVIDIA's program, with fixed arguments
                [path, "--interval", str(_INTERVAL_MS)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise SourceUnavailableError(f"can't be started: {error}") from error
        self._reader = threading.Thread(target=self._follow, name="tegrastats", daemon=True)
        self._reader.start()
        if not self._arrived.wait(_FIRST_LINE_S) or not self._line:
            self.close()
            raise SourceUnavailableError("prints nothing")

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._line, self._line_s = line, time.monotonic()
            self._arrived.set()
        self._line = ""
        self._arrived.set()

    def read(self) -> Reading:
        line = self._line
        if not line:
            raise SourceUnavailableError("it has ended")
        if time.monotonic() - self._line_s > _STALE_S:
            raise SourceUnavailableError(f"it has printed nothing for {_STALE_S:g} s")
        return parse_line(line, self._board)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(2)
        if self._process.stdout is not None:
            self._process.stdout.close()
