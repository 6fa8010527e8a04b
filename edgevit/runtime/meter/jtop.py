"""Figures from the jtop service of jetson-stats (4.x and 7.x), where the user has installed it.

jetson-stats is under the AGPL: it is imported where present, and no part of it is in edgevit.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any, Dict, List, Mapping, Optional, Tuple

from edgevit.runtime.meter.boards import Board, checked_rails, total_power
from edgevit.runtime.meter.reading import Reading
from edgevit.runtime.meter.source import SourceUnavailableError
from edgevit.runtime.meter.temperature import chip_temperature

_INTERVAL_S = 0.5
# A service that has hung never answers; starting takes about a second.
_START_S = 8.0


class JtopSource:
    """A client of the jtop service; ``board`` defines the total (jtop's own adds rails up twice)."""

    def __init__(self, board: Optional[Board] = None) -> None:
        try:
            package = importlib.import_module("jtop")
        except Exception as error:  # a broken installation raises anything
            why = (
                "not installed" if isinstance(error, ImportError) else f"can't be imported: {error}"
            )
            raise SourceUnavailableError(why) from error
        self.name = f"jtop {getattr(package, '__version__', '')}".strip()
        self._board = board
        self._client = _started(package)

    def read(self) -> Reading:
        client = self._client
        try:
            if not client.ok(spin=True):
                raise SourceUnavailableError("the service has stopped")
            return self._reading(client)
        except SourceUnavailableError:
            raise
        except Exception as error:  # JtopException, but also bare ConnectionResetError and EOFError
            raise SourceUnavailableError(f"the connection was lost: {_said(error)}") from error

    def _reading(self, client: Any) -> Reading:
        rails, dropped = checked_rails(_rails(client.power))
        power_mw, point, why = total_power(self._board, rails)
        hottest = chip_temperature(
            {
                name: float(zone["temp"])
                for name, zone in client.temperature.items()
                if "temp" in zone and zone.get("online", True)
            }
        )
        memory = client.memory
        ram = memory.get("RAM", {})
        points = {"power_mw": point} if point is not None else {}
        if hottest is not None:
            points["temperature_c"] = hottest[0]
        return Reading(
            power_mw=power_mw,
            ram_used_bytes=_scaled(ram.get("used"), 1024),
            ram_total_bytes=_scaled(ram.get("tot"), 1024),
            temperature_c=hottest[1] if hottest else None,
            gpu_load_percent=_highest(
                gpu.get("status", {}).get("load") for gpu in client.gpu.values()
            ),
            cpu_load_percent=_load(client.cpu.get("total", {})),
            power_mode=_power_mode(client.nvpmodel),
            jetson_clocks=None if client.jetson_clocks is None else bool(client.jetson_clocks),
            cpu_clock_mhz=_mhz(
                _highest(core.get("freq", {}).get("cur") for core in client.cpu.get("cpu", []))
            ),
            gpu_clock_mhz=_mhz(
                _highest(gpu.get("freq", {}).get("cur") for gpu in client.gpu.values())
            ),
            memory_clock_mhz=_mhz(memory.get("EMC", {}).get("cur")),
            rails=rails,
            dropped=tuple(dropped),
            points=points,
            absent={} if why is None else {"power_mw": "; ".join([why, *dropped])},
        )

    def close(self) -> None:
        # Closing waits for jtop's own threads and raises what the connection raised.
        closing = threading.Thread(target=_close, args=(self._client,), daemon=True)
        closing.start()
        closing.join(2)


def _started(package: Any) -> Any:
    """A client that has its first values. Waits no longer than ``_START_S`` for the service."""
    clients: List[Any] = []
    errors: List[BaseException] = []

    def start() -> None:
        try:
            client = package.jtop(interval=_INTERVAL_S)
            client.start()
            clients.append(client)
        except Exception as error:
            errors.append(error)

    starting = threading.Thread(target=start, name="jtop", daemon=True)
    starting.start()
    starting.join(_START_S)
    if clients:
        return clients[0]
    if errors:
        raise SourceUnavailableError(_said(errors[0])) from errors[0]
    raise SourceUnavailableError(f"the service did not answer within {_START_S:g} s")


def _close(client: Any) -> None:
    with contextlib.suppress(Exception):
        client.close()


def _said(error: BaseException) -> str:
    """The error's message on one line, else its type."""
    return " ".join(str(error).split()) or type(error).__name__


def _rails(power: Mapping[str, Any]) -> List[Tuple[str, float]]:
    """Rails in mW by name. jtop takes the one it holds for the total out of the others."""
    found: Dict[str, Any] = dict(power.get("rail", {}))
    total = power.get("tot", {})
    if total.get("name"):
        found[total["name"]] = total
    return [(name, float(rail["power"])) for name, rail in found.items() if "power" in rail]


def _load(total: Mapping[str, float]) -> Optional[float]:
    """Percent of the time that is not idle."""
    times = [total.get(name, 0.0) for name in ("user", "nice", "system", "idle")]
    return 100 * sum(times[:3]) / sum(times) if sum(times) > 0 else None


def _highest(values: Any) -> Optional[float]:
    known = [float(value) for value in values if value is not None]
    return max(known) if known else None


def _scaled(value: Optional[float], factor: int) -> Optional[int]:
    return None if value is None else int(value) * factor


def _mhz(khz: Optional[float]) -> Optional[float]:
    return None if khz is None else khz / 1000


def _power_mode(nvpmodel: Any) -> Optional[str]:
    return None if nvpmodel is None else str(nvpmodel)
