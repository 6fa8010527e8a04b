"""ONNX Runtime: the engine that runs everywhere, from a Xavier's Python 3.8 to a laptop."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np

from edgevit.bundle import Bundle
from edgevit.engines.stage import StageOutput, output_names
from edgevit.errors import BundleError

NAME = "onnxruntime"

# The fusion of MatMul and Add to Gemm comes before the one of Q/DQ and MatMul to an INT8 kernel and
# prevents it: with it a graph in the form TensorRT wants runs slower than float.
_DISABLED_OPTIMIZERS = ["MatMulAddFusion"]
_INT8_OPERATORS = {
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "QGemm",
    "QLinearConv",
    "QLinearMatMul",
    "ConvInteger",
}
_FLOAT_OPERATORS = {"Conv", "FusedConv", "FusedGemm", "Gemm"}
# Layers where one side is weights, attention where both are activations.
_FLOAT_PRODUCTS = {"FusedMatMul", "MatMul"}


class OnnxRuntimeStage:
    """One stage in an inference session of its own."""

    def __init__(self, graph: bytes, where: str, threads: int, first: bool, final: bool) -> None:
        import onnxruntime

        self._graph = graph
        self._threads = threads
        try:
            self._session = self._open()
        except Exception as error:  # its exceptions share no base class but this one
            raise BundleError(
                f"{where}: ONNX Runtime {onnxruntime.__version__} can't load it ({_short(error)}); "
                "update ONNX Runtime or make the bundle again"
            ) from None
        inputs = [value.name for value in self._session.get_inputs()]
        outputs = [value.name for value in self._session.get_outputs()]
        self._names = output_names(where, inputs, outputs, first, final)
        self._input = inputs[0]
        self._final = final

    def run(self, value: Any) -> StageOutput:
        found = self._session.run(self._names, {self._input: value})
        tokens = None if self._final else found[0]
        logits, top1, confidence = found[-3:]
        return StageOutput(int(top1[0]), float(confidence[0]), logits[0], tokens)

    def linear_layers(self) -> List[Tuple[str, bool]]:
        """Read off the profile of one run, so that these are the kernels that ran."""
        with tempfile.TemporaryDirectory() as folder:
            session = self._open(profile=str(Path(folder) / "run"))
            (port,) = session.get_inputs()
            kind = np.uint8 if port.type == "tensor(uint8)" else np.float32
            session.run(None, {port.name: np.zeros(port.shape, kind)})
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        found = []
        for event in events:
            if event["cat"] != "Node" or not event["name"].endswith("_kernel_time"):
                continue
            operator = event["args"]["op_name"]
            if operator in _INT8_OPERATORS:
                found.append((operator, True))
            elif operator in _FLOAT_OPERATORS or (
                operator in _FLOAT_PRODUCTS and _has_weights(event["args"]["input_type_shape"])
            ):
                found.append((operator, False))
        return found

    def _open(self, profile: str = "") -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        # A session's idle threads would spin for the next one, and take the cores from the session
        # of the next stage: on two cores the chain ran 2.5 times slower.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Without VNNI its INT8 products add pairs in 16 bits and saturate: wrong answers, and in
        # silence. This asks for exact ones, which cost a fifth of the speed there and nothing with
        # VNNI.
        options.add_session_config_entry("session.x64quantprecision", "1")
        options.log_severity_level = 3  # errors; its warnings speak of graph rewriting
        if profile:
            options.enable_profiling = True
            options.profile_file_prefix = profile
        return onnxruntime.InferenceSession(
            self._graph,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=_DISABLED_OPTIMIZERS,
            enable_fallback=0,  # it would try again on the same provider, and print
        )


def open_stages(bundle: Bundle, threads: int) -> List[OnnxRuntimeStage]:
    """Open every stage of ``bundle`` with ``threads`` threads."""
    last = len(bundle.stages) - 1
    return [
        OnnxRuntimeStage(
            bundle.read(stage.file),
            f"{bundle.path}: '{stage.file}'",
            threads,
            first=number == 0,
            final=number == last,
        )
        for number, stage in enumerate(bundle.stages)
    ]


def _has_weights(inputs: List[Dict[str, List[int]]]) -> bool:
    """Whether the second factor is weights: a matrix, or repacked and so not among the inputs.

    In attention both factors have batch and head dimensions.
    """
    return len(inputs) < 2 or all(len(shape) == 2 for shape in inputs[1].values())


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
