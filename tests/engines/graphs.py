"""Small stage graphs for tests of engines: a toy transformer in float or INT8, and broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Collection

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgevit.bundle import Bundle, write_bundle
from edgevit.policy import ExitPolicy
from edgevit.preprocess import Preprocess

SIZE, PATCH, WIDTH, CLASSES = 32, 8, 32, 5
LINEAR_LAYERS = ("embed", "up", "down", "head")
_LARGEST_INPUT = {"embed": 4.0, "up": 6.0, "down": 2.0, "head": 0.5}


class _Graph:
    """Collects nodes and constants."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {"zero": np.zeros((), np.int8)}
        self.random = np.random.default_rng(0)

    def add(self, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def constant(self, name: str, value: np.ndarray) -> str:
        self.constants[name] = value
        return name

    def linear(
        self, op: str, name: str, x: str, shape: tuple[int, ...], int8: bool, **attributes: object
    ) -> str:
        """``op`` with a weight of ``shape`` and a bias, in the Q/DQ form that TensorRT wants if
        ``int8``: symmetric, weights per output channel, nothing after the product."""
        axis = 0 if op == "Conv" else 1
        weight = self.random.normal(size=shape) / np.sqrt(np.prod(shape) / 8)
        bias = self.constant(f"{name}_bias", np.zeros(shape[axis], np.float32))
        if int8:
            step = self.constant(f"{name}_step", np.float32(_LARGEST_INPUT[name] / 127))
            for made, given in (("QuantizeLinear", x), ("DequantizeLinear", f"{name}_q")):
                x = self.add(
                    made, [given, step, "zero"], f"{name}_{'q' if made[0] == 'Q' else 'dq'}"
                )
            others = tuple(a for a in range(weight.ndim) if a != axis)
            steps = np.abs(weight).max(others, keepdims=True) / 127
            self.constant(f"{name}_w", np.rint(weight / steps).astype(np.int8))
            self.constant(f"{name}_steps", steps.ravel().astype(np.float32))
            self.constant(f"{name}_zeros", np.zeros(shape[axis], np.int8))
            inputs = [f"{name}_w", f"{name}_steps", f"{name}_zeros"]
            w = self.add("DequantizeLinear", inputs, f"{name}_wdq", axis=axis)
        else:
            w = self.constant(f"{name}_w", weight.astype(np.float32))
        if op == "Conv":
            return self.add("Conv", [x, w, bias], name, **attributes)
        return self.add("Add", [self.add("MatMul", [x, w], f"{name}_product"), bias], name)


def transformer(float_layers: Collection[str] = ()) -> bytes:
    """A whole network as one stage: patch embedding, attention without weights, two layers, head.

    Its linear layers are ``LINEAR_LAYERS``; those in ``float_layers`` are left in float.
    """
    graph = _Graph()

    def linear(op: str, name: str, x: str, shape: tuple[int, ...], **attributes: object) -> str:
        return graph.linear(op, name, x, shape, name not in float_layers, **attributes)

    x = graph.add("Cast", ["image"], "float", to=TensorProto.FLOAT)
    x = graph.add("Mul", [x, graph.constant("scale", np.float32(1 / 64))], "scaled")
    x = graph.add("Transpose", [x], "planes", perm=[0, 3, 1, 2])
    x = linear("Conv", "embed", x, (WIDTH, 3, PATCH, PATCH), strides=[PATCH, PATCH])
    shape = graph.constant("shape", np.array([1, WIDTH, -1], np.int64))
    x = graph.add("Reshape", [x, shape], "flat")
    x = graph.add("Transpose", [x], "patches", perm=[0, 2, 1])
    x = linear("MatMul", "up", x, (WIDTH, 2 * WIDTH))
    heads = graph.constant("heads", np.array([1, -1, 2, WIDTH], np.int64))
    x = graph.add("Transpose", [graph.add("Reshape", [x, heads], "split")], "q", perm=[0, 2, 1, 3])
    keys = graph.add("Transpose", ["q"], "k", perm=[0, 1, 3, 2])
    x = graph.add("Softmax", [graph.add("MatMul", [x, keys], "scores")], "attention", axis=-1)
    x = graph.add("MatMul", [x, "q"], "mixed")
    merged = graph.constant("merged", np.array([1, -1, 2 * WIDTH], np.int64))
    x = graph.add("Transpose", [x], "back", perm=[0, 2, 1, 3])
    x = linear("MatMul", "down", graph.add("Reshape", [x, merged], "joined"), (2 * WIDTH, WIDTH))
    x = graph.add("ReduceMean", [graph.add("Tanh", [x], "bent")], "pooled", axes=[1], keepdims=0)
    x = linear("MatMul", "head", x, (WIDTH, CLASSES))
    graph.add("Identity", [x], "logits")
    graph.add("Softmax", [x], "probabilities", axis=-1)
    graph.add("ReduceMax", ["probabilities"], "confidence", axes=[1], keepdims=0)
    best = graph.add("ArgMax", [x], "best", axis=1, keepdims=0)
    graph.add("Cast", [best], "top1", to=TensorProto.INT32)
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "transformer",
            [helper.make_tensor_value_info("image", TensorProto.UINT8, [1, SIZE, SIZE, 3])],
            [
                helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, CLASSES]),
                helper.make_tensor_value_info("top1", TensorProto.INT32, [1]),
                helper.make_tensor_value_info("confidence", TensorProto.FLOAT, [1]),
            ],
            [numpy_helper.from_array(np.asarray(v), k) for k, v in graph.constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def bundle_of(
    folder: Path, *graphs: bytes, classes: int = CLASSES, precision: str = "int8"
) -> Bundle:
    """A bundle of these stage graphs, whatever they hold."""
    names = [f"stages/{number + 1}.onnx" for number in range(len(graphs))]
    manifest = {
        "name": "graphs",
        "labels": [f"class {number}" for number in range(classes)],
        "preprocess": Preprocess(size=SIZE).to_json(),
        "policy": ExitPolicy((0.5,) * (len(graphs) - 1)).to_json(),
        "stages": [
            {"file": name, "exit_block": number + 1, "precision": precision, "macs": 1}
            for number, name in enumerate(names)
        ],
        "check_images": [],
    }
    files = dict(zip(names, graphs))
    return Bundle.load(write_bundle(folder / "graphs.evb", manifest, files))
