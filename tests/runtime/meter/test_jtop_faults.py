"""What jtop's client does when things are wrong, with a stand-in for the package."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any, Callable, ClassVar, Iterator

import pytest

from edgevit.runtime.meter import jtop
from edgevit.runtime.meter.boards import BOARDS
from edgevit.runtime.meter.source import SourceUnavailableError

ORIN_NX = next(row for row in BOARDS if row.module == "p3767")


class Client:
    """A client of a service that knows nothing at all."""

    power: ClassVar[dict[str, Any]] = {}
    temperature: ClassVar[dict[str, Any]] = {}
    memory: ClassVar[dict[str, Any]] = {}
    gpu: ClassVar[dict[str, Any]] = {}
    cpu: ClassVar[dict[str, Any]] = {}
    nvpmodel: Any = None
    jetson_clocks: Any = None

    def __init__(self, interval: float) -> None:
        self.interval = interval

    def start(self) -> None: ...

    def ok(self, spin: bool = False) -> bool:
        assert spin  # else it waits for the next value
        return True

    def close(self) -> None: ...


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[Client]], None]]:
    def put(client: type[Client]) -> None:
        package = types.SimpleNamespace(__version__="9", jtop=client)
        monkeypatch.setitem(sys.modules, "jtop", package)

    yield put


def test_nothing_is_missed_and_nothing_made_up(install: Callable[[type[Client]], None]) -> None:
    install(Client)
    reading = jtop.JtopSource(ORIN_NX).read()
    assert reading.power_mw is None
    assert reading.absent["power_mw"] == "no power rails"
    assert (reading.ram_used_bytes, reading.cpu_load_percent, reading.temperature_c) == (None,) * 3


def test_a_value_that_is_missing_costs_only_itself(
    install: Callable[[type[Client]], None],
) -> None:
    class Gaps(Client):
        gpu: ClassVar[dict[str, Any]] = {"gpu": {}}
        temperature: ClassVar[dict[str, Any]] = {"cpu": {}, "gpu": {"temp": 44.0}}
        power: ClassVar[dict[str, Any]] = {"rail": {"VDD_SOC": {}}, "tot": {"power": 7}}
        memory: ClassVar[dict[str, Any]] = {"RAM": {"tot": 2048}}

    install(Gaps)
    reading = jtop.JtopSource(ORIN_NX).read()
    assert (reading.gpu_load_percent, reading.ram_used_bytes, reading.rails) == (None, None, ())
    assert (reading.temperature_c, reading.ram_total_bytes) == (44, 2 << 20)


def test_modes_and_loads(install: Callable[[type[Client]], None]) -> None:
    class Full(Client):
        nvpmodel = "MAXN"
        memory: ClassVar[dict[str, Any]] = {"RAM": {"used": 3000, "tot": 4000}}
        jetson_clocks = False
        cpu: ClassVar[dict[str, Any]] = {
            "total": {"user": 20.0, "nice": 0.0, "system": 5.0, "idle": 75.0},
            "cpu": [{}],
        }
        power: ClassVar[dict[str, Any]] = {
            "rail": {"VDD_SOC": {"power": 2000, "avg": 1}},
            "tot": {"power": 6000, "avg": 9, "name": "VDD_IN"},
        }
        temperature: ClassVar[dict[str, Any]] = {
            "gpu": {"temp": -256, "online": False},
            "cpu": {"temp": 50.5},
        }

    install(Full)
    reading = jtop.JtopSource(ORIN_NX).read()
    assert (reading.power_mode, reading.jetson_clocks) == ("MAXN", False)
    assert reading.cpu_load_percent == 25
    assert (reading.ram_used_bytes, reading.ram_total_bytes) == (3000 * 1024, 4000 * 1024)
    assert reading.power_mw == 6000
    assert reading.temperature_c == 50.5


def test_a_service_of_another_version_is_a_reason(
    install: Callable[[type[Client]], None],
) -> None:
    class Mismatched(Client):
        def start(self) -> None:
            raise RuntimeError("Mismatch version jtop service: [4] and client: [7].\nPlease run:\n")

    install(Mismatched)
    with pytest.raises(SourceUnavailableError) as raised:
        jtop.JtopSource()
    assert str(raised.value) == "Mismatch version jtop service: [4] and client: [7]. Please run:"


def test_a_service_that_hangs_is_left(
    install: Callable[[type[Client]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    class Hanging(Client):
        def start(self) -> None:
            ended.wait(60)

    install(Hanging)
    monkeypatch.setattr(jtop, "_START_S", 0.1)
    with pytest.raises(SourceUnavailableError, match="did not answer"):
        jtop.JtopSource()
    ended.set()


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), EOFError()])
def test_a_connection_that_breaks_is_a_reason(
    install: Callable[[type[Client]], None], error: Exception
) -> None:
    class Breaking(Client):
        def ok(self, spin: bool = False) -> bool:
            raise error

    install(Breaking)
    with pytest.raises(SourceUnavailableError, match="connection was lost: "):
        jtop.JtopSource().read()


def test_a_broken_installation_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jtop", None)
    with pytest.raises(SourceUnavailableError, match="not installed"):
        jtop.JtopSource()
