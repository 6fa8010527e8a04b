"""Engines: run the stages of a bundle on one backend each.

``auto`` is ONNX Runtime, except where OpenVINO is faster: on x86 for float graphs, and for INT8
graphs where the processor multiplies INT8 directly (VNNI or AMX). Without those instructions
OpenVINO's INT8 gains nothing over its float, and ONNX Runtime's does.
"""

from __future__ import annotations

import importlib.util
import platform
from typing import Dict, List, Optional, Protocol, Sequence

from edgevit.bundle import Bundle
from edgevit.engines.stage import Stage
from edgevit.errors import EngineUnavailableError
from edgevit.machine import cpu_flags, usable_cores

ENGINES = ("openvino", "onnxruntime")
_INT8_INSTRUCTIONS = {"avx512_vnni", "avx_vnni", "amx_int8"}


class Stages(Protocol):
    """The opened stages of a bundle, first to last."""

    engine: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Stage: ...


class _Stages(List[Stage]):
    def __init__(self, engine: str, stages: Sequence[Stage]) -> None:
        super().__init__(stages)
        self.engine = engine


def available_engines() -> Dict[str, Optional[str]]:
    """Each engine's name, with None where it can be used or what to do where it can't."""
    return {
        name: None
        if importlib.util.find_spec(name)
        else f"'{name}' is not installed: pip install {name}"
        for name in ENGINES
    }


def choose_engine(requested: str, bundle: Bundle) -> str:
    """The engine to use; raises :class:`EngineUnavailableError`, which says what to install."""
    missing = available_engines()
    if requested != "auto":
        if requested not in missing:
            raise EngineUnavailableError(
                f"unknown engine '{requested}'; use auto or one of {', '.join(ENGINES)}"
            )
        reason = missing[requested]
        if reason:
            raise EngineUnavailableError(reason)
        return requested
    usable = [name for name in ENGINES if missing[name] is None]
    if not usable:
        raise EngineUnavailableError(
            "no engine is installed: pip install onnxruntime (any machine) or openvino (x86)"
        )
    if "onnxruntime" in usable and not _openvino_is_faster(bundle):
        return "onnxruntime"
    return usable[0]


def open_stages(
    bundle: Bundle, engine: str = "auto", threads: int = 0, precision: str = "auto"
) -> Stages:
    """Open the stages of ``bundle``.

    ``threads`` 0 is every core this process may use. ``precision`` is what the float parts compute
    in where the engine can choose: ``f32``, ``bf16`` or ``auto``. Raises
    :class:`EngineUnavailableError`, and :class:`BundleError` for a graph that the engine refuses.
    """
    name = choose_engine(engine, bundle)
    threads = threads or usable_cores()
    if name == "openvino":
        from edgevit.engines import openvino

        return _Stages(name, openvino.open_stages(bundle, threads, precision))
    from edgevit.engines import onnxruntime

    return _Stages(name, onnxruntime.open_stages(bundle, threads))


def _openvino_is_faster(bundle: Bundle) -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    int8 = any(stage.precision == "int8" for stage in bundle.stages)
    return not int8 or not _INT8_INSTRUCTIONS.isdisjoint(cpu_flags())
