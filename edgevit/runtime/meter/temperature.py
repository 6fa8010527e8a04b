"""Which of a machine's thermal zones is the temperature of the chip."""

from __future__ import annotations

import re
from typing import Mapping, Optional, Tuple

# Zones on the chip itself, by the names that tegrastats and the kernel use (with or without
# "-thermal"). PMIC reads 50 or 100 degrees for ever on Xavier; Tdiode and Tboard are the board's.
_ON_CHIP = re.compile(
    r"^(tj|cpu\d*|gpu\d*|soc\d*|cv\d*|ao|aux|x86_pkg_temp|coretemp|k10temp)(-therm(al)?)?$",
    re.IGNORECASE,
)


def chip_temperature(zones_c: Mapping[str, float]) -> Optional[Tuple[str, float]]:
    """Name and temperature of the hottest zone on the chip; None without one.

    A zone that is switched off reads -256 or 0 and less: those can't be the hottest of a live chip.
    """
    on_chip = [
        (zone_c, name)
        for name, zone_c in zones_c.items()
        if _ON_CHIP.match(name) and 0 < zone_c < 150
    ]
    if not on_chip:
        return None
    zone_c, name = max(on_chip)
    return name, zone_c
