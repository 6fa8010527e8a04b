from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from edgevit import recipe
from edgevit.compress.backbone import (
    create_backbone,
    data_config,
    fold_normalization,
    load_backbone,
)
from edgevit.errors import ModelError

NAME = "vit_tiny_patch16_224"


def normalized(images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """What a PyTorch programmer writes before a model: to 0..1, normalise, to NCHW."""
    x = torch.from_numpy(images).float() / 255
    return ((x - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2)


def test_folding_the_normalization_changes_nothing(images: np.ndarray) -> None:
    backbone = create_backbone(NAME, 32, 16)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    with torch.inference_mode():
        before = backbone.patch_embed(normalized(images, mean, std))
    fold_normalization(backbone, mean, std)
    with torch.inference_mode():
        centred = torch.from_numpy(images).float().permute(0, 3, 1, 2) - 128
        after = backbone.patch_embed(centred)
    torch.testing.assert_close(after, before, atol=2e-5, rtol=1e-5)


def checkpoint(tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    state = {**create_backbone(NAME, 32, 16).state_dict(), **changes}
    path = tmp_path / "weights.safetensors"
    save_file({k: v.contiguous() for k, v in state.items() if v is not None}, path)
    return path


def load(path: Path, size: int = 32, patch: int = 16) -> torch.nn.Module:
    return load_backbone(recipe.Model(NAME, str(path), size, patch))


def test_weights_are_read_and_a_classifier_is_left_out(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, **{"head.weight": torch.ones(5, 192), "head.bias": torch.ones(5)})
    loaded = load(path).state_dict()
    assert set(loaded) == set(create_backbone(NAME, 32, 16).state_dict())


def test_a_constant_position_grid_stays_constant(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, pos_embed=torch.full((1, 5, 192), 0.25))
    positions = load(path, size=96).pos_embed
    torch.testing.assert_close(positions, torch.full((1, 37, 192), 0.25))


def test_a_larger_patch_embedding_answers_alike_to_enlarged_patches(tmp_path: Path) -> None:
    """The property that defines FlexiViT's resize: <w', resize(x)> = <w, x> for every patch x."""
    path = checkpoint(tmp_path)
    small, large = load(path), load(path, size=64, patch=32)
    x = torch.randn(5, 3, 16, 16)
    enlarged = functional.interpolate(x, size=32, mode="bicubic", antialias=True)
    torch.testing.assert_close(
        large.patch_embed.proj(enlarged), small.patch_embed.proj(x), atol=1e-4, rtol=1e-3
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm.weight": None}, "missing: norm.weight"),
        ({"surprise": torch.ones(3)}, "unknown: surprise"),
        ({"blocks.0.norm1.weight": torch.ones(7)}, "shape of blocks.0.norm1.weight"),
        ({"norm.bias": torch.full((192,), float("nan"))}, "not finite: norm.bias"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        load(checkpoint(tmp_path, **changes))


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("/tmp/edgevit-pickle-ran"),))


def test_a_pickle_that_holds_code_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = Path("/tmp/edgevit-pickle-ran")
    marker.unlink(missing_ok=True)
    path = tmp_path / "weights.pt"
    torch.save({"norm.weight": torch.ones(3), "x": Payload()}, path)
    with pytest.raises(ModelError, match="more than plain tensors"):
        load(path)
    path.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ModelError):
        load(path)
    assert not marker.exists()


def test_plain_tensors_in_a_pt_file_are_read_with_or_without_a_wrapper(tmp_path: Path) -> None:
    state = create_backbone(NAME, 32, 16).state_dict()
    for value in (state, {"state_dict": state, "epoch": 3}, {"model": state}):
        torch.save(value, tmp_path / "weights.pt")
        loaded = load(tmp_path / "weights.pt").state_dict()
        torch.testing.assert_close(loaded["norm.weight"], state["norm.weight"])


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(b"not weights at all")
    with pytest.raises(ModelError, match="weights"):
        load(path)
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "absent.safetensors")


def test_models_that_do_not_exist_or_are_no_vit_are_refused() -> None:
    with pytest.raises(ModelError, match="similar"):
        create_backbone("vit_tiny_patch17", 32, 16)
    with pytest.raises(ModelError, match="not a timm VisionTransformer"):
        create_backbone("resnet18", 32, 16)


def test_normalization_comes_from_the_weights() -> None:
    clip = create_backbone("vit_base_patch16_clip_224", 32, 16)
    assert data_config(clip)[0] == pytest.approx((0.48145466, 0.4578275, 0.40821073))
