from __future__ import annotations

import json
import tracemalloc
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from timm.models.vision_transformer import VisionTransformer

from edgevit.compress.calibration import CalibrationTable, calibrate, choose_images
from edgevit.compress.calibrators import CALIBRATORS
from edgevit.compress.exits import build_stages
from edgevit.compress.export import export_stage
from edgevit.errors import DataError, ModelError


@pytest.fixture
def graphs(backbone: VisionTransformer, images: np.ndarray) -> dict[str, onnx.ModelProto]:
    x = torch.from_numpy(images[:1])
    found = {}
    for number, stage in enumerate(build_stages(backbone, (1,), 6)):
        found[f"stages/{number + 1}.onnx"] = export_stage(stage, x)
        with torch.inference_mode():
            x = stage.tokens(x)
    return found


def test_ranges_are_the_largest_magnitudes_that_pytorch_sees(
    backbone: VisionTransformer, graphs: dict[str, onnx.ModelProto], images: np.ndarray
) -> None:
    """Against hooks on the PyTorch modules: another program computes the same figure."""
    seen: dict[str, float] = {}
    channels: dict[str, np.ndarray] = {}

    def watch(name: str) -> None:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            seen[name] = float(inputs[0].abs().max())
            channels[name] = inputs[0].mean(dim=(0, 1)).numpy()

        backbone.get_submodule(name).register_forward_pre_hook(hook)

    for name in ("blocks.0.attn.qkv", "blocks.0.mlp.fc2", "blocks.11.mlp.fc1"):
        watch(name)
    with torch.inference_mode():
        x = torch.from_numpy(images)
        for stage in build_stages(backbone, (1,), 6):
            x = stage.tokens(x)
    calibration = calibrate(graphs, images, "hash")
    table, means = calibration.table("min-max"), calibration.means
    first, second = table.amax["stages/1.onnx"], table.amax["stages/2.onnx"]
    found = {
        "blocks.0.attn.qkv": first["/blocks.0/norm1/LayerNormalization_output_0"],
        "blocks.0.mlp.fc2": first["/blocks.0/mlp/act/Mul_1_output_0"],
        "blocks.11.mlp.fc1": second["/blocks.11/norm2/LayerNormalization_output_0"],
    }
    assert found == pytest.approx(seen, rel=1e-4)
    averages = means["stages/1.onnx"]["/blocks.0/mlp/act/Mul_1_output_0"]
    np.testing.assert_allclose(averages, channels["blocks.0.mlp.fc2"], atol=1e-5)


@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_pixels_are_held_without_loss(
    calibrator: str, graphs: dict[str, onnx.ModelProto], images: np.ndarray
) -> None:
    table = calibrate(graphs, images, "hash").table(calibrator)
    assert table.scale("stages/1.onnx", "pixels") == 1.0
    assert table.clipped["stages/1.onnx"]["pixels"] == 0


def test_evidence(graphs: dict[str, onnx.ModelProto], images: np.ndarray) -> None:
    table = calibrate(graphs, images, "hash", ["cat"]).table("min-max")
    assert (table.images, table.preprocess_hash, table.missing_classes) == (8, "hash", ("cat",))
    assert CalibrationTable.from_json(json.loads(json.dumps(table.to_json()))) == table
    evidence = table.evidence()
    assert (evidence["clipped_tensors"], evidence["largest_clipped_share"]) == (0, 0)


def test_the_order_of_the_images_changes_no_range(
    graphs: dict[str, onnx.ModelProto], images: np.ndarray
) -> None:
    found, turned = calibrate(graphs, images, "hash"), calibrate(graphs, images[::-1], "hash")
    assert found.images_sha256 != turned.images_sha256
    for calibrator in CALIBRATORS:
        assert found.table(calibrator).amax == turned.table(calibrator).amax


def test_memory_does_not_grow_with_the_images(
    graphs: dict[str, onnx.ModelProto], images: np.ndarray
) -> None:
    """What calibrating allocates in Python and numpy, at its peak, for 4 images and for 32."""

    def peak(count: int) -> int:
        many = np.concatenate([images] * 4)[:count]
        tracemalloc.start()
        try:
            calibrate(graphs, many, "hash")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1)  # what stays from the first time, imports and caches
    few, all_of_them = peak(4), peak(32)
    # The images themselves are handed in twice: as they are, and as the bytes that are hashed.
    assert all_of_them - few < 28 * 2 * images[0].nbytes + 200_000


@pytest.mark.parametrize("calibrator", ["percentile-99.9", "mse"])
def test_the_table_says_how_much_is_clipped(
    calibrator: str, graphs: dict[str, onnx.ModelProto], images: np.ndarray
) -> None:
    """Against the values themselves, from another run of the graph."""
    tensor, name = "/blocks.0/mlp/act/Mul_1_output_0", "stages/1.onnx"
    graph = onnx.ModelProto()
    graph.CopyFrom(graphs[name])
    graph.graph.output.append(onnx.helper.make_tensor_value_info(tensor, 1, None))
    session = onnxruntime.InferenceSession(
        graph.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    values = np.stack([session.run([tensor], {"image": image[None]})[0] for image in images])
    table = calibrate(graphs, images, "hash").table(calibrator)
    beyond = (np.abs(values) > table.amax[name][tensor]).mean()
    assert table.clipped[name][tensor] == pytest.approx(beyond, abs=1e-4)
    assert calibrator != "percentile-99.9" or beyond == pytest.approx(1e-3, rel=0.1)
    shares = [share for found in table.clipped.values() for share in found.values()]
    evidence = table.evidence()
    assert evidence["largest_clipped_share"] == max(shares)
    assert evidence["clipped_tensors"] == np.count_nonzero(shares)


def test_no_images_is_an_error(graphs: dict[str, onnx.ModelProto], images: np.ndarray) -> None:
    with pytest.raises(DataError, match="real images"):
        calibrate(graphs, images[:0], "hash")


def test_a_value_that_is_not_finite_is_named(
    graphs: dict[str, onnx.ModelProto], images: np.ndarray
) -> None:
    graph = graphs["stages/1.onnx"].graph
    bias = next(i for i in graph.initializer if i.name == "blocks.0.mlp.fc1.bias")
    bias.CopyFrom(numpy_helper.from_array(np.full(768, np.inf, np.float32), bias.name))
    with pytest.raises(ModelError, match=r"blocks\.0/mlp/act.*stages/1.*image 0"):
        calibrate(graphs, images, "hash")


@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_a_tensor_that_is_always_zero_gets_a_scale(
    calibrator: str, graphs: dict[str, onnx.ModelProto], images: np.ndarray
) -> None:
    graph = graphs["stages/1.onnx"].graph
    for initializer in graph.initializer:
        if initializer.name in ("blocks.0.norm1.weight", "blocks.0.norm1.bias"):
            zero = np.zeros(192, np.float32)
            initializer.CopyFrom(numpy_helper.from_array(zero, initializer.name))
    table = calibrate(graphs, images, "hash").table(calibrator)
    assert table.scale("stages/1.onnx", "/blocks.0/norm1/LayerNormalization_output_0") > 0


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=120),
    count=st.integers(1, 150),
    seed=st.integers(0, 3),
)
def test_calibration_images_are_spread_evenly(labels: list[int], count: int, seed: int) -> None:
    chosen = choose_images(labels, count, seed)
    assert len(chosen) == len(set(chosen.tolist())) == min(count, len(labels))
    have, took = Counter(labels), Counter(labels[i] for i in chosen)
    most = max(took.values())
    # A class gives fewer than the others only when it has no more.
    assert all(took[c] >= most - 1 or took[c] == have[c] for c in have)
