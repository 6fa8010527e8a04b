"""The backbone: a timm VisionTransformer at the recipe's size, with the recipe's weights."""

from __future__ import annotations

import difflib
import pickle
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from edgevit import recipe
from edgevit.errors import ModelError

# The middle of a uint8 pixel. Pixels minus this are whole numbers from -128 to 127: exactly what
# INT8 holds with scale 1, so that quantizing the input loses nothing.
PIXEL_CENTER = 128.0
# Faults of each kind that a message about a checkpoint lists.
_SHOWN_FAULTS = 10


def create_backbone(name: str, image_size: int, patch_size: int) -> VisionTransformer:
    """The architecture without a classifier and with random weights; raises :class:`ModelError`."""
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), 5)
        raise ModelError(f"timm has no model '{name}'; similar: {', '.join(close) or 'none'}")
    try:
        backbone = timm.create_model(
            name, pretrained=False, img_size=image_size, patch_size=patch_size, num_classes=0
        )
    except TypeError:
        backbone = None  # a family that is not built from a size and a patch size
    if not isinstance(backbone, VisionTransformer) or backbone.attn_pool is not None:
        raise ModelError(
            f"'{name}' is not a timm VisionTransformer with token outputs; choose a vit_*, deit_* or CLIP model"
        )
    return backbone.eval().requires_grad_(False)


def load_backbone(model: recipe.Model) -> VisionTransformer:
    """The backbone with its weights in float32, ready for ``uint8``-range input.

    The position embedding is resampled to the grid of ``image_size``, and a patch embedding of
    another size is resized with FlexiViT's pseudo-inverse (arXiv 2212.08013). Raises
    :class:`ModelError` for weights that do not fit, with the keys that are unknown or missing.
    """
    backbone = create_backbone(model.name, model.image_size, model.patch_size)
    if not model.checkpoint:
        return _with_timm_weights(backbone, model)
    path = Path(model.checkpoint)
    state = _read_checkpoint(path)
    try:
        state = checkpoint_filter_fn(state, backbone)
    except (KeyError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
        raise ModelError(f"{path} does not fit '{model.name}': {error}") from None
    # A classifier of other classes is no part of the backbone: the exits bring their own heads.
    state = {k: v.float() for k, v in state.items() if not k.startswith(("head.", "head_dist."))}
    _check_fit(backbone, state, path, model.name)
    backbone.load_state_dict(state, strict=True)
    return backbone


def data_config(backbone: VisionTransformer) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel (RGB, pixels in 0 to 1) that the weights expect."""
    config: Any = backbone.pretrained_cfg
    return tuple(config["mean"]), tuple(config["std"])


def fold_normalization(
    backbone: VisionTransformer, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    """Move the normalisation into the patch embedding, exactly and in place.

    Before: ``proj((pixels / 255 - mean) / std)``. After: ``proj(pixels - PIXEL_CENTER)``, with
    ``weight' = weight / (255 std)`` and the constant part added to the bias. The embedding does not
    pad, so that the identity holds at the border too.
    """
    proj = backbone.patch_embed.proj
    mean_t = torch.tensor(mean, dtype=torch.float64)
    std_t = torch.tensor(std, dtype=torch.float64)
    weight = proj.weight.data.double()
    shift = (PIXEL_CENTER / 255.0 - mean_t) / std_t
    constant = torch.einsum("ochw,c->o", weight, shift)
    bias = torch.zeros(weight.shape[0]).double() if proj.bias is None else proj.bias.data.double()
    proj.weight.data = (weight / (255.0 * std_t).view(1, -1, 1, 1)).float()
    proj.bias = torch.nn.Parameter((bias + constant).float(), requires_grad=False)


def _with_timm_weights(backbone: VisionTransformer, model: recipe.Model) -> VisionTransformer:
    try:
        loaded = timm.create_model(
            model.name,
            pretrained=True,
            img_size=model.image_size,
            patch_size=model.patch_size,
            num_classes=0,
        )
    except Exception as error:  # the hub's client raises many kinds, none of them documented
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"timm could not download weights for '{model.name}' ({reason}); "
            "set model.checkpoint to a .safetensors file"
        ) from None
    backbone.load_state_dict(loaded.state_dict())
    return backbone


def _read_checkpoint(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"the checkpoint {path} does not exist; correct model.checkpoint")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        elif path.suffix in (".pt", ".pth", ".bin"):
            state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            raise ModelError(f"{path}: a checkpoint is a .safetensors, .pt or .pth file")
    except pickle.UnpicklingError:
        raise ModelError(
            f"{path} holds more than plain tensors, which can run code when it is read; "
            "save its state_dict as .safetensors"
        ) from None
    except ModelError:
        raise
    except Exception as error:  # damaged files raise whatever their reader trips over
        raise ModelError(f"{path} is damaged or not a checkpoint ({error})") from None
    for wrapper in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    tensors = isinstance(state, dict) and all(isinstance(v, torch.Tensor) for v in state.values())
    if not tensors or not state:
        raise ModelError(f"{path} is not a state dict of tensors; save model.state_dict()")
    return {str(key): value for key, value in state.items()}


def _check_fit(
    backbone: VisionTransformer, state: dict[str, torch.Tensor], path: Path, name: str
) -> None:
    wanted = backbone.state_dict()
    kinds = [
        [f"unknown: {key}" for key in state if key not in wanted],
        [f"missing: {key}" for key in wanted if key not in state],
        [
            f"shape of {key}: {list(state[key].shape)} in the file, {list(wanted[key].shape)} in the model"
            for key in wanted
            if key in state and state[key].shape != wanted[key].shape
        ],
        [f"not finite: {key}" for key in state if not bool(torch.isfinite(state[key]).all())],
    ]
    # Some of each kind: one that comes in hundreds must not hide the others.
    shown = [fault for faults in kinds for fault in faults[:_SHOWN_FAULTS]]
    if shown:
        more = sum(map(len, kinds)) - len(shown)
        rest = f"; and {more} more" if more else ""
        raise ModelError(f"{path} does not fit '{name}': {'; '.join(shown)}{rest}")
