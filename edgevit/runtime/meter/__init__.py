"""Power, memory, temperature and energy per frame: measured, or absent with the reason."""

from edgevit.runtime.meter.energy import Energy
from edgevit.runtime.meter.meter import Meter, open_meter
from edgevit.runtime.meter.reading import Rail, Reading

__all__ = ["Energy", "Meter", "Rail", "Reading", "open_meter"]
