"""OpenVINO: the fast engine on x86, above all where the processor has VNNI or AMX."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from edgevit.bundle import Bundle
from edgevit.engines.stage import StageOutput, output_names
from edgevit.errors import BundleError

NAME = "openvino"

# Layers that multiply by weights, as the CPU plugin calls them.
_LINEAR_LAYERS = {"FullyConnected", "Convolution"}
_INT8 = {"i8", "u8"}


class OpenVinoStage:
    """One stage as a compiled model with one request. Tokens pass to the next stage uncopied."""

    def __init__(self, compiled: Any, where: str, first: bool, final: bool) -> None:
        self._compiled = compiled
        inputs = [port.get_any_name() for port in compiled.inputs]
        # A port bears more than one name where OpenVINO removed a node, and any of them reads it.
        outputs = [name for port in compiled.outputs for name in port.get_names()]
        names = output_names(where, inputs, outputs, first, final)
        self._request = compiled.create_infer_request()
        tensors = [self._request.get_tensor(name) for name in names]
        self._tokens = None if final else tensors[0]
        self._logits, self._top1, self._confidence = (tensor.data for tensor in tensors[-3:])
        self._input: Any = None
        self._image = self._request.get_input_tensor().data if first else None

    def run(self, value: Any) -> StageOutput:
        if self._image is not None:
            self._image[:] = value
        elif value is not self._input:
            self._request.set_input_tensor(value)
            self._input = value
        self._request.infer()
        return StageOutput(
            int(self._top1[0]), float(self._confidence[0]), self._logits[0], self._tokens
        )

    def linear_layers(self) -> List[Tuple[str, bool]]:
        found = []
        for node in self._compiled.get_runtime_model().get_ops():
            info = {key: value.astype(str) for key, value in _runtime_info(node).items()}
            if info.get("layerType") in _LINEAR_LAYERS:
                kernel = f"{info['layerType']} {info['primitiveType']}"
                found.append((kernel, info["runtimePrecision"] in _INT8))
        return found


def open_stages(bundle: Bundle, threads: int, precision: str) -> List[OpenVinoStage]:
    """Open every stage of ``bundle`` with ``threads`` threads.

    ``precision`` is what float parts compute in: ``f32``, ``bf16`` or ``auto``, which is bf16 where
    the processor has it. It is always passed on: left alone, OpenVINO chooses without saying so.
    """
    import openvino

    core = openvino.Core()
    if precision == "auto":
        capabilities = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision = "bf16" if "BF16" in capabilities else "f32"
    config: Dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": precision,
    }
    last = len(bundle.stages) - 1
    stages = []
    for number, stage in enumerate(bundle.stages):
        where = f"{bundle.path}: '{stage.file}'"
        try:
            compiled = core.compile_model(core.read_model(bundle.read(stage.file)), "CPU", config)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1][:200]
            raise BundleError(
                f"{where}: OpenVINO {openvino.__version__} can't load it ({reason}); "
                "update OpenVINO or make the bundle again"
            ) from None
        stages.append(OpenVinoStage(compiled, where, number == 0, number == last))
    return stages


def _runtime_info(node: Any) -> Dict[str, Any]:
    return dict(node.get_rt_info().items())
