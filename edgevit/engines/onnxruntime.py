"""ONNX Runtime: the engine that runs everywhere, from a Xavier's Python 3.8 to a laptop."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, List, Tuple

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
_FLOAT_OPERATORS = {"Conv", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm"}


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
        """Read off the graph as ONNX Runtime rewrote it; needs the package ``onnx`` to read."""
        import onnx

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "optimized.onnx"
            self._open(str(path))
            graph = onnx.load(path).graph
        weights = {initializer.name for initializer in graph.initializer}
        found = []
        for node in graph.node:
            if node.op_type in _INT8_OPERATORS:
                found.append((node.op_type, True))
            elif node.op_type in _FLOAT_OPERATORS or (
                # A product of two activations is attention, not a layer.
                node.op_type == "MatMul" and not weights.isdisjoint(node.input)
            ):
                found.append((node.op_type, False))
        return found

    def _open(self, optimized_path: str = "") -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        # A session's idle threads would spin for the next one, and take the cores from the session
        # of the next stage: on two cores the chain ran 2.5 times slower.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3  # errors; its warnings speak of graph rewriting
        options.optimized_model_filepath = optimized_path
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


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
