from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgevit.compress.backbone import create_backbone, data_config, fold_normalization
from edgevit.compress.equalize import equalize
from edgevit.compress.exits import Stage, build_stages


def outputs(stages: list[Stage], images: np.ndarray) -> list[torch.Tensor]:
    x, found = torch.from_numpy(images), []
    with torch.inference_mode():
        for stage in stages:
            x = stage.tokens(x)
            found += [x, stage.head(x)]
    return found


def random_stages(name: str) -> list[Stage]:
    torch.manual_seed(0)
    backbone = create_backbone(name, 32, 16)
    for parameter in backbone.parameters():
        parameter.data.normal_(std=0.05)
    fold_normalization(backbone, *data_config(backbone))
    return build_stages(backbone, (4,), 6)


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_small_patch14_reg4_dinov2",  # LayerScale, registers
        "vit_small_patch16_18x2_224",  # parallel blocks, which are left alone
    ],
)
def test_nothing_changes_in_float(name: str, images: np.ndarray) -> None:
    stages = random_stages(name)
    before = outputs(stages, images)
    after = outputs(equalize(stages, images), images)
    for found, wanted in zip(after, before, strict=True):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(found, wanted, atol=1e-4 * max(1.0, scale), rtol=0)


def test_the_original_is_left_as_it_was(images: np.ndarray) -> None:
    stages = random_stages("vit_tiny_patch16_224")
    before = {k: v.clone() for k, v in stages[0].state_dict().items()}
    equalize(stages, images)
    for key, value in stages[0].state_dict().items():
        torch.testing.assert_close(value, before[key], atol=0, rtol=0)


def test_an_outlier_channel_no_longer_decides_the_step(images: np.ndarray) -> None:
    """One channel of a LayerNorm 200 times the others: INT8 by plain min-max ruins the layer."""
    stages = random_stages("vit_tiny_patch16_224")
    norm = stages[0].blocks["2"].norm1
    with torch.no_grad():
        norm.weight[7] *= 200

    def int8_error(of: list[Stage]) -> float:
        """Relative error of qkv's output with its input and weight rounded, by direct arithmetic."""
        layer: nn.Linear = of[0].blocks["2"].attn.qkv
        seen: list[torch.Tensor] = []
        hook = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        outputs(of, images)
        hook.remove()
        x = torch.cat(seen).double()
        weight = layer.weight.double()
        step = x.abs().max() / 127
        steps = weight.abs().amax(1, keepdim=True) / 127
        rounded = (x / step).round() * step @ ((weight / steps).round() * steps).T
        exact = x @ weight.T
        # Per output channel, without its mean, which the bias would take back.
        error = (rounded - exact) - (rounded - exact).mean((0, 1))
        return float((error.square().mean() / (exact - exact.mean((0, 1))).square().mean()).sqrt())

    assert int8_error(equalize(stages, images)) < int8_error(stages) / 3
