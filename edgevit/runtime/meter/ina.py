"""Power read straight from the sensors on the board: INA3221 and INA238, in sysfs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import List, Optional, Tuple

from edgevit.runtime.meter.boards import Board, checked_rails, total_power
from edgevit.runtime.meter.files import number, text
from edgevit.runtime.meter.reading import Reading
from edgevit.runtime.meter.source import SourceUnavailableError


class _Channel:
    """The files of one rail; voltages in mV, currents in mA, or the power in ``power_unit_mw``."""

    def __init__(
        self,
        name: str,
        volt: Path,
        curr: Path,
        power: Optional[Path] = None,
        power_unit_mw: float = 1.0,
    ) -> None:
        self.name = name
        self._volt = volt
        self._curr = curr
        self._power = power if power is not None and power.exists() else None
        self._power_unit_mw = power_unit_mw

    def power_mw(self) -> Optional[float]:
        """None where a file can't be read now (the sensor's bus answers with errors at times)."""
        if self._power is not None:
            power = number(self._power)
            return None if power is None else power * self._power_unit_mw
        volt_mv, curr_ma = number(self._volt), number(self._curr)
        return None if volt_mv is None or curr_ma is None else volt_mv * curr_ma / 1000


class InaSource:
    """The rails of every power sensor under ``root``; their total as ``board`` defines it."""

    def __init__(self, board: Optional[Board] = None, root: Path = Path("/")) -> None:
        self._board = board
        self._channels: List[_Channel] = []
        kinds = set()
        for device in sorted((root / "sys/bus/i2c/devices").glob("*")):
            kind = (text(device / "name") or "").lower()
            if kind.startswith("ina3221"):
                found = _ina3221(device)
            elif kind.startswith("ina238"):
                found = _ina238(device)
            else:
                continue
            self._channels += found
            kinds.add(kind[:7].rstrip("x").upper())
        if not self._channels:
            raise SourceUnavailableError("no INA3221 or INA238 power sensor that can be read")
        self.name = " and ".join(sorted(kinds))

    def read(self) -> Reading:
        measured: List[Tuple[str, float]] = []
        unread: List[str] = []
        for channel in self._channels:
            power_mw = channel.power_mw()
            if power_mw is None:
                unread.append(f"{channel.name}: can't be read")
            else:
                measured.append((channel.name, power_mw))
        rails, dropped = checked_rails(measured)
        dropped += unread
        power_mw, point, why = total_power(self._board, rails)
        return Reading(
            power_mw=power_mw,
            rails=rails,
            dropped=tuple(dropped),
            points={} if point is None else {"power_mw": point},
            absent={} if why is None else {"power_mw": "; ".join([why, *dropped])},
        )

    def close(self) -> None:
        """Holds nothing open."""


def _ina3221(device: Path) -> List[_Channel]:
    channels = []
    # JetPack 5 and later. in4 to in6 are shunt voltages, in7 their sum: no rails.
    for label in sorted(device.glob("hwmon/hwmon*/in[123]_label")):
        name, folder, channel = text(label), label.parent, label.name[2]
        if name and text(folder / f"in{channel}_enable") != "0":
            volt, curr = folder / f"in{channel}_input", folder / f"curr{channel}_input"
            channels.append(_Channel(name, volt, curr))
    # JetPack 4.
    for label in sorted(device.glob("iio:device*/rail_name_*")):
        name, folder = text(label), label.parent
        channel = re.sub(r"\D", "", label.name)
        if name:
            volt = folder / f"in_voltage{channel}_input"
            curr = folder / f"in_current{channel}_input"
            channels.append(_Channel(name, volt, curr, folder / f"in_power{channel}_input"))
    return channels


def _ina238(device: Path) -> List[_Channel]:
    # One channel, the whole input of Thor's carrier board; the kernel gives its power in microwatts.
    return [
        _Channel(
            text(folder / "in1_label") or "VIN",
            folder / "in1_input",
            folder / "curr1_input",
            folder / "power1_input",
            power_unit_mw=0.001,
        )
        for folder in sorted(device.glob("hwmon/hwmon*"))
    ]
