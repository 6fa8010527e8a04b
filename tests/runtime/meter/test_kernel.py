"""What the kernel, RAPL and nvpmodel give."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgevit.runtime.meter.linux import LinuxSource
from edgevit.runtime.meter.nvpmodel import NvpmodelSource, parse_mode
from edgevit.runtime.meter.rapl import RaplSource
from edgevit.runtime.meter.source import SourceUnavailableError
from tests.runtime.meter.made_up import write

MEMINFO = "MemTotal:       15656152 kB\nMemFree:    100 kB\nMemAvailable:   11000000 kB"


def test_a_whole_jetson(tmp_path: Path) -> None:
    thermal = "sys/class/thermal"
    gpu = "sys/class/devfreq/17000000.ga10b"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 1 1 1",
            f"{thermal}/thermal_zone0/type": "cpu-thermal",
            f"{thermal}/thermal_zone0/temp": 48_500,
            f"{thermal}/thermal_zone1/type": "tj-thermal",
            f"{thermal}/thermal_zone1/temp": 49_250,
            f"{thermal}/thermal_zone2/type": "cv0-thermal",
            f"{thermal}/thermal_zone2/temp": -256_000,
            f"{thermal}/thermal_zone3/type": "PMIC-Die",
            f"{thermal}/thermal_zone3/temp": 100_000,
            f"{thermal}/cooling_device0/type": "pwm-fan",
            f"{thermal}/cooling_device0/cur_state": 3,
            f"{thermal}/cooling_device1/type": "cpu-throttle-alert",
            f"{thermal}/cooling_device1/cur_state": 0,
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": 1_190_400,
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": 2_201_600,
            f"{gpu}/cur_freq": 624_750_000,
            f"{gpu}/device/load": 730,
        },
    )
    source = LinuxSource(tmp_path)
    reading = source.read()
    assert reading.ram_total_bytes == 15_656_152 * 1024
    assert reading.ram_used_bytes == 4_656_152 * 1024
    assert (reading.temperature_c, reading.points["temperature_c"]) == (49.25, "tj-thermal")
    assert reading.gpu_load_percent == 73
    assert (reading.cpu_clock_mhz, reading.gpu_clock_mhz) == (2201.6, 624.75)
    assert reading.throttled is False
    assert reading.cpu_load_percent is None  # a load is a difference
    # 100 ticks later, of which 30 + 5 busy and 60 + 5 idle or waiting for a disk.
    write(tmp_path, {"proc/stat": "cpu  130 0 100 860 5 5 0 0 0 0"})
    write(tmp_path, {f"{thermal}/cooling_device1/cur_state": 2})
    reading = source.read()
    assert reading.cpu_load_percent == pytest.approx(35)
    assert reading.throttled is True


def test_an_empty_machine_has_no_figure(tmp_path: Path) -> None:
    reading = LinuxSource(tmp_path).read()
    assert reading.ram_used_bytes is None
    assert reading.temperature_c is None
    assert reading.throttled is None
    assert reading.absent["temperature_c"]


def test_this_machine(tmp_path: Path) -> None:
    reading = LinuxSource().read()
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert reading.ram_total_bytes == total_kib * 1024
    assert reading.ram_used_bytes is not None
    assert 0 < reading.ram_used_bytes < reading.ram_total_bytes


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rapl(root: Path, **energies_uj: int) -> Path:
    """Counters by zone: ``rapl(root, **{"0": 5})`` is package 0."""
    for zone, energy_uj in energies_uj.items():
        folder = f"sys/class/powercap/intel-rapl:{zone}"
        name = "core" if ":" in zone else f"package-{zone}"
        write(root, {f"{folder}/name": name, f"{folder}/energy_uj": energy_uj})
        write(root, {f"{folder}/max_energy_range_uj": 1_000_000_000})
    return root


def test_power_of_two_packages_is_their_energy_by_time(tmp_path: Path) -> None:
    clock = Clock()
    rapl(tmp_path, **{"0": 7_000_000, "1": 999_000_000, "0:0": 1})
    source = RaplSource(tmp_path, clock)
    assert source.read().power_mw is None
    clock.now_s += 2
    # 20 J in the first; 10 J in the second, whose counter began again; the cores are in the first.
    rapl(tmp_path, **{"0": 27_000_000, "1": 9_000_000, "0:0": 19_000_000})
    reading = source.read()
    assert reading.power_mw == pytest.approx(15_000)
    assert reading.points["power_mw"] == "processor package"
    clock.now_s += 0.001  # too soon for a new value
    assert source.read().power_mw == pytest.approx(15_000)


def test_the_platform_is_more_than_its_package(tmp_path: Path) -> None:
    clock = Clock()
    rapl(tmp_path, **{"0": 0, "1": 0})
    write(tmp_path, {"sys/class/powercap/intel-rapl:1/name": "psys"})
    source = RaplSource(tmp_path, clock)
    source.read()
    clock.now_s += 1
    rapl(tmp_path, **{"0": 5_000_000})
    write(tmp_path, {"sys/class/powercap/intel-rapl:1/energy_uj": 30_000_000})
    assert source.read().power_mw == pytest.approx(30_000)
    assert source.read().points["power_mw"] == "platform"


def test_counters_that_are_not_there_or_not_ours(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError, match="no energy counters"):
        RaplSource(tmp_path)
    write(tmp_path, {"sys/class/powercap/intel-rapl:0/name": "package-0"})
    with pytest.raises(SourceUnavailableError, match="root"):
        RaplSource(tmp_path)


def test_the_power_mode(tmp_path: Path) -> None:
    program = tmp_path / "nvpmodel"
    program.write_text(
        "#!/bin/sh\necho 'NV Fan Mode:quiet'\necho 'NV Power Mode: MODE_15W_6CORE'\necho 2\n"
    )
    program.chmod(0o755)
    assert NvpmodelSource(str(program)).read().power_mode == "MODE_15W_6CORE"
    assert parse_mode("NVPM ERROR: not root\n") is None
    with pytest.raises(SourceUnavailableError, match="not installed"):
        NvpmodelSource("no-such-nvpmodel")
    program.write_text("#!/bin/sh\necho 'NVPM ERROR'\n")
    with pytest.raises(SourceUnavailableError, match="no power mode"):
        NvpmodelSource(str(program))
