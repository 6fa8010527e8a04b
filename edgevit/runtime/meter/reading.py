"""What was measured at one moment, where, and why a figure is absent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Mapping, Optional, Sequence, Tuple

#: The figures of a reading, each absent (None) where no source gives it.
FIGURES = (
    "power_mw",
    "ram_used_bytes",
    "ram_total_bytes",
    "temperature_c",
    "gpu_load_percent",
    "cpu_load_percent",
)
#: What a figure was measured under: without it two figures can't be compared.
CONDITIONS = (
    "power_mode",
    "jetson_clocks",
    "cpu_clock_mhz",
    "gpu_clock_mhz",
    "memory_clock_mhz",
    "throttled",
)


@dataclass(frozen=True)
class Rail:
    """The power on one supply rail, under the board's own name for it."""

    name: str
    power_mw: float


@dataclass(frozen=True)
class Reading:
    """Figures and conditions of one moment; what is not known is None.

    ``power_mw`` is the total at the measuring point that ``points`` names (``VDD_IN (module)``), not
    a sum of whatever rails there are. ``ram_used_bytes`` is the whole machine's.
    ``temperature_c`` is the hottest place on the chip. Loads are of all cores together.
    ``cpu_clock_mhz`` is the fastest core's. ``throttled`` is whether clocks are held down now by heat.

    ``sources`` and ``points`` say, by the name of the figure or condition, what it came from and
    where it was measured. ``absent`` says why a figure is None. ``dropped`` names each rail whose
    value can't be a power, with the reason.
    """

    power_mw: Optional[float] = None
    ram_used_bytes: Optional[int] = None
    ram_total_bytes: Optional[int] = None
    temperature_c: Optional[float] = None
    gpu_load_percent: Optional[float] = None
    cpu_load_percent: Optional[float] = None
    power_mode: Optional[str] = None
    jetson_clocks: Optional[bool] = None
    cpu_clock_mhz: Optional[float] = None
    gpu_clock_mhz: Optional[float] = None
    memory_clock_mhz: Optional[float] = None
    throttled: Optional[bool] = None
    rails: Tuple[Rail, ...] = ()
    dropped: Tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    points: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)


def merged(readings: Sequence[Tuple[str, Reading]]) -> Reading:
    """One reading: each figure from the first of the named readings that has it.

    Rails are those of the reading that gave the power, or without one of the first that has any.
    """
    values: Dict[str, object] = {}
    sources: Dict[str, str] = {}
    points: Dict[str, str] = {}
    absent: Dict[str, str] = {}
    for name in (*FIGURES, *CONDITIONS):
        for source, reading in readings:
            value = getattr(reading, name)
            if value is not None:
                values[name] = value
                sources[name] = source
                if name in reading.points:
                    points[name] = reading.points[name]
                break
        else:
            reasons = [f"{s}: {r.absent[name]}" for s, r in readings if name in r.absent]
            if reasons:
                absent[name] = "; ".join(reasons)
    with_rails = [(source, reading) for source, reading in readings if reading.rails]
    with_rails.sort(key=lambda pair: pair[0] != sources.get("power_mw"))  # stable
    return Reading(
        **values,  # type: ignore[arg-type]  # by name, each from a reading's own field
        rails=with_rails[0][1].rails if with_rails else (),
        dropped=tuple(dict.fromkeys(d for _, reading in readings for d in reading.dropped)),
        sources=sources,
        points=points,
        absent=absent,
    )
