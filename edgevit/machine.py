"""What machine a figure was measured on: a latency without it can't be compared with anything."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any, Dict, List, Optional

# The instruction sets that decide how fast float, bfloat16 and INT8 products are (x86, then arm).
_FLAGS = [
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimddp",
    "asimdhp",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
]
_PACKAGES = [
    "edgevit",
    "numpy",
    "opencv-python-headless",
    "opencv-python",
    "onnxruntime",
    "openvino",
    "tensorrt",
    "torch",
    "timm",
]


def machine_facts() -> Dict[str, Any]:
    """Processor, cores, memory, system and versions, as this machine states them.

    ``load_1min`` is the load average at the call (1.0: one core's worth of waiting work): on an
    otherwise idle machine it is near 0. What can't be read is None.
    """
    return {
        "cpu_model": _cpu_model(),
        "architecture": platform.machine(),
        "cpu_flags": cpu_flags(),
        "cores": os.cpu_count(),
        "cores_usable": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": _versions(),
    }


def usable_cores() -> int:
    """Cores this process may run on: fewer than the machine has under ``taskset`` or a cpuset."""
    return len(os.sched_getaffinity(0))


def _cpu_model() -> Optional[str]:
    model = _cpuinfo("model name") or _text("/proc/device-tree/model")
    return model or platform.processor() or None


def cpu_flags() -> List[str]:
    """Those instruction sets of this processor that decide the speed of matrix products."""
    present = (_cpuinfo("flags") or _cpuinfo("Features") or "").split()
    return [flag for flag in _FLAGS if flag in present]


def _cpuinfo(key: str) -> Optional[str]:
    for line in (_text("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _text(path: str) -> Optional[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return None


def _versions() -> Dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
