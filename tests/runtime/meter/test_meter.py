from __future__ import annotations

import logging
import sys
import threading
import time
import types
from pathlib import Path
from typing import Callable

import pytest

from edgevit.runtime.meter import Meter, Rail, Reading, open_meter
from edgevit.runtime.meter.meter import Opener, machine_sources
from edgevit.runtime.meter.psutil import PsutilSource
from edgevit.runtime.meter.reading import FIGURES, merged
from edgevit.runtime.meter.source import SourceUnavailableError
from tests.runtime.meter.made_up import compatible, ina3221, write


class Fixed:
    """A source that gives what it is told to, or raises it."""

    def __init__(self, name: str, reading: Reading | Exception) -> None:
        self.name = name
        self.reading = reading
        self.closed = 0

    def read(self) -> Reading:
        if isinstance(self.reading, Exception):
            raise self.reading
        return self.reading

    def close(self) -> None:
        self.closed += 1


def opener(source: Fixed, *gives: str) -> Opener:
    return Opener(source.name, gives or FIGURES, lambda: source)


def unavailable(name: str, reason: str, *gives: str) -> Opener:
    def fail() -> Fixed:
        raise SourceUnavailableError(reason)

    return Opener(name, gives or FIGURES, fail)


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


FULL = Reading(
    power_mw=5000.0,
    ram_used_bytes=1,
    ram_total_bytes=2,
    temperature_c=40.0,
    gpu_load_percent=0.0,
    cpu_load_percent=0.0,
    points={"power_mw": "VDD_IN (module)"},
)


def test_each_figure_is_the_first_that_is_known() -> None:
    first = Reading(power_mw=5000.0, points={"power_mw": "VDD_IN (module)"}, rails=(Rail("a", 1),))
    second = Reading(power_mw=7.0, temperature_c=0.0, rails=(Rail("b", 2),), dropped=("c: x",))
    reading = merged([("jtop", first), ("kernel", second)])
    assert (reading.power_mw, reading.temperature_c) == (5000, 0)
    assert reading.sources == {"power_mw": "jtop", "temperature_c": "kernel"}
    assert reading.points == {"power_mw": "VDD_IN (module)"}
    assert reading.rails == (Rail("a", 1),)
    assert reading.dropped == ("c: x",)


def test_rails_are_those_of_the_power() -> None:
    first, second = Reading(rails=(Rail("a", 1),)), Reading(power_mw=3.0, rails=(Rail("b", 2),))
    assert merged([("x", first), ("y", second)]).rails == (Rail("b", 2),)
    assert merged([("x", first)]).rails == (Rail("a", 1),)


def test_sources_are_opened_only_for_what_is_missing() -> None:
    first = Fixed("first", Reading(power_mw=5000.0))
    second = Fixed("second", FULL)
    opened = []
    third = Opener("third", FIGURES, lambda: opened.append("third"))  # type: ignore[arg-type,return-value]
    with Meter([opener(first), opener(second), third]) as meter:
        reading = meter.read(10)
    assert reading.sources["power_mw"] == "first"
    assert reading.sources["temperature_c"] == "second"
    assert reading.absent == {}
    assert opened == []
    assert (first.closed, second.closed) == (1, 1)


def test_what_is_absent_says_why() -> None:
    sources = [
        unavailable("jtop", "the service is not active"),
        unavailable("RAPL", "left to root", "power_mw"),
        opener(Fixed("kernel", Reading(absent={"temperature_c": "no zone"}))),
    ]
    with Meter(sources) as meter:
        reading = meter.read(10)
    assert reading.power_mw is None
    assert reading.absent["power_mw"] == "jtop: the service is not active; RAPL: left to root"
    assert reading.absent["temperature_c"] == "jtop: the service is not active; kernel: no zone"
    assert set(reading.absent) == set(FIGURES)


