"""Early exits: the backbone cut into stages, each with a head that can answer."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from edgevit.compress.backbone import PIXEL_CENTER
from edgevit.errors import RecipeError


class ExitHead(nn.Module):
    """``[CLS ; mean of patches]`` of the normalised tokens, then a linear classifier.

    The normalisation is a copy of the backbone's last one; its affine part needs no training, since
    a linear layer follows.
    """

    def __init__(self, backbone: VisionTransformer, classes: int) -> None:
        super().__init__()
        last = backbone.norm
        self.norm = nn.LayerNorm(backbone.embed_dim, eps=last.eps)
        self.norm.load_state_dict(last.state_dict())
        self.prefix = backbone.num_prefix_tokens
        self.has_class_token = backbone.has_class_token
        self.linear = nn.Linear(backbone.embed_dim * (2 if self.has_class_token else 1), classes)

    def features(self, tokens: Tensor) -> Tensor:
        """``[B, N, D]`` tokens to ``[B, 2 D]`` (``[B, D]`` without a class token)."""
        tokens = self.norm(tokens)
        patches = tokens[:, self.prefix :].mean(dim=1)
        return torch.cat([tokens[:, 0], patches], dim=1) if self.has_class_token else patches

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, N, D]`` tokens to ``[B, classes]`` logits."""
        logits: Tensor = self.linear(self.features(tokens))
        return logits


class Stage(nn.Module):
    """The part of the network between two exits. Its blocks keep their numbers in the backbone, so
    that a tensor has the same name whichever stage it falls into."""

    def __init__(
        self, backbone: VisionTransformer, first: int, last: int, classes: int, *, final: bool
    ) -> None:
        super().__init__()
        self.backbone = [backbone] if first == 0 else []  # in a list: not a second owner of it
        if first == 0:
            self.patch_embed = backbone.patch_embed
        self.blocks = nn.ModuleDict({str(i): backbone.blocks[i] for i in range(first, last)})
        self.head = ExitHead(backbone, classes)
        self.exit_block = last
        self.final = final

    def tokens(self, x: Tensor) -> Tensor:
        """``uint8 [B, S, S, 3]`` (first stage) or tokens ``[B, N, D]`` to tokens ``[B, N, D]``."""
        for backbone in self.backbone:
            pixels = (x.float() - PIXEL_CENTER).permute(0, 3, 1, 2)
            x = backbone.norm_pre(backbone._pos_embed(self.patch_embed(pixels)))
        for block in self.blocks.values():
            x = block(x)
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """``(tokens, logits, top1, confidence)``, or the last three in the final stage."""
        tokens = self.tokens(x)
        logits = self.head(tokens)
        top1 = logits.argmax(dim=1).to(torch.int32)
        confidence = logits.softmax(dim=1).amax(dim=1)
        return (logits, top1, confidence) if self.final else (tokens, logits, top1, confidence)


def build_stages(
    backbone: VisionTransformer, early_exits: tuple[int, ...], classes: int
) -> nn.ModuleList:
    """Cut ``backbone`` after each block of ``early_exits`` (from 1); the final head ends the last.

    The stages share the backbone's parameters. Raises :class:`RecipeError` for an exit outside it.
    """
    depth = len(backbone.blocks)
    for block in early_exits:
        if block >= depth:
            raise RecipeError(
                f"exits.blocks holds {block}, but the backbone has {depth} blocks and its final head "
                f"is always there; use numbers from 1 to {depth - 1}"
            )
    ends = (*early_exits, depth)
    starts = (0, *early_exits)
    return nn.ModuleList(
        Stage(backbone, first, last, classes, final=last == depth)
        for first, last in zip(starts, ends, strict=True)
    ).eval()
