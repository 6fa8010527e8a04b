"""A three-stage bundle that is right by construction: it names the strongest colour of a picture.

Its arithmetic is written out here, so that tests of engines and the runtime need no trained model:
``logits = gain * mean_rgb / 255``, with a gain that grows with the stage, so that later exits are surer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import cv2
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgevit.bundle import write_bundle
from edgevit.policy import ExitPolicy
from edgevit.preprocess import Preprocess

LABELS = ("red", "green", "blue")
SIZE = 32
GAINS = (2.0, 6.0, 20.0)


def stage_graph(index: int, gain: float, last: bool) -> bytes:
    """One stage with the names, shapes and dtypes that every real stage has."""
    first = index == 0
    nodes = []
    if first:
        nodes += [
            helper.make_node("Cast", ["image"], ["float"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["float"], ["mean"], axes=[1, 2], keepdims=0),
            helper.make_node("Unsqueeze", ["mean", "one"], ["tokens"]),
        ]
        source = "tokens"
    else:
        source = "tokens_in"
        if not last:
            nodes.append(helper.make_node("Identity", ["tokens_in"], ["tokens"]))
    nodes += [
        helper.make_node("Squeeze", [source, "one"], ["pooled"]),
        helper.make_node("MatMul", ["pooled", "weight"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=-1),
        helper.make_node("ReduceMax", ["probabilities"], ["confidence"], axes=[1], keepdims=0),
        helper.make_node("ArgMax", ["logits"], ["top1_long"], axis=1, keepdims=0),
        helper.make_node("Cast", ["top1_long"], ["top1"], to=TensorProto.INT32),
    ]
    tokens = helper.make_tensor_value_info("tokens", TensorProto.FLOAT, [1, 1, 3])
    graph = helper.make_graph(
        nodes,
        f"stage{index + 1}",
        [
            helper.make_tensor_value_info("image", TensorProto.UINT8, [1, SIZE, SIZE, 3])
            if first
            else helper.make_tensor_value_info("tokens_in", TensorProto.FLOAT, [1, 1, 3])
        ],
        [
            *([] if last else [tokens]),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 3]),
            helper.make_tensor_value_info("top1", TensorProto.INT32, [1]),
            helper.make_tensor_value_info("confidence", TensorProto.FLOAT, [1]),
        ],
        [
            numpy_helper.from_array(np.array([1], np.int64), "one"),
            numpy_helper.from_array((np.eye(3) * gain / 255).astype(np.float32), "weight"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def picture(label: int, strength: float = 1.0, height: int = 48, width: int = 64) -> np.ndarray:
    """BGR frame whose strongest colour is ``label``; at strength 0 it is grey."""
    rgb = np.full(3, 128 * (1 - strength))
    rgb[label] = 128 + 127 * strength
    return np.full((height, width, 3), rgb[::-1].round().astype(np.uint8))


def expected(frame_bgr: np.ndarray, stage: int) -> tuple[int, float]:
    """Label index and confidence of a uniform frame at a stage, computed without any engine."""
    logits = GAINS[stage] * frame_bgr[0, 0, ::-1].astype(np.float64) / 255
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    return int(logits.argmax()), float(probabilities.max())


def write_tiny_bundle(path: Path, thresholds: Sequence[float] = (0.7, 0.9)) -> Path:
    files = {
        f"stages/{i + 1}.onnx": stage_graph(i, gain, i == len(GAINS) - 1)
        for i, gain in enumerate(GAINS)
    }
    spec = Preprocess(size=SIZE)
    check = []
    for label in range(3):
        name = f"check/{label:03d}.png"
        rgb = spec(picture(label))
        files[name] = cv2.imencode(".png", rgb[:, :, ::-1])[1].tobytes()
        check.append({"file": name, "label": label})
    files["report.json"] = b"{}"
    manifest = {
        "name": "tiny",
        "created_by": "edgevit tests",
        "model": {"name": "tiny", "image_size": SIZE, "patch_size": SIZE},
        "labels": list(LABELS),
        "preprocess": spec.to_json(),
        "policy": ExitPolicy(tuple(thresholds)).to_json(),
        "stages": [
            {
                "file": f"stages/{i + 1}.onnx",
                "exit_block": i + 1,
                "precision": "float32",
                "macs": 9 if i else 12,
            }
            for i in range(len(GAINS))
        ],
        "check_images": check,
    }
    return write_bundle(path, manifest, files)
