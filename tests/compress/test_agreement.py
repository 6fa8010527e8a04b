from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgevit.compress import agreement
from edgevit.compress.agreement import compare_calibrators, exit_logits
from edgevit.compress.calibration import calibrate
from edgevit.compress.calibrators import CALIBRATORS

SIZE = 8
CHANNELS = 3 * SIZE * SIZE


def stage(weight: np.ndarray) -> onnx.ModelProto:
    """One stage that is no more than ``logits = image ** 3 @ weight``: a few bright pixels hold most
    of the range."""
    constants = {
        "shape": np.array([1, CHANNELS]),
        "cube": np.float32(3),
        "weight": weight.astype(np.float32),
    }
    nodes = [
        helper.make_node("Cast", ["image"], ["pixel_values"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["pixel_values", "shape"], ["flat"], "flatten"),
        helper.make_node("Pow", ["flat", "cube"], ["cubes"], "cubes_of"),
        helper.make_node("MatMul", ["cubes", "weight"], ["logits"], "linear"),
        helper.make_node("Softmax", ["logits"], ["probabilities"], "softmax", axis=-1),
        helper.make_node(
            "ReduceMax", ["probabilities"], ["confidence"], "max", axes=[-1], keepdims=0
        ),
        helper.make_node("ArgMax", ["logits"], ["index"], "argmax", axis=-1, keepdims=0),
        helper.make_node("Cast", ["index"], ["top1"], "to_int32", to=TensorProto.INT32),
    ]
    graph = helper.make_graph(
        nodes,
        "stage",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, [1, SIZE, SIZE, 3])],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, weight.shape[1]]),
            helper.make_tensor_value_info("top1", TensorProto.INT32, [1]),
            helper.make_tensor_value_info("confidence", TensorProto.FLOAT, [1]),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def pictures(count: int, seed: int) -> np.ndarray:
    """Dark ones with a single bright channel here and there, which says nothing about the class."""
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 20, (count, CHANNELS), np.uint8)
    images[::12, 0] = 255
    return images.reshape(count, SIZE, SIZE, 3)


def blind_to_bright() -> np.ndarray:
    weight = np.random.default_rng(0).normal(size=(CHANNELS, 4))
    weight[0] = 0
    return weight


def integer_logits(images: np.ndarray, weight: np.ndarray, amax: float) -> np.ndarray:
    """The quantized stage in numpy."""
    weight = weight.astype(np.float32)
    cubes = images.reshape(len(images), -1).astype(np.float32) ** 3
    step, steps = np.float32(amax / 127), np.abs(weight).max(0) / np.float32(127)
    x = np.clip(np.rint(cubes / step), -128, 127).astype(np.int64)
    return (x @ np.rint(weight / steps).astype(np.int64)) * (float(step) * steps)


def test_candidates_against_integer_arithmetic() -> None:
    weight = blind_to_bright()
    stages = {"stages/1.onnx": stage(weight)}
    seen = calibrate(stages, pictures(24, 1), "hash")
    held_out = pictures(16, 2)
    found = compare_calibrators(stages, seen, held_out, threads=1)
    assert sorted(c.calibrator for c in found) == sorted(CALIBRATORS)
    truth = held_out.reshape(16, -1).astype(np.float64) ** 3 @ weight.astype(np.float32)
    for candidate in found:
        amax = seen.table(candidate.calibrator).amax["stages/1.onnx"]["cubes"]
        logits = integer_logits(held_out, weight, amax)
        assert candidate.agreement == (logits.argmax(1) == truth.argmax(1)).mean()
        error = np.square(logits - truth).mean()
        assert candidate.logit_error == pytest.approx(error, rel=1e-3)
    ranks = [(-c.agreement, c.logit_error) for c in found]
    assert ranks == sorted(ranks)
    # The bright channel has no weight, so min-max spends its steps on nothing and loses labels.
    scores = {c.calibrator: c.agreement for c in found}
    assert found[0].agreement > scores["min-max"]


def test_min_max_wins_where_the_largest_values_decide() -> None:
    weight = blind_to_bright()
    weight[0] = [1, -1, 2, -2]
    stages = {"stages/1.onnx": stage(weight)}
    images = pictures(24, 1)
    seen = calibrate(stages, images, "hash")
    found = compare_calibrators(stages, seen, images[::12], threads=1)
    assert found[0].calibrator == "min-max"
    assert found[0].logit_error < found[-1].logit_error


def test_equal_labels_are_told_apart_by_logits_then_by_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = np.array([[[0.0, 4.0]], [[4.0, 0.0]]])
    offsets = iter([0.0, 3.0, 1.0, 9.0, 1.0, 2.0, 2.0])  # of the float stages, then of each
    monkeypatch.setattr(agreement, "exit_logits", lambda *_: wanted + np.array([next(offsets), 0]))
    stages = {"stages/1.onnx": stage(blind_to_bright())}
    seen = calibrate(stages, pictures(4, 1), "hash")
    found = compare_calibrators(stages, seen, pictures(2, 2))
    names = list(CALIBRATORS)
    # Offsets by name: 3, 1, 9 (which changes a label), 1, 2, 2.
    order = [names[i] for i in (1, 3, 4, 5, 0, 2)]
    assert [c.calibrator for c in found] == order
    assert [c.agreement for c in found] == [1, 1, 1, 1, 1, 0.5]
    assert [c.logit_error for c in found] == [0.5, 0.5, 2, 2, 4.5, 40.5]


def test_logits_of_every_exit_and_image() -> None:
    weight = blind_to_bright()
    images = pictures(3, 5)
    found = exit_logits({"stages/1.onnx": stage(weight)}, images, 1)
    assert found.shape == (3, 1, 4)
    truth = images.reshape(3, -1).astype(np.float64) ** 3 @ weight
    np.testing.assert_allclose(found[:, 0], truth, rtol=1e-4, atol=1e-2)
