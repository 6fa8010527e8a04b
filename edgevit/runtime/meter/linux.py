"""Memory, loads, temperature, clocks and throttling, as the kernel gives them on any machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from edgevit.runtime.meter.files import number, text
from edgevit.runtime.meter.reading import Reading
from edgevit.runtime.meter.temperature import chip_temperature

# What the kernel can hold down against heat; a fan is a cooling device too.
_THROTTLES = re.compile(r"throttle|cpufreq|devfreq|^processor$", re.IGNORECASE)


class LinuxSource:
    """Reads ``root``/proc and ``root``/sys."""

    name = "kernel"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._times: Optional[Tuple[float, float]] = None
        system = root / "sys"
        self._zones = sorted((system / "class/thermal").glob("thermal_zone*"))
        self._throttles = [
            device / "cur_state"
            for device in sorted((system / "class/thermal").glob("cooling_device*"))
            if _THROTTLES.search(text(device / "type") or "")
        ]
        self._core_clocks = sorted(
            (system / "devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
        )
        self._gpus = [
            device
            for device in sorted((system / "class/devfreq").glob("*"))
            if re.search(r"gpu|gv11b|ga10b|gp10b|gm20b", device.name)
        ]

    def read(self) -> Reading:
        memory = self._memory_kib()
        total, available = memory.get("MemTotal"), memory.get("MemAvailable")
        hottest = chip_temperature(self._temperatures())
        clocks_khz = [khz for khz in map(number, self._core_clocks) if khz is not None]
        gpu_clocks_hz = [
            hz for hz in (number(g / "cur_freq") for g in self._gpus) if hz is not None
        ]
        # In thousandths; the file is named so on every Jetson from TX2 to Orin.
        gpu_loads = [v for v in (number(g / "device/load") for g in self._gpus) if v is not None]
        states = [state for state in map(number, self._throttles) if state is not None]
        cpu_load_percent = self._cpu_load()
        absent = {} if hottest else {"temperature_c": "no thermal zone on the chip"}
        if cpu_load_percent is None:
            absent["cpu_load_percent"] = "needs two readings"
        return Reading(
            ram_used_bytes=(total - available) * 1024
            if total is not None and available is not None
            else None,
            ram_total_bytes=total * 1024 if total is not None else None,
            temperature_c=hottest[1] if hottest else None,
            cpu_load_percent=cpu_load_percent,
            gpu_load_percent=max(gpu_loads) / 10 if gpu_loads else None,
            cpu_clock_mhz=max(clocks_khz) / 1000 if clocks_khz else None,
            gpu_clock_mhz=max(gpu_clocks_hz) / 1e6 if gpu_clocks_hz else None,
            throttled=any(state > 0 for state in states) if states else None,
            points={"temperature_c": hottest[0]} if hottest else {},
            absent=absent,
        )

    def close(self) -> None:
        """Holds nothing open."""

    def _memory_kib(self) -> Dict[str, int]:
        lines = (text(self._root / "proc/meminfo") or "").splitlines()
        found = (re.match(r"(\w+):\s+(\d+) kB", line) for line in lines)
        return {match.group(1): int(match.group(2)) for match in found if match}

    def _temperatures(self) -> Dict[str, float]:
        zones_c: Dict[str, float] = {}
        for zone in self._zones:
            name, millidegrees = text(zone / "type"), number(zone / "temp")
            if name and millidegrees is not None:
                zones_c[name] = max(millidegrees / 1000, zones_c.get(name, -273.0))
        return zones_c

    def _cpu_load(self) -> Optional[float]:
        """Percent of all cores' time that was not idle, since the call before; None at the first."""
        first = (text(self._root / "proc/stat") or "").partition("\n")[0].split()
        if len(first) < 5 or first[0] != "cpu":
            return None
        # user nice system idle iowait irq softirq steal; guest times are within user and nice.
        ticks: List[float] = [float(value) for value in first[1:9]]
        total, idle = sum(ticks), sum(ticks[3:5])
        before, self._times = self._times, (total, idle)
        if before is None or total <= before[0]:
            return None
        return 100 * (1 - (idle - before[1]) / (total - before[0]))
