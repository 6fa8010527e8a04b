"""Early exits: the backbone cut into stages, each with a head that can answer."""

from __future__ import annotations

import copy

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
        self.norm = copy.deepcopy(backbone.norm)
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
        return self.classify(self.features(tokens))

    def classify(self, features: Tensor) -> Tensor:
        """``[B, 2 D]`` features to ``[B, classes]`` logits."""
        # With a dimension more the exporter writes MatMul and Add, which engines run in INT8, and
        # not Gemm, which they run in float unless its output is quantized too.
        logits: Tensor = self.linear(features[:, None])[:, 0]
        return logits


class Embedding(nn.Module):
    """Pixels to tokens: patch embedding, class and register tokens, position embedding.

    timm does the same in methods of the whole backbone; here it is a module, so that the first stage
    owns these parameters and nothing else. They are shared with the backbone, not copied.
    """

    def __init__(self, backbone: VisionTransformer) -> None:
        super().__init__()
        self.proj = backbone.patch_embed.proj
        self.norm = backbone.patch_embed.norm
        self.cls_token = backbone.cls_token
        self.reg_token = backbone.reg_token
        self.pos_embed = backbone.pos_embed
        self.positions_cover_prefix = not backbone.no_embed_class
        self.norm_pre = backbone.norm_pre

    def forward(self, images: Tensor) -> Tensor:
        """``uint8 [B, S, S, 3]`` RGB to tokens ``[B, N, D]``."""
        batch, patch = int(images.shape[0]), int(self.proj.kernel_size[0])
        # As plain numbers the sizes become constants of the exported graph, which needs no Shape.
        grid = int(images.shape[1]) // patch
        pixels = (images.float() - PIXEL_CENTER).reshape(batch, grid, patch, grid, patch, 3)
        patches = pixels.permute(0, 1, 3, 2, 4, 5).reshape(batch, grid * grid, patch * patch * 3)
        # The convolution of timm as what it is, a product: engines have INT8 kernels for products
        # that are not quantized again behind, and not for such convolutions.
        weight = self.proj.weight.permute(2, 3, 1, 0).reshape(patch * patch * 3, -1)
        x = self.norm(patches @ weight + self.proj.bias)
        prefix = [
            torch.cat([token] * batch)
            for token in (self.cls_token, self.reg_token)
            if token is not None
        ]
        if self.pos_embed is None:
            x = torch.cat([*prefix, x], dim=1)
        elif self.positions_cover_prefix:
            x = torch.cat([*prefix, x], dim=1) + self.pos_embed
        else:
            x = torch.cat([*prefix, x + self.pos_embed], dim=1)
        tokens: Tensor = self.norm_pre(x)
        return tokens


class Stage(nn.Module):
    """The part of the network between two exits. Its blocks keep their numbers in the backbone, so
    that a tensor has the same name whichever stage it falls into."""

    def __init__(
        self, backbone: VisionTransformer, first: int, last: int, classes: int, *, final: bool
    ) -> None:
        super().__init__()
        self.embedding = Embedding(backbone) if first == 0 else None
        self.blocks = nn.ModuleDict({str(i): backbone.blocks[i] for i in range(first, last)})
        self.head = ExitHead(backbone, classes)
        self.exit_block = last
        self.final = final

    def tokens(self, x: Tensor) -> Tensor:
        """``uint8 [B, S, S, 3]`` (first stage) or tokens ``[B, N, D]`` to tokens ``[B, N, D]``."""
        if self.embedding is not None:
            x = self.embedding(x)
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
) -> list[Stage]:
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
    return [
        Stage(backbone, first, last, classes, final=last == depth).eval()
        for first, last in zip(starts, ends, strict=True)
    ]
