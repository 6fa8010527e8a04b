"""Make a network easy to quantize without changing what it computes.

INT8 has one step for a whole activation tensor, and a ViT's channels differ by orders of magnitude:
the largest decides the step and the rest drowns. Before export, each linear layer's input gets its
channels centred and scaled, ``x' = (x - center) / scale``, and the layer takes both back into its
weight and bias. In float nothing changes; in INT8 every channel uses the range.

Where the new input comes from at no cost at run time:

- after a LayerNorm (qkv, fc1, head) both go into its affine part (SmoothQuant, arXiv 2211.10438; for
  the centres also RepQ-ViT, arXiv 2212.08254);
- before ``proj`` both go into the values' part of qkv, since attention is a weighted mean of values;
- after GELU (fc2), whose outputs lie almost wholly on one side of zero, the centres are subtracted
  in the graph: one subtraction that engines fuse.

How much of a channel's range moves into the weight is searched per layer: the strength with the
smallest INT8 error of the layer's output on real images.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from timm.layers.attention import Attention
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from edgevit.compress.exits import ExitHead, Stage

# SmoothQuant's migration strengths that are tried, beside leaving the scales alone.
_STRENGTHS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0)
# Rows of a layer's input kept from each batch for the search.
_ROWS = 160
_BATCH = 16


class Centered(nn.Module):
    """An activation function whose output is shifted by ``center [channels]``."""

    def __init__(self, activation: nn.Module, center: Tensor) -> None:
        super().__init__()
        self.activation = activation
        self.center = nn.Parameter(center, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(x) - self.center
        return y


@dataclass
class _Inputs:
    """What a layer's input looked like: ``low`` and ``high [channels]``, some ``rows [n, channels]``."""

    low: Tensor
    high: Tensor
    rows: list[Tensor]

    @property
    def center(self) -> Tensor:
        return (self.low + self.high) / 2

    @property
    def reach(self) -> Tensor:
        return ((self.high - self.low) / 2).clamp(min=1e-5)


_Seen = dict[nn.Module, _Inputs]


@torch.no_grad()
def equalize(stages: Sequence[Stage], images: np.ndarray) -> list[Stage]:
    """A copy of ``stages`` that computes the same in float and loses less in INT8.

    ``images`` is uint8 ``[n, S, S, 3]`` RGB: real images, whose activations decide.
    """
    stages = [copy.deepcopy(stage) for stage in stages]
    seen = _watch(stages, images)
    for stage in stages:
        for block in stage.blocks.values():
            # Blocks of other families keep their scales: they are right, only harder to quantize.
            if type(block) is Block and isinstance(block.attn, Attention):
                _equalize_attention(block.norm1, block.attn, seen)
            if type(block) is Block and isinstance(block.mlp, Mlp):
                _equalize_mlp(block.norm2, block.mlp, seen)
        _equalize_head(stage.head, seen[stage.head.linear])
    return stages


def _equalize_attention(norm: nn.Module, attention: Any, seen: _Seen) -> None:
    qkv, proj = attention.qkv, attention.proj
    _absorb_into_norm(norm, qkv, seen[qkv])
    if not isinstance(attention.norm, nn.Identity):
        return
    found = seen[proj]
    scale = _search(found, proj.weight)
    values = slice(2 * proj.in_features, 3 * proj.in_features)
    _give_bias(qkv)
    _compensate(proj, found.center, scale)
    qkv.bias[values] = (qkv.bias[values] - found.center) / scale
    qkv.weight[values] /= scale[:, None]


def _equalize_mlp(norm: nn.Module, mlp: Any, seen: _Seen) -> None:
    _absorb_into_norm(norm, mlp.fc1, seen[mlp.fc1])
    if isinstance(mlp.norm, nn.Identity):
        center = seen[mlp.fc2].center
        _compensate(mlp.fc2, center, torch.ones_like(center))
        mlp.act = Centered(mlp.act, center)


def _absorb_into_norm(norm: nn.Module, layer: nn.Linear, found: _Inputs) -> None:
    if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.bias is None:
        return
    scale = _search(found, layer.weight)
    _compensate(layer, found.center, scale)
    norm.weight.div_(scale)
    norm.bias[:] = (norm.bias - found.center) / scale


def _equalize_head(head: ExitHead, found: _Inputs) -> None:
    """The head's norm feeds the class token and the mean of patches: one scale for both."""
    norm, linear = head.norm, head.linear
    if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.bias is None:
        return
    parts = linear.in_features // norm.weight.numel()
    both = _Inputs(
        found.low.view(parts, -1).amin(0).repeat(parts),
        found.high.view(parts, -1).amax(0).repeat(parts),
        found.rows,
    )
    scale = _search(both, linear.weight, parts)
    _compensate(linear, both.center, scale)
    width = norm.weight.numel()
    norm.weight.div_(scale[:width])
    norm.bias[:] = (norm.bias - both.center[:width]) / scale[:width]


def _compensate(layer: nn.Linear, center: Tensor, scale: Tensor) -> None:
    """Change ``layer`` so that it gives for ``(x - center) / scale`` what it gave for ``x``."""
    _give_bias(layer)
    layer.bias.add_(layer.weight @ center)
    layer.weight.mul_(scale)


def _give_bias(layer: nn.Linear) -> None:
    if layer.bias is None:
        layer.bias = nn.Parameter(torch.zeros(layer.out_features), requires_grad=False)


def _search(found: _Inputs, weight: Tensor, parts: int = 1) -> Tensor:
    """The scales ``[channels]`` with the smallest INT8 error of the layer's output."""
    x = torch.cat(found.rows) - found.center
    wanted = x @ weight.T
    reach = found.reach
    largest = weight.abs().amax(0).view(parts, -1).amax(0).repeat(parts).clamp(min=1e-5)
    best, best_error = torch.ones_like(reach), float("inf")
    for strength in (None, *_STRENGTHS):
        scale = torch.ones_like(reach)
        if strength is not None:
            scale = reach**strength / largest ** (1 - strength)
            scale = scale / scale.log().mean().exp()
        step = (reach / scale).max() / 127
        error = _rounded(x / scale, step) @ _rounded_weight(weight * scale).T - wanted
        size = float(error.square().mean())
        if size < best_error:
            best, best_error = scale, size
    return best


def _rounded(x: Tensor, step: Tensor) -> Tensor:
    return (x / step).round().clamp(-128, 127) * step


def _rounded_weight(weight: Tensor) -> Tensor:
    step = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return (weight / step).round() * step


def _watch(stages: Sequence[Stage], images: np.ndarray) -> _Seen:
    """Run the images and note what every linear layer's input looks like."""
    generator = torch.Generator().manual_seed(0)
    seen: _Seen = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        rows = x[torch.randperm(len(x), generator=generator)[:_ROWS]]
        if layer not in seen:
            seen[layer] = _Inputs(x.amin(0), x.amax(0), [rows])
            return
        found = seen[layer]
        found.low, found.high = (
            torch.minimum(found.low, x.amin(0)),
            torch.maximum(found.high, x.amax(0)),
        )
        found.rows.append(rows)

    hooks = [layer.register_forward_pre_hook(note) for layer in _linear_layers(stages)]
    for start in range(0, len(images), _BATCH):
        x = torch.from_numpy(images[start : start + _BATCH])
        for stage in stages:
            x = stage.tokens(x)
            stage.head(x)
    for hook in hooks:
        hook.remove()
    return seen


def _linear_layers(stages: Sequence[Stage]) -> Iterator[nn.Linear]:
    for stage in stages:
        yield from (module for module in stage.modules() if isinstance(module, nn.Linear))
