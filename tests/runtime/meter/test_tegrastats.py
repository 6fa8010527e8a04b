from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevit.runtime.meter import tegrastats
from edgevit.runtime.meter.boards import BOARDS, Board
from edgevit.runtime.meter.source import SourceUnavailableError
from edgevit.runtime.meter.tegrastats import TegrastatsSource, parse_line
from tests.runtime.meter.lines import AGX_ORIN, AGX_XAVIER, NANO, ORIN_NX, XAVIER_NX

MIB = 1024 * 1024


def board(module: str) -> Board:
    (found,) = (row for row in BOARDS if row.module == module)
    return found


def log(shared: Path, name: str) -> list[str]:
    lines = (shared / "data/tegrastats" / name).read_text().splitlines()
    assert lines
    return lines


def between(line: str, left: str, right: str) -> str:
    """By splitting alone: nothing of the parser's patterns."""
    return line.split(left, 1)[1].split(right, 1)[0]


def test_agx_xavier_is_the_sum_of_its_rails() -> None:
    reading = parse_line(AGX_XAVIER, board("p2888"))
    # CPU is also a list of cores and a temperature in this line, GPU a temperature.
    assert [(rail.name, rail.power_mw) for rail in reading.rails] == [
        ("GPU", 618),
        ("CPU", 1236),
        ("SOC", 2318),
        ("CV", 0),
        ("VDDRQ", 154),
        ("SYS5V", 2934),
    ]
    assert reading.power_mw == 618 + 1236 + 2318 + 0 + 154 + 2934
    assert reading.points["power_mw"] == "GPU + CPU + SOC + CV + VDDRQ + SYS5V (module)"
    assert (reading.ram_used_bytes, reading.ram_total_bytes) == (2086 * MIB, 15825 * MIB)
    assert (reading.temperature_c, reading.points["temperature_c"]) == (31.5, "CPU")
    assert (reading.cpu_load_percent, reading.gpu_load_percent) == (0, 0)
    assert (reading.cpu_clock_mhz, reading.gpu_clock_mhz) == (2265, 905)
    assert reading.memory_clock_mhz == 2133


def test_xavier_nx_is_vdd_in() -> None:
    reading = parse_line(XAVIER_NX, board("p3668"))
    assert (reading.power_mw, reading.points["power_mw"]) == (5480, "VDD_IN (module)")
    assert {rail.name for rail in reading.rails} == {"VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC"}
    assert (reading.temperature_c, reading.points["temperature_c"]) == (41.5, "CPU")


def test_orin_nx_is_vdd_in() -> None:
    reading = parse_line(ORIN_NX, board("p3767"))
    assert reading.power_mw == 5469
    assert reading.cpu_load_percent == 50 / 8
    assert (reading.temperature_c, reading.points["temperature_c"]) == (55.5, "tj")
    assert reading.gpu_clock_mhz == 305


def test_agx_orin_counts_memory_once_and_nothing_that_is_not_connected() -> None:
    reading = parse_line(AGX_ORIN, board("p3701"))
    assert reading.power_mw == 3000 + 11000 + 5000
    assert "NC" not in {rail.name for rail in reading.rails}
    assert reading.dropped == ()
    assert reading.cpu_load_percent == 95  # of the two cores that are on
    assert (reading.cpu_clock_mhz, reading.gpu_clock_mhz) == (2200, 611)
    assert (reading.temperature_c, reading.points["temperature_c"]) == (77.5, "tj")


def test_nano_is_its_input_and_the_constant_of_the_power_chip_is_no_temperature() -> None:
    reading = parse_line(NANO, board("p3448"))
    assert reading.power_mw == 5012
    assert reading.temperature_c == 49
    assert (reading.cpu_load_percent, reading.cpu_clock_mhz) == (15, 921)
    assert reading.ram_used_bytes == 1234 * MIB  # not IRAM


def test_an_unknown_board_has_rails_and_no_total() -> None:
    reading = parse_line(XAVIER_NX)
    assert reading.power_mw is None
    assert len(reading.rails) == 3
    assert "not known" in reading.absent["power_mw"]


