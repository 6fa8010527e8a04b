from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

from edgevit.compress.quantize import insert_qdq, quantize_weight


def linear_graph(weight: np.ndarray, op: str) -> onnx.ModelProto:
    """``y = x @ weight`` as MatMul ``[K, N]`` or as Gemm with the weight stored ``[N, K]``."""
    attributes = {"transB": 1} if op == "Gemm" else {}
    inner, outer = weight.shape if op == "MatMul" else weight.shape[::-1]
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"], name="linear", **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, inner])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, outer])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Exactly as written: without the fusions that choose integer kernels."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_qdq_is_integer_arithmetic(op: str) -> None:
    """The graph against 32-bit integer sums in numpy, on random weights with unequal channels."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(64, 16)).astype(np.float32) * np.geomspace(0.01, 10, 16)
    weight = weight.astype(np.float32)
    x = generator.normal(size=(3, 64)).astype(np.float32)
    scale = np.float32(np.abs(x).max() / 127)
    stored = weight if op == "MatMul" else np.ascontiguousarray(weight.T)
    found = run(insert_qdq(linear_graph(stored, op), {"x": float(scale)}), x)

    x_int = np.clip(np.rint(x / scale), -128, 127).astype(np.int32)
    steps = np.abs(weight).max(0) / np.float32(127)
    w_int = np.rint(weight / steps).astype(np.int32)
    wanted = (x_int @ w_int) * (float(scale) * steps)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@settings(deadline=None)
@given(
    weight=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=4, max_side=5),
        elements=st.floats(-1e3, 1e3, width=32),
    ),
    data=st.data(),
)
def test_weights_are_off_by_at_most_half_a_step(weight: np.ndarray, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, weight.ndim - 1))
    values, steps = quantize_weight(weight, axis)
    shape = [1] * weight.ndim
    shape[axis] = -1
    steps = steps.reshape(shape).astype(np.float64)
    assert values.dtype == np.int8 and values.min(initial=0) >= -127
    assert (np.abs(values * steps - weight) <= steps * 0.5001 + 1e-30).all()


def test_layers_without_a_scale_stay_as_they_are() -> None:
    model = linear_graph(np.eye(4, dtype=np.float32), "MatMul")
    assert insert_qdq(model, {}) == model


def test_only_signed_int8_with_zero_point_zero_is_written() -> None:
    """TensorRT refuses anything else."""
    model = insert_qdq(linear_graph(np.ones((4, 2), np.float32), "MatMul"), {"x": 0.1})
    zeros = [i for i in model.graph.initializer if i.name.endswith("zero")]
    assert zeros and all(i.data_type == TensorProto.INT8 for i in zeros)
    assert all(not numpy_helper.to_array(i).any() for i in zeros)
    # Weight and output are not quantized again: Q only stands before the layer.
    assert [n.op_type for n in model.graph.node].count("QuantizeLinear") == 1


def test_the_bias_takes_back_what_rounded_weights_add_on_average() -> None:
    """Inputs far from zero, where a rounding error of the weight is a constant of the output."""
    generator = np.random.default_rng(1)
    weight = generator.normal(size=(64, 16)).astype(np.float32)
    x = (generator.normal(size=(3, 64)) * 0.01 + generator.uniform(2, 3, 64)).astype(np.float32)
    bias = generator.normal(size=16).astype(np.float32)
    model = linear_graph(weight, "MatMul")
    model.graph.node[0].output[0] = "product"
    model.graph.node.append(helper.make_node("Add", ["b", "product"], ["y"], name="add"))
    model.graph.initializer.append(numpy_helper.from_array(bias, "b"))
    scales = {"x": float(np.abs(x).max() / 127)}
    wanted = x.astype(np.float64) @ weight + bias

    def offset(quantized: onnx.ModelProto) -> float:
        return float(np.abs((run(quantized, x) - wanted).mean(0)).mean())

    plain = offset(insert_qdq(model, scales))
    corrected = offset(insert_qdq(model, scales, {"x": x.mean(0)}))
    assert corrected < plain / 2


def test_a_bias_that_two_layers_share_is_corrected_for_each_alone() -> None:
    weights = {"w1": np.full((2, 2), 1.003, np.float32), "w2": np.eye(2, dtype=np.float32)}
    weights["w1"][0, 0] = 127
    nodes = []
    for number, source in ((1, "x"), (2, "x")):
        nodes.append(
            helper.make_node("MatMul", [source, f"w{number}"], [f"p{number}"], f"m{number}")
        )
        nodes.append(helper.make_node("Add", ["b", f"p{number}"], [f"y{number}"], f"a{number}"))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 2])],
        [helper.make_tensor_value_info(f"y{n}", TensorProto.FLOAT, [3, 2]) for n in (1, 2)],
        [numpy_helper.from_array(w, name) for name, w in weights.items()]
        + [numpy_helper.from_array(np.zeros(2, np.float32), "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    result = insert_qdq(model, {"x": 1.0}, {"x": np.array([1, 10], np.float32)})
    stored = {i.name: numpy_helper.to_array(i) for i in result.graph.initializer}
    # Column 0 of w1 has step 1, so its 1.003 became 1: 10 times 0.003 is lost. Nothing else is.
    np.testing.assert_allclose(stored["w1_bias"], [0.03, 0], atol=1e-5)
    np.testing.assert_allclose(stored["w2_bias"], [0, 0], atol=1e-6)
