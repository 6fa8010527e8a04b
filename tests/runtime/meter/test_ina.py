from __future__ import annotations

from pathlib import Path

import pytest

from edgevit.runtime.meter.boards import identify_board
from edgevit.runtime.meter.ina import InaSource
from edgevit.runtime.meter.source import SourceUnavailableError
from tests.runtime.meter.made_up import compatible, ina3221, write

ORIN_NX = ("nvidia,p3768-0000+p3767-0000", "nvidia,p3767-0000", "nvidia,tegra234")
NX_RAILS = [("VDD_IN", 5000, 1100), ("VDD_CPU_GPU_CV", 5000, 200), ("VDD_SOC", 5000, 300)]


@pytest.mark.parametrize(
    ("names", "module"),
    [
        (("nvidia,p2972-0000", "nvidia,tegra194"), "p2888"),
        (("nvidia,p2888", "nvidia,tegra194"), "p2888"),
        (("nvidia,p3449-0000+p3668-0001", "nvidia,tegra194"), "p3668"),
        (("nvidia,p3737-0000+p3701-0005", "nvidia,tegra234"), "p3701"),
        (ORIN_NX, "p3767"),
        (("nvidia,p4071-0000+p3834-0008", "nvidia,tegra264"), "p3834"),
        (("nvidia,p3450-0000", "nvidia,tegra210"), "p3448"),
        (("raspberrypi,5-model-b", "brcm,bcm2712"), None),
    ],
)
def test_a_board_is_known_by_its_device_tree(
    tmp_path: Path, names: tuple[str, ...], module: str | None
) -> None:
    board = identify_board(compatible(tmp_path, *names))
    assert (board.module if board else None) == module


def test_a_machine_without_a_device_tree_is_no_board(tmp_path: Path) -> None:
    assert identify_board(tmp_path) is None


def test_the_input_of_an_orin_nx(tmp_path: Path) -> None:
    compatible(tmp_path, *ORIN_NX)
    write(tmp_path, ina3221("1-0040", 4, NX_RAILS))
    reading = InaSource(identify_board(tmp_path), tmp_path).read()
    assert reading.power_mw == 5500  # 5 V and 1.1 A
    assert reading.points["power_mw"] == "VDD_IN (module)"
    assert {r.name: r.power_mw for r in reading.rails} == {
        "VDD_IN": 5500,
        "VDD_CPU_GPU_CV": 1000,
        "VDD_SOC": 1500,
    }


def test_two_sensors_of_an_agx_orin(tmp_path: Path) -> None:
    compatible(tmp_path, "nvidia,p3737-0000+p3701-0000")
    first = [("VDD_GPU_SOC", 20000, 150), ("VDD_CPU_CV", 20000, 50), ("VIN_SYS_5V0", 5000, 800)]
    second = [("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5000, 100), ("NC", 8, 0)]
    write(tmp_path, {**ina3221("1-0040", 3, first), **ina3221("1-0041", 4, second)})
    reading = InaSource(identify_board(tmp_path), tmp_path).read()
    assert reading.power_mw == 3000 + 1000 + 4000  # memory is within the 5 V rail
    assert len(reading.rails) == 4
    assert reading.dropped == ()


def test_the_input_of_a_thor_is_in_microwatts(tmp_path: Path) -> None:
    compatible(tmp_path, "nvidia,p4071-0000+p3834-0008")
    folder = "sys/bus/i2c/devices/2-0044"
    write(tmp_path, ina3221("2-0040", 3, [("VDD_GPU", 12000, -30), ("VIN_SYS_5V0", 5000, 900)]))
    write(tmp_path, {f"{folder}/name": "ina238", f"{folder}/hwmon/hwmon5/power1_input": 23_500_000})
    source = InaSource(identify_board(tmp_path), tmp_path)
    reading = source.read()
    assert source.name == "INA238 and INA3221"
    assert reading.power_mw == 23_500
    assert reading.points["power_mw"] == "VIN (module and carrier board)"
    assert reading.dropped == ("VDD_GPU: -360 mW is negative",)


def test_the_files_of_jetpack_4(tmp_path: Path) -> None:
    compatible(tmp_path, "nvidia,p3450-0000")
    folder = "sys/bus/i2c/devices/6-0040"
    write(
        tmp_path,
        {
            f"{folder}/name": "ina3221x",
            f"{folder}/iio:device0/rail_name_0": "POM_5V_IN",
            f"{folder}/iio:device0/in_power0_input": 4321,
            f"{folder}/iio:device0/rail_name_1": "POM_5V_GPU",
            f"{folder}/iio:device0/in_voltage1_input": 5000,
            f"{folder}/iio:device0/in_current1_input": 40,
        },
    )
    source = InaSource(identify_board(tmp_path), tmp_path)
    assert source.name == "INA3221"
    assert source.read().power_mw == 4321
    assert {r.name: r.power_mw for r in source.read().rails} == {
        "POM_5V_IN": 4321,
        "POM_5V_GPU": 200,
    }


def test_it_reads_anew_each_time_and_names_what_it_cannot_read(tmp_path: Path) -> None:
    compatible(tmp_path, *ORIN_NX)
    write(tmp_path, ina3221("1-0040", 4, NX_RAILS))
    source = InaSource(identify_board(tmp_path), tmp_path)
    current = tmp_path / "sys/bus/i2c/devices/1-0040/hwmon/hwmon4/curr1_input"
    current.write_text("2000\n")
    assert source.read().power_mw == 10_000
    current.write_text("")
    reading = source.read()
    assert reading.power_mw is None
    assert reading.dropped == ("VDD_IN: can't be read",)
    assert "VDD_IN" in reading.absent["power_mw"]
    current.write_text("2000\n")
    assert source.read().power_mw == 10_000


def test_a_temperature_among_the_rails_is_no_power(tmp_path: Path) -> None:
    write(tmp_path, ina3221("1-0040", 4, [("VDD_IN", 5000, 1000), ("Tdiode_temp", 45000, 1000)]))
    reading = InaSource(None, tmp_path).read()
    assert [rail.name for rail in reading.rails] == ["VDD_IN"]
    assert reading.dropped == ("Tdiode_temp: named like a temperature",)


def test_a_machine_without_sensors(tmp_path: Path) -> None:
    write(tmp_path, {"sys/bus/i2c/devices/0-0050/name": "eeprom"})
    with pytest.raises(SourceUnavailableError, match="no INA3221"):
        InaSource(None, tmp_path)
