"""Power of a PC's processor from its energy counters (RAPL)."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Callable, List, Optional, Tuple

from edgevit.runtime.meter.boards import checked_rails
from edgevit.runtime.meter.files import number, text
from edgevit.runtime.meter.reading import Reading
from edgevit.runtime.meter.source import SourceUnavailableError

# The counter moves about once a millisecond; over less than this its steps are a large part.
_LEAST_SPAN_S = 0.05


class RaplSource:
    """Power of all processor packages together, or of the whole platform where it is counted."""

    name = "RAPL"

    def __init__(
        self, root: Path = Path("/"), clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        zones = [
            (text(zone / "name") or "", zone)
            for zone in sorted((root / "sys/class/powercap").glob("*-rapl:*"))
            if re.fullmatch(
                r"[\w-]*rapl:\d+", zone.name
            )  # the domains within a package are its parts
        ]
        if not zones:
            raise SourceUnavailableError("no energy counters")
        platform = [zone for name, zone in zones if name == "psys"]
        packages = [zone for name, zone in zones if name.startswith("package")]
        self._zones = platform or packages
        self._point = "platform" if platform else "processor package"
        self._clock_s = clock_s
        if not self._zones or any(number(zone / "energy_uj") is None for zone in self._zones):
            raise SourceUnavailableError(
                "energy counters can't be read (the kernel leaves them to root)"
            )
        self._before: Optional[Tuple[float, List[float]]] = None
        self._power_mw: Optional[float] = None

    def read(self) -> Reading:
        now_s = self._clock_s()
        if self._before is None or now_s - self._before[0] >= _LEAST_SPAN_S:
            self._power_mw = self._measure(now_s)
        rails, dropped = checked_rails(
            [] if self._power_mw is None else [(self._point, self._power_mw)]
        )
        return Reading(
            power_mw=rails[0].power_mw if rails else None,
            rails=rails,
            dropped=tuple(dropped),
            points={"power_mw": self._point} if rails else {},
            absent={} if rails else {"power_mw": "; ".join(dropped) or "needs two readings"},
        )

    def close(self) -> None:
        """Holds nothing open."""

    def _measure(self, now_s: float) -> Optional[float]:
        """Mean power since the call before; None at the first."""
        read = [number(zone / "energy_uj") for zone in self._zones]
        energies_uj = [energy for energy in read if energy is not None]
        if len(energies_uj) < len(read):
            raise SourceUnavailableError("energy counters can't be read any more")
        before, self._before = self._before, (now_s, energies_uj)
        if before is None:
            return None
        total_uj = 0.0
        for zone, now_uj, then_uj in zip(self._zones, energies_uj, before[1]):
            grown_uj = now_uj - then_uj
            if grown_uj < 0:  # the counter began again
                grown_uj += number(zone / "max_energy_range_uj") or 0.0
            total_uj += grown_uj
        return total_uj / (now_s - before[0]) / 1000
