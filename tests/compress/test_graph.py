from __future__ import annotations

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer

from edgevit.compress.exits import build_stages
from edgevit.compress.export import export_stage
from edgevit.compress.graph import linear_layers, total_macs


def test_macs_are_those_of_the_formula(backbone: VisionTransformer, images: np.ndarray) -> None:
    """Counted by hand for 4 patches of 16x16x3, a class token, width 192, 3 heads, 2 blocks."""
    stage, _ = build_stages(backbone, (2,), 7)
    model = export_stage(stage, torch.from_numpy(images[:1]))
    tokens, width = 5, 192
    embedding = 4 * 16 * 16 * 3 * width
    linear = tokens * width * (3 * width + width + 4 * width + 4 * width)
    attention = 2 * tokens * tokens * width  # scores and values, over all heads
    assert total_macs(model) == embedding + 2 * (linear + attention) + 2 * width * 7
    assert sum(layer.macs for layer in linear_layers(model)) == total_macs(model) - 2 * attention


def test_linear_layers_are_named_after_their_modules(
    backbone: VisionTransformer, images: np.ndarray
) -> None:
    stage, _ = build_stages(backbone, (1,), 7)
    layers = linear_layers(export_stage(stage, torch.from_numpy(images[:1])))
    assert [layer.weight for layer in layers] == [
        "embedding.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
        "head.linear.weight",
    ]
    assert [layer.channel_axis for layer in layers] == [1] * 6
