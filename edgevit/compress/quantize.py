"""Write a calibration table into a graph as Q/DQ nodes, in the one form that every target takes.

Symmetric INT8 throughout, zero point 0: weights per output channel, activations per tensor, on the
inputs of linear layers. Biases and outputs stay in float. TensorRT from 8.5 on reads this as
explicit quantization, and both CPU engines have INT8 kernels for it.

A rounded weight is off by a fixed amount, and its product with the mean of the input is a constant
error of the output: the bias takes it back (bias correction, arXiv 1906.04721).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgevit.compress.calibration import INT8_MAX, CalibrationTable, ChannelMeans
from edgevit.compress.graph import linear_layers, matrix_products, weight_array


@dataclass(frozen=True)
class LayerReport:
    """What became of one matrix product, and why."""

    stage: str
    name: str
    op: str
    macs: int
    quantized: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def quantize_stages(
    stages: Mapping[str, onnx.ModelProto], table: CalibrationTable, means: ChannelMeans
) -> tuple[dict[str, onnx.ModelProto], list[LayerReport]]:
    """Quantize every stage with its ranges; also says of each matrix product what was done."""
    quantized: dict[str, onnx.ModelProto] = {}
    reports: list[LayerReport] = []
    for name, model in stages.items():
        quantized[name] = insert_qdq(
            model, {tensor: table.scale(name, tensor) for tensor in table.amax[name]}, means[name]
        )
        linear = {layer.node: layer for layer in linear_layers(model)}
        operators = {node.name: node.op_type for node in model.graph.node}
        for node, macs in matrix_products(model):
            done = node in linear and linear[node].activation in table.amax[name]
            why = "" if done else "a product of two activations (attention) stays in float"
            reports.append(LayerReport(name, node, operators[node], macs, done, why))
    return quantized, reports


def insert_qdq(
    model: onnx.ModelProto,
    scales: Mapping[str, float],
    means: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> onnx.ModelProto:
    """A copy of ``model`` whose linear layers with a scale for their input run in INT8.

    ``means`` are the channel means of those inputs; layers with one get their bias corrected.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    layers = {layer.node: layer for layer in linear_layers(model) if layer.activation in scales}
    constants: dict[str, Any] = {"int8_zero": np.zeros((), np.int8)}
    replaced: set[str] = set()
    before: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        layer = layers.get(node.name)
        if layer is None:
            continue
        added = before.setdefault(node.name, [])
        source, weight = layer.activation, layer.weight
        if f"{source}_scale" not in constants:
            constants[f"{source}_scale"] = np.float32(scales[source])
            added += _quantize_dequantize(source)
        if weight not in replaced:
            replaced.add(weight)
            values, steps = quantize_weight(weight_array(model, weight), layer.channel_axis)
            constants[f"{weight}_int8"], constants[f"{weight}_scale"] = values, steps
            bias = _bias_of(graph, node)
            if bias and node.op_type == "MatMul" and source in means:
                lost = weight_array(model, weight) - values * steps
                corrected = weight_array(model, bias) + means[source] @ lost
                constants[f"{weight}_bias"] = corrected.astype(np.float32)
                _read_instead(graph, node, bias, f"{weight}_bias")
            constants[f"{weight}_zero"] = np.zeros(len(steps), np.int8)
            added.append(
                helper.make_node(
                    "DequantizeLinear",
                    [f"{weight}_int8", f"{weight}_scale", f"{weight}_zero"],
                    [f"{weight}_dequantized"],
                    name=f"{weight}/DequantizeLinear",
                    axis=layer.channel_axis,
                )
            )
        node.input[0], node.input[1] = f"{source}_dequantized", f"{weight}_dequantized"
    nodes = []
    for node in graph.node:
        nodes += [*before.get(node.name, []), node]
    used = {name for node in nodes for name in node.input}
    kept = [init for init in graph.initializer if init.name in used]
    kept += [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items() if k in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)
    onnx.checker.check_model(result, full_check=True)
    return result


def _bias_of(graph: onnx.GraphProto, node: onnx.NodeProto) -> str:
    """The initializer that is added to the output of a MatMul, or nothing."""
    vectors = {init.name for init in graph.initializer if len(init.dims) == 1}
    for reader in graph.node:
        if reader.op_type == "Add" and node.output[0] in reader.input:
            return next((name for name in reader.input if name in vectors), "")
    return ""


def _read_instead(graph: onnx.GraphProto, node: onnx.NodeProto, old: str, new: str) -> None:
    """Only the Add behind ``node`` changes: the exporter lets equal biases be one initializer."""
    for reader in graph.node:
        if reader.op_type == "Add" and node.output[0] in reader.input:
            for position, name in enumerate(reader.input):
                if name == old:
                    reader.input[position] = new


def quantize_weight(weight: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """INT8 values and float32 steps per channel of ``axis``; the error is at most half a step."""
    others = tuple(a for a in range(weight.ndim) if a != axis)
    steps = np.abs(weight).max(axis=others) / INT8_MAX
    steps = np.where(steps > 0, steps, 1.0).astype(np.float32)
    shape = [1] * weight.ndim
    shape[axis] = -1
    # Ties to even, as QuantizeLinear rounds; no clipping is needed, for the largest becomes 127.
    return np.rint(weight / steps.reshape(shape)).astype(np.int8), steps


def _quantize_dequantize(tensor: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node(
            op,
            [source, f"{tensor}_scale", "int8_zero"],
            [target],
            name=f"{tensor.lstrip('/')}/{op}",
        )
        for op, source, target in (
            ("QuantizeLinear", tensor, f"{tensor}_quantized"),
            ("DequantizeLinear", f"{tensor}_quantized", f"{tensor}_dequantized"),
        )
    ]