def test_a_total_without_one_of_its_rails_is_absent() -> None:
    reading = parse_line(AGX_XAVIER.replace("SYS5V 2934/2934", ""), board("p2888"))
    assert reading.power_mw is None
    assert "SYS5V" in reading.absent["power_mw"]


@pytest.mark.parametrize(
    ("rail", "said"),
    [
        ("VDD_IN -392mW/100mW", "negative"),
        ("VDD_IN 5000000mW/100mW", "more than"),
        ("VDD_IN 5000mW/1mW VDD_IN 6000mW/1mW", "two different values"),
    ],
)
def test_a_rail_that_cannot_be_is_dropped_and_named(rail: str, said: str) -> None:
    line = XAVIER_NX.replace("VDD_IN 5480mW/5480mW", rail)
    reading = parse_line(line, board("p3668"))
    assert reading.power_mw is None
    (dropped,) = reading.dropped
    assert dropped.startswith("VDD_IN: ")
    assert said in dropped
    assert said in reading.absent["power_mw"]
    assert {r.name for r in reading.rails} == {"VDD_CPU_GPU_CV", "VDD_SOC"}


def test_a_board_does_not_run_on_a_milliwatt() -> None:
    reading = parse_line(XAVIER_NX.replace("VDD_IN 5480mW", "VDD_IN 1mW"), board("p3668"))
    assert reading.power_mw is None
    assert "less than" in reading.absent["power_mw"]


@given(st.text() | st.text(alphabet="RAMCPUGDVIN_ 0123456789@%[],/-.mWC"))
def test_no_line_raises(line: str) -> None:
    reading = parse_line(line, board("p3668"))
    assert reading.power_mw is None or 100 <= reading.power_mw <= 300_000


@given(st.integers(0, len(XAVIER_NX)))
def test_a_line_cut_short_has_no_wrong_figure(length: int) -> None:
    reading = parse_line(XAVIER_NX[:length], board("p3668"))
    assert reading.power_mw in (None, 5480)
    assert reading.ram_total_bytes in (None, 6855 * MIB)
    assert reading.temperature_c in (None, 40, 41.5)


# The real logs, against arithmetic on their text.


def test_agx_xavier_log(shared: Path) -> None:
    totals = []
    for line in log(shared, "xavieragx_16gb/all.tegrastats"):
        # After the last temperature: name, now/mean, name, now/mean, ...
        words = between(line, "Tboard@", "\n").split()[1:]
        expected = sum(int(now_mean.split("/")[0]) for now_mean in words[1::2])
        assert words[0::2] == ["GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"]
        totals.append(expected)
        reading = parse_line(line, board("p2888"))
        assert reading.power_mw == expected
        assert reading.temperature_c == max(
            float(between(line, f" {zone}@", "C")) for zone in ("AO", "GPU", "AUX", "CPU")
        )
        loads = [int(core.split("%")[0]) for core in between(line, "CPU [", "]").split(",")]
        assert reading.cpu_load_percent == pytest.approx(sum(loads) / 8)
        assert reading.ram_used_bytes == int(between(line, "RAM ", "/")) * MIB
    assert sum(totals) / len(totals) == pytest.approx(7100, abs=150)


@pytest.mark.parametrize(
    ("name", "module", "zones"),
    [
        ("xaviernx_8gb/all.tegrastats", "p3668", "AUX CPU AO GPU"),
        ("orinnx_16gb/all.tegrastats", "p3767", "tj cpu gpu soc0 soc1 soc2 cv0 cv1 cv2"),
        ("orinnx_16gb/basic.tegrastats", "p3767", "tj cpu gpu soc0 soc1 soc2 cv0 cv1 cv2"),
    ],
)
def test_logs_with_vdd_in(shared: Path, name: str, module: str, zones: str) -> None:
    for line in log(shared, name):
        reading = parse_line(line, board(module))
        assert reading.power_mw == int(between(line, " VDD_IN ", "mW/"))
        assert [rail.name for rail in reading.rails] == ["VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC"]
        assert reading.rails[2].power_mw == int(between(line, " VDD_SOC ", "mW/"))
        assert reading.ram_total_bytes == int(between(line, "/", "MB")) * MIB
        assert reading.temperature_c == max(
            float(between(line, f" {zone}@", "C")) for zone in zones.split()
        )
        assert reading.gpu_load_percent == int(between(line, "GR3D_FREQ ", "%"))


