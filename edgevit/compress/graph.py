"""What an ONNX graph holds: its quantizable layers, their shapes and their cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx
from onnx import numpy_helper, shape_inference


@dataclass(frozen=True)
class LinearLayer:
    """A node that multiplies an activation by a constant weight.

    ``channel_axis`` is the weight's axis of output channels. ``macs`` counts multiply-accumulates.
    """

    node: str
    op: str
    activation: str
    weight: str
    channel_axis: int
    macs: int


def linear_layers(model: onnx.ModelProto) -> list[LinearLayer]:
    """Every Conv, Gemm and MatMul with a constant second input, in graph order."""
    weights = {initializer.name for initializer in model.graph.initializer}
    macs = dict(matrix_products(model))
    layers = []
    for node in model.graph.node:
        if node.name in macs and node.input[1] in weights:
            layers.append(
                LinearLayer(
                    node.name,
                    node.op_type,
                    node.input[0],
                    node.input[1],
                    _channel_axis(node),
                    macs[node.name],
                )
            )
    return layers


def matrix_products(model: onnx.ModelProto) -> Iterator[tuple[str, int]]:
    """``(node name, multiply-accumulates)`` of every Conv, Gemm and MatMul; static shapes only."""
    shapes = tensor_shapes(model)
    for node in model.graph.node:
        if node.op_type == "Conv":
            weight = shapes[node.input[1]]
            yield node.name, prod(shapes[node.output[0]]) * prod(weight[1:])
        elif node.op_type == "Gemm":
            transposed = any(a.name == "transA" and a.i for a in node.attribute)
            inner = shapes[node.input[0]][0 if transposed else 1]
            yield node.name, prod(shapes[node.output[0]]) * inner
        elif node.op_type == "MatMul":
            yield node.name, prod(shapes[node.output[0]]) * shapes[node.input[0]][-1]


def total_macs(model: onnx.ModelProto) -> int:
    """Multiply-accumulates of all matrix products, attention's included."""
    return sum(macs for _, macs in matrix_products(model))


def tensor_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Shapes of inputs, outputs, initializers and inferred values by name."""
    graph = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    shapes = {
        value.name: tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    shapes.update((init.name, tuple(init.dims)) for init in graph.initializer)
    return shapes


def weight_array(model: onnx.ModelProto, name: str) -> np.ndarray:
    """The content of an initializer."""
    return next(
        numpy_helper.to_array(init) for init in model.graph.initializer if init.name == name
    )


def _channel_axis(node: onnx.NodeProto) -> int:
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm":
        return 0 if any(a.name == "transB" and a.i for a in node.attribute) else 1
    return 1
