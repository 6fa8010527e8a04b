"""The one preprocessing: training, calibration, evaluation and the camera all call it.

Its output is ``uint8 [size, size, 3]`` in RGB. Normalisation (mean, standard deviation) belongs to
the specification but is computed inside the graph, so that the host moves bytes, not floats.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Dict, Tuple

import cv2
import numpy as np

from edgevit.errors import BundleError, DataError

# Raised when the pixels that Preprocess makes change: old bundles then refuse to run with new code.
_ALGORITHM = "opencv-crop-resize/1"


@dataclass(frozen=True)
class Preprocess:
    """What happens to a frame before the model sees it.

    >>> spec = Preprocess(size=192)
    >>> spec(np.zeros((480, 640, 3), np.uint8)).shape
    (192, 192, 3)
    """

    size: int
    crop: str = "center"
    mean: Tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: Tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __call__(self, frame_bgr: np.ndarray) -> np.ndarray:
        """``uint8 [H, W, 3]`` BGR, any size of at least one pixel, to ``uint8 [size, size, 3]`` RGB.

        ``center`` keeps the middle square, ``squash`` keeps everything and changes the aspect.
        Shrinking averages over areas (no aliasing), enlarging is bilinear.
        """
        if frame_bgr.dtype != np.uint8 or frame_bgr.ndim != 3 or frame_bgr.shape[2] != 3:
            raise DataError(
                f"a frame must be uint8 [height, width, 3] in BGR, not {frame_bgr.dtype} "
                f"{list(frame_bgr.shape)}"
            )
        height, width = frame_bgr.shape[:2]
        if not height or not width:
            raise DataError("a frame must have at least one pixel")
        if self.crop == "center":
            side = min(height, width)
            top, left = (height - side) // 2, (width - side) // 2
            frame_bgr = frame_bgr[top : top + side, left : left + side]
            height = width = side
        shrunk = (min(width, self.size), min(height, self.size))
        if shrunk != (width, height):
            # Area averaging is only that where no axis grows, hence two steps for a squash of both.
            frame_bgr = cv2.resize(frame_bgr, shrunk, interpolation=cv2.INTER_AREA)
        if shrunk != (self.size, self.size):
            frame_bgr = cv2.resize(
                frame_bgr, (self.size, self.size), interpolation=cv2.INTER_LINEAR
            )
        return cv2.cvtColor(frame_bgr, cv2.COLOR_BGR2RGB)

    @property
    def hash(self) -> str:
        """Identifies these pixels: equal hashes mean equal preprocessing."""
        canonical = json.dumps({"algorithm": _ALGORITHM, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_json(self) -> Dict[str, Any]:
        return {**asdict(self), "hash": self.hash}

    @classmethod
    def from_json(cls, value: Any) -> Preprocess:
        """Read a specification; raises :class:`BundleError` if its hash is not this code's."""
        try:
            spec = cls(
                size=_whole(value["size"]),
                crop={"center": "center", "squash": "squash"}[value["crop"]],
                mean=_triple(value["mean"]),
                std=_triple(value["std"]),
            )
            recorded = value["hash"]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BundleError(
                f"manifest: 'preprocess' is not a preprocessing specification ({error!r}); "
                "make the bundle again"
            ) from None
        if recorded != spec.hash:
            raise BundleError(
                f"manifest: the bundle was made with another preprocessing ({str(recorded)[:12]}) than "
                f"this version of edgevit has ({spec.hash[:12]}); its accuracy would not hold: "
                "make the bundle again, or install the version that made it"
            )
        return spec


def _whole(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 4096:
        raise ValueError(f"size {value!r} is not a whole number from 1 to 4096")
    return value


def _triple(value: Any) -> Tuple[float, float, float]:
    if not isinstance(value, (list, tuple)) or not all(type(v) in (int, float) for v in value):
        raise ValueError(f"{value!r} is not a list of numbers")
    red, green, blue = (float(v) for v in value)
    if not all(math.isfinite(v) for v in (red, green, blue)):
        raise ValueError(f"{value!r} is not finite")
    return red, green, blue
