from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from timm.models.vision_transformer import VisionTransformer

from edgevit.compress.exits import build_stages
from edgevit.compress.export import check_parity, export_stage
from edgevit.errors import ParityError


@pytest.fixture
def exported(
    backbone: VisionTransformer, images: np.ndarray
) -> tuple[list[torch.nn.Module], list[onnx.ModelProto]]:
    stages = build_stages(backbone, (4, 8), 6)
    x = torch.from_numpy(images[:1])
    models = []
    for stage in stages:
        models.append(export_stage(stage, x))
        with torch.inference_mode():
            x = stage.tokens(x)
    return stages, models


def test_the_interface_of_a_stage(exported: tuple[list, list[onnx.ModelProto]]) -> None:
    first, middle, last = exported[1]
    for model in exported[1]:
        assert model.ir_version == 8
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 17)]
        assert len(model.graph.input) == 1
    image = first.graph.input[0]
    assert image.name == "image"
    assert image.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert [d.dim_value for d in image.type.tensor_type.shape.dim] == [1, 32, 32, 3]
    assert middle.graph.input[0].name == last.graph.input[0].name == "tokens_in"
    rest = ["logits", "top1", "confidence"]
    assert [o.name for o in first.graph.output] == ["tokens", *rest]
    assert [o.name for o in last.graph.output] == rest


def test_graphs_are_static_and_plain(exported: tuple[list, list[onnx.ModelProto]]) -> None:
    """What TensorRT 8.5's parser and the engines' fusions want: no shape arithmetic, no copies."""
    for model in exported[1]:
        operators = {node.op_type for node in model.graph.node}
        assert operators.isdisjoint({"Shape", "ConstantOfShape", "If", "Loop", "Identity", "Where"})
        assert "LayerNormalization" in operators
        assert not [i.name for i in model.graph.initializer if "::" in i.name]


def test_names_are_the_same_in_every_export(
    backbone: VisionTransformer, images: np.ndarray
) -> None:
    one, two = (
        export_stage(build_stages(backbone, (4,), 6)[0], torch.from_numpy(images[:1]))
        for _ in range(2)
    )
    assert [n.output[0] for n in one.graph.node] == [n.output[0] for n in two.graph.node]
    assert [i.name for i in one.graph.initializer] == [i.name for i in two.graph.initializer]


def test_a_tensor_keeps_its_name_when_the_exits_move(
    backbone: VisionTransformer, images: np.ndarray
) -> None:
    def names(block: int) -> set[str]:
        stage = build_stages(backbone, (block,), 6)[0]
        return {n.output[0] for n in export_stage(stage, torch.from_numpy(images[:1])).graph.node}

    shorter = {n for n in names(2) if n.startswith("/blocks.")}
    assert shorter and shorter <= names(3)


def test_graphs_compute_what_pytorch_computes(
    exported: tuple[list, list[onnx.ModelProto]], images: np.ndarray
) -> None:
    assert check_parity(*exported, images) < 1e-4


def test_a_graph_that_computes_something_else_is_found(
    exported: tuple[list, list[onnx.ModelProto]], images: np.ndarray
) -> None:
    stages, models = exported
    weight = next(i for i in models[1].graph.initializer if i.name == "blocks.5.mlp.fc2.weight")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 1.01, weight.name))
    with pytest.raises(ParityError, match="stage 2"):
        check_parity(stages, models, images[:2])
