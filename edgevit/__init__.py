"""edgevit: Vision Transformers on NVIDIA Jetson, from checkpoint to live camera, with true figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Classifier", "Result", "__version__"]

if TYPE_CHECKING:
    from edgevit.runtime.classifier import Classifier, Result


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `edgevit --help` does not wait for OpenCV.
    if name in ("Classifier", "Result"):
        from edgevit.runtime import classifier

        return getattr(classifier, name)
    raise AttributeError(f"module 'edgevit' has no attribute {name!r}")
