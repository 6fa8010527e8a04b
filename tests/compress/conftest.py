from __future__ import annotations

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from edgevit.compress.backbone import create_backbone, data_config, fold_normalization

SIZE = 32


@pytest.fixture(scope="session")
def images() -> np.ndarray:
    """Eight random pictures, ``uint8 [8, 32, 32, 3]``."""
    return np.random.default_rng(0).integers(0, 256, (8, SIZE, SIZE, 3), np.uint8)


@pytest.fixture
def backbone() -> VisionTransformer:
    """A folded ViT-Ti of random weights at 32 pixels: 4 patches and a class token."""
    torch.manual_seed(0)
    model = create_backbone("vit_tiny_patch16_224", SIZE, 16)
    fold_normalization(model, *data_config(model))
    return model
