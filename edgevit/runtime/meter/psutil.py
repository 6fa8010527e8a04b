"""Memory and temperature from psutil, where it is installed: sensors that are no thermal zones."""

from __future__ import annotations

import importlib
from typing import Any, Dict

from edgevit.runtime.meter.reading import Reading
from edgevit.runtime.meter.source import SourceUnavailableError
from edgevit.runtime.meter.temperature import chip_temperature


class PsutilSource:
    def __init__(self) -> None:
        try:
            self._psutil: Any = importlib.import_module("psutil")
        except ImportError as error:
            raise SourceUnavailableError("not installed") from error
        self.name = f"psutil {self._psutil.__version__}"

    def read(self) -> Reading:
        memory = self._psutil.virtual_memory()
        sensors: Dict[str, Any] = getattr(
            self._psutil, "sensors_temperatures", dict
        )()  # absent on some systems
        hottest = chip_temperature(
            {
                name: max(entry.current for entry in entries)
                for name, entries in sensors.items()
                if entries
            }
        )
        return Reading(
            ram_used_bytes=int(memory.total - memory.available),
            ram_total_bytes=int(memory.total),
            temperature_c=hottest[1] if hottest else None,
            points={"temperature_c": hottest[0]} if hottest else {},
            absent={} if hottest else {"temperature_c": "no sensor on the chip"},
        )

    def close(self) -> None:
        """Holds nothing open."""
