from __future__ import annotations

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from edgevit.compress.backbone import create_backbone, data_config, fold_normalization
from edgevit.compress.exits import build_stages
from edgevit.errors import RecipeError
from tests.compress.test_backbone import normalized


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",  # the plain one
        "deit3_small_patch16_224",  # position embedding without the class token, LayerScale
        "vit_small_patch14_reg4_dinov2",  # register tokens
        "vit_small_patch16_18x2_224",  # two parallel branches a block
        "vit_base_patch16_clip_224",  # a norm before the blocks
        "vit_relpos_small_patch16_224",  # no position embedding: refused or equal, see below
    ],
)
def test_the_chain_of_stages_is_the_whole_model(name: str, images: np.ndarray) -> None:
    """Against timm's own forward on normalised floats, an independent path through other code."""
    torch.manual_seed(0)
    try:
        backbone = create_backbone(name, 32, 16)
    except Exception as error:
        assert "not a timm VisionTransformer" in str(error)
        return
    for parameter in backbone.parameters():  # timm starts some at zero, which would hide mistakes
        parameter.data.normal_(std=0.05)
    mean, std = data_config(backbone)
    with torch.inference_mode():
        wanted = backbone.forward_features(normalized(images, mean, std))
    fold_normalization(backbone, mean, std)
    stages = build_stages(backbone, (2, 5), 4)
    x = torch.from_numpy(images)
    with torch.inference_mode():
        for stage in stages:
            x = stage.tokens(x)
        found = backbone.norm(x)
        features = stages[-1].head.features(x)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    patches = wanted[:, backbone.num_prefix_tokens :].mean(1)
    pooled = torch.cat([wanted[:, 0], patches], 1) if backbone.has_class_token else patches
    torch.testing.assert_close(features, pooled, atol=1e-4, rtol=1e-4)


def test_outputs_of_a_stage(backbone: VisionTransformer, images: np.ndarray) -> None:
    first, last = build_stages(backbone, (3,), 5)
    with torch.inference_mode():
        tokens, logits, top1, confidence = first(torch.from_numpy(images))
        final = last(tokens)
    assert tokens.shape == (8, 5, 192) and len(final) == 3
    assert top1.dtype == torch.int32
    np.testing.assert_array_equal(top1.numpy(), logits.numpy().argmax(1))
    exponentials = np.exp(logits.numpy().astype(np.float64))
    np.testing.assert_allclose(
        confidence.numpy(), (exponentials / exponentials.sum(1, keepdims=True)).max(1), rtol=1e-5
    )


def test_an_exit_behind_the_backbone_is_refused(backbone: VisionTransformer) -> None:
    with pytest.raises(RecipeError, match="12 blocks"):
        build_stages(backbone, (6, 12), 5)


def test_no_early_exit_gives_one_stage(backbone: VisionTransformer) -> None:
    assert [stage.exit_block for stage in build_stages(backbone, (), 5)] == [12]