def test_the_mean_of_the_xavier_nx_log(shared: Path) -> None:
    powers = [
        parse_line(line, board("p3668")).power_mw
        for line in log(shared, "xaviernx_8gb/all.tegrastats")
    ]
    assert sum(power or 0 for power in powers) / len(powers) == pytest.approx(5500, abs=100)


@pytest.mark.parametrize(
    ("name", "module"),
    [("xavieragx_16gb/basic.tegrastats", "p2888"), ("xaviernx_8gb/basic.tegrastats", "p3668")],
)
def test_logs_without_rails_have_no_power(shared: Path, name: str, module: str) -> None:
    for line in log(shared, name):
        reading = parse_line(line, board(module))
        assert reading.power_mw is None
        assert reading.rails == ()
        assert reading.absent["power_mw"] == "no power rails"
        assert reading.ram_used_bytes == int(between(line, "RAM ", "/")) * MIB
        assert reading.temperature_c is not None


# The program.


def program(folder: Path, text: str) -> str:
    path = folder / "tegrastats"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_it_follows_the_program_and_ends_it(tmp_path: Path) -> None:
    later = XAVIER_NX.replace("VDD_IN 5480mW", "VDD_IN 6000mW")
    pid = tmp_path / "pid"
    source = TegrastatsSource(
        board("p3668"),
        program(
            tmp_path,
            f"echo $$ > {pid}; echo '{XAVIER_NX}'; while ! test -e {tmp_path}/go; do sleep 0.05; done\n"
            f"echo '{later}'; exec sleep 60",
        ),
    )
    assert source.read().power_mw == 5480
    (tmp_path / "go").touch()
    until_s = time.monotonic() + 20
    while source.read().power_mw == 5480 and time.monotonic() < until_s:
        time.sleep(0.02)
    assert source.read().power_mw == 6000
    source.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_program_that_ends_is_a_source_that_is_lost(tmp_path: Path) -> None:
    source = TegrastatsSource(
        None, program(tmp_path, f"echo '{XAVIER_NX}'; read line < {fifo(tmp_path)}")
    )
    assert source.read().rails
    (tmp_path / "fifo").write_text("go\n")
    until_s = time.monotonic() + 20
    with pytest.raises(SourceUnavailableError, match="ended"):
        while time.monotonic() < until_s:
            source.read()
            time.sleep(0.02)
    source.close()


def test_a_program_that_hangs_gives_no_old_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tegrastats, "_STALE_S", 0.3)
    source = TegrastatsSource(None, program(tmp_path, f"echo '{XAVIER_NX}'; exec sleep 60"))
    time.sleep(0.4)
    with pytest.raises(SourceUnavailableError, match="printed nothing"):
        source.read()
    source.close()


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


@pytest.mark.parametrize("text", ["exit 1", "exit 0"])
def test_a_program_that_prints_nothing_is_no_source(tmp_path: Path, text: str) -> None:
    with pytest.raises(SourceUnavailableError, match="nothing"):
        TegrastatsSource(None, program(tmp_path, text))


def test_a_program_that_is_not_there_is_no_source() -> None:
    with pytest.raises(SourceUnavailableError, match="not installed"):
        TegrastatsSource(None, "no-such-tegrastats")


def test_every_board_says_who_defines_its_total() -> None:
    assert len({row.module for row in BOARDS}) == len(BOARDS)
    for row in BOARDS:
        assert row.total
        assert re.search(r"DG-\d+|Developer Guide|forum, topic \d+", row.cited)
