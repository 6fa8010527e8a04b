"""Videos for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Iterable

import cv2
import numpy as np


def write_video(path: Path, frames_bgr: Iterable[np.ndarray], fps: float = 10.0) -> Path:
    """Write frames of one size; Motion JPEG, in which every frame stands alone, unless it is MP4."""
    codec = "mp4v" if path.suffix == ".mp4" else "MJPG"
    writer = None
    for frame in frames_bgr:
        if writer is None:
            height, width = frame.shape[:2]
            fourcc = cv2.VideoWriter.fourcc(*codec)
            writer = cv2.VideoWriter(str(path), fourcc, fps, (width, height))
            assert writer.isOpened()
        writer.write(frame)
    assert writer is not None
    writer.release()
    return path


def numbered(count: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """Frames that :func:`number_of` tells apart after lossy coding (at most 32)."""
    assert count <= 32
    return [np.full((height, width, 3), 8 * number, np.uint8) for number in range(count)]


def number_of(frame_bgr: np.ndarray) -> int:
    return round(float(frame_bgr.mean()) / 8)