@pytest.mark.parametrize("error", [SourceUnavailableError("the service has stopped"), OSError(5)])
def test_a_source_that_dies_is_left_with_one_warning_and_the_next_takes_over(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    first = Fixed("jtop 7", FULL)
    second = Fixed("sensors", Reading(power_mw=4000.0, points={"power_mw": "VDD_IN (module)"}))
    with caplog.at_level(logging.WARNING), Meter([opener(first), opener(second)], 0.01) as meter:
        assert meter.read(10).power_mw == 5000
        first.reading = error
        wait_for(lambda: meter.read().power_mw == 4000)
        time.sleep(0.1)
        reading = meter.read()
    assert reading.sources["power_mw"] == "sensors"
    assert "jtop 7" in reading.absent["temperature_c"]
    assert first.closed == 1
    assert len(caplog.records) == 1
    assert "jtop 7 is left" in caplog.records[0].getMessage()


def test_a_source_that_breaks_when_opened_is_a_reason() -> None:
    def broken() -> Fixed:
        raise RuntimeError("driver")

    with Meter([Opener("odd", FIGURES, broken), opener(Fixed("kernel", FULL))]) as meter:
        assert meter.read(10).power_mw == 5000


def test_energy_per_frame_above_idle() -> None:
    source = Fixed("sensors", FULL)
    with Meter([opener(source)], period_s=0.01, window_s=0.3) as meter:
        assert meter.measure_idle(0.2) == pytest.approx(5000)
        source.reading = Reading(power_mw=8000.0)
        meter.read(10)
        wait_for(lambda: meter.read().power_mw == 8000)
        assert meter.energy() is None
        began_s, frames = time.monotonic(), 0
        while time.monotonic() - began_s < 0.6:
            meter.add_frame()
            frames += 1
            time.sleep(0.005)
        energy, recent = meter.energy(), meter.recent_energy()
    assert energy is not None
    assert recent is not None
    assert energy.frames <= frames
    assert energy.mean_power_mw == pytest.approx(8000)
    assert energy.energy_mj_per_frame == pytest.approx(8000 * energy.seconds / energy.frames)
    assert energy.marginal_energy_mj_per_frame == pytest.approx(
        3000 * energy.seconds / energy.frames
    )
    assert recent.seconds < energy.seconds


def test_without_a_sensor_there_is_no_energy() -> None:
    with Meter([opener(Fixed("kernel", Reading(temperature_c=40.0)))], 0.01, 0.05) as meter:
        assert meter.measure_idle(0.1) is None
        for _ in range(20):
            meter.add_frame()
            time.sleep(0.01)
        assert meter.energy() is None
        assert meter.recent_energy() is None


def test_it_never_waits_for_a_source_that_hangs() -> None:
    hangs = threading.Event()

    def open_slowly() -> Fixed:
        hangs.wait(60)
        return Fixed("slow", FULL)

    began_s = time.monotonic()
    meter = Meter([Opener("slow", FIGURES, open_slowly)])
    assert meter.read().absent["power_mw"] == "no reading yet"
    assert time.monotonic() - began_s < 2
    hangs.set()
    meter.close()


def test_no_thread_stays() -> None:
    before = threading.active_count()
    for _ in range(20):
        with Meter([opener(Fixed("kernel", FULL))]) as meter:
            meter.read(10)
    assert threading.active_count() == before


def test_a_jetson_without_jtop_uses_its_sensors_and_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jtop", None)
    from edgevit.runtime.meter.boards import identify_board

    compatible(tmp_path, "nvidia,p3509-0000+p3668-0001", "nvidia,tegra194")
    write(tmp_path, ina3221("7-0040", 2, [("VDD_IN", 5000, 1100), ("VDD_SOC", 5000, 250)]))
    write(tmp_path, {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 400 kB"})
    with Meter(machine_sources(identify_board(tmp_path), tmp_path)) as meter:
        reading = meter.read(20)
    assert reading.power_mw == 5500
    assert reading.sources["power_mw"] == "INA3221"
    assert reading.ram_used_bytes == 600 * 1024
    assert "jtop: not installed" in reading.absent["gpu_load_percent"]
    assert "power sensors" not in reading.absent["gpu_load_percent"]  # they never have it


def test_this_machine_has_memory_and_a_reason_for_all_else() -> None:
    with open_meter() as meter:
        reading = meter.read(20)
    assert reading.ram_used_bytes is not None
    for name in FIGURES:
        assert (getattr(reading, name) is None) == (name in reading.absent)
        assert (name in reading.sources) != (name in reading.absent)


def test_psutil_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = types.SimpleNamespace(total=1000, available=300)
    entries = [types.SimpleNamespace(current=51.0), types.SimpleNamespace(current=63.5)]
    fake = types.SimpleNamespace(
        __version__="7.0",
        virtual_memory=lambda: memory,
        sensors_temperatures=lambda: {"k10temp": entries, "nvme": [entries[1]]},
    )
    monkeypatch.setitem(sys.modules, "psutil", fake)
    source = PsutilSource()
    reading = source.read()
    assert source.name == "psutil 7.0"
    assert (reading.ram_used_bytes, reading.temperature_c) == (700, 63.5)
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(SourceUnavailableError, match="not installed"):
        PsutilSource()
