"""Made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path


def write(root: Path, files: dict[str, object]) -> Path:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


def ina3221(address: str, hwmon: int, rails: list[tuple[str, int, int]]) -> dict[str, object]:
    """Files of a sensor as JetPack 5 and 6 show them; each rail is label, mV, mA."""
    device = f"sys/bus/i2c/devices/{address}"
    files: dict[str, object] = {f"{device}/name": "ina3221"}
    for channel, (label, volt_mv, curr_ma) in enumerate(rails, 1):
        folder = f"{device}/hwmon/hwmon{hwmon}"
        files[f"{folder}/in{channel}_label"] = label
        files[f"{folder}/in{channel}_input"] = volt_mv
        files[f"{folder}/curr{channel}_input"] = curr_ma
    # The sum of the shunt voltages has a label too and is no rail.
    files[f"{device}/hwmon/hwmon{hwmon}/in7_label"] = "sum of shunt voltages"
    files[f"{device}/hwmon/hwmon{hwmon}/in7_input"] = 99
    return files


def compatible(root: Path, *names: str) -> Path:
    path = root / "proc/device-tree/compatible"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(name.encode() + b"\0" for name in names))
    return root
