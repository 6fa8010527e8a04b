"""Which rail, or sum of rails, is the total power of which board."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Tuple

from edgevit.runtime.meter.reading import Rail


@dataclass(frozen=True)
class Board:
    """``total`` names the rails whose sum is the power of ``scope``; ``module`` is NVIDIA's number.

    ``cited`` is where that is stated.
    """

    name: str
    module: str
    total: Tuple[str, ...]
    scope: str
    cited: str


BOARDS = (
    Board(
        name="Jetson AGX Xavier",
        module="p2888",
        total=("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
        scope="module",
        cited="Jetson AGX Xavier Series Product Design Guide DG-09840-001 v2.5, 5.6.2 and "
        "figure 5-14: six monitored supplies, side by side, fed from the two module inputs",
    ),
    Board(
        name="Jetson Xavier NX",
        module="p3668",
        total=("VDD_IN",),
        scope="module",
        cited="NVIDIA developer forum, topic 200883: 'VDD_IN is the total power of module'",
    ),
    Board(
        name="Jetson AGX Orin",
        module="p3701",
        # VDDQ_VDD2_1V8AO is a branch of VIN_SYS_5V0: adding it would count memory twice.
        total=("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
        scope="module",
        cited="Jetson Linux Developer Guide r36.4.3, Jetson Orin, Software-Based Power Consumption "
        "Modeling; NVIDIA developer forum, topic 223111",
    ),
    Board(
        name="Jetson Orin NX or Orin Nano",
        module="p3767",
        total=("VDD_IN",),
        scope="module",
        cited="Jetson Linux Developer Guide r36.4.3, Jetson Orin, Software-Based Power Consumption "
        "Modeling; NVIDIA developer forum, topic 242804",
    ),
    Board(
        name="Jetson AGX Thor",
        module="p3834",
        total=("VIN",),
        scope="module and carrier board",
        cited="NVIDIA developer forum, topic 366461: the INA238 measures the total input",
    ),
    Board(
        name="Jetson TX2 NX",
        module="p3636",
        total=("VDD_IN",),
        scope="module",
        cited="Jetson TX2 NX Product Design Guide DG-10141-001 v1.1, table 5-1: VDD_IN is the main "
        "power, it supplies the PMIC and the other regulators",
    ),
    Board(
        name="Jetson Nano",
        module="p3448",
        total=("POM_5V_IN",),
        scope="module",
        cited="NVIDIA developer forum, topic 73608, answer 8: POM_5V_IN is the total, the GPU and "
        "CPU rails are within it",
    ),
)
# The developer kits whose device tree names the kit, not the module in it.
_KITS = {"p2972": "p2888", "p3450": "p3448"}

# The largest input limit of a Jetson is Thor's, 168 W; a running module takes more than a watt.
_MOST_MW = 300_000
_LEAST_TOTAL_MW = 100
_THERMAL_NAME = re.compile(r"therm|temp|tdiode|tboard|^tj$", re.IGNORECASE)


def identify_board(root: Path = Path("/")) -> Optional[Board]:
    """The board that the device tree under ``root`` names; None where there is none or no row for it."""
    try:
        compatible = (root / "proc/device-tree/compatible").read_bytes()
    except OSError:
        return None
    numbers = re.findall(r"\bp\d{4}\b", compatible.decode(errors="replace"))
    modules = {_KITS.get(number, number) for number in numbers}
    return next((board for board in BOARDS if board.module in modules), None)


def checked_rails(measured: Iterable[Tuple[str, float]]) -> Tuple[Tuple[Rail, ...], List[str]]:
    """The rails among ``measured`` (name and mW), and those that can't be, each with the reason.

    Channels that are not connected (``NC``) are neither.
    """
    rails: Dict[str, Rail] = {}
    dropped: Dict[str, str] = {}
    for name, power_mw in measured:
        if name == "NC":
            continue
        reason = _impossible(name, power_mw)
        if reason is None and name in rails and rails[name].power_mw != power_mw:
            reason = "two different values under one name"
        if reason is None:
            rails[name] = Rail(name, power_mw)
        else:
            dropped[name] = reason
    return (
        tuple(rail for name, rail in rails.items() if name not in dropped),
        [f"{name}: {reason}" for name, reason in dropped.items()],
    )


def _impossible(name: str, power_mw: float) -> Optional[str]:
    if _THERMAL_NAME.search(name):
        return "named like a temperature"
    if not math.isfinite(power_mw):
        return "not a number"
    if power_mw < 0:
        return f"{power_mw:g} mW is negative"
    if power_mw > _MOST_MW:
        return f"{power_mw:g} mW is more than any Jetson can take"
    return None


def total_power(
    board: Optional[Board], rails: Tuple[Rail, ...]
) -> Tuple[Optional[float], Optional[str], Optional[str]]:
    """The board's power in mW and its measuring point; or None, None and why there is none."""
    if not rails:
        return None, None, "no power rails"
    if board is None:
        return None, None, "the board is not known, so its rails are given without a total"
    by_name = {rail.name: rail.power_mw for rail in rails}
    missing = [name for name in board.total if name not in by_name]
    if missing:
        return None, None, f"{', '.join(missing)} is missing, which {board.name}'s total needs"
    power_mw = sum(by_name[name] for name in board.total)
    if power_mw < _LEAST_TOTAL_MW:
        return None, None, f"{power_mw:g} mW is less than a running {board.name} takes"
    return power_mw, f"{' + '.join(board.total)} ({board.scope})", None
