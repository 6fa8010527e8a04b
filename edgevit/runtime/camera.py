"""Cameras: a video file, an image, a folder of images or a video device, as an iterator of frames.

    with open_camera("clip.mp4") as camera:
        for frame in camera:
            ...

A source is a generator of (picture, time); :class:`Camera` runs it in a thread of its own. Recorded
sources are decoded a few frames ahead, and every frame is handed over in order. Live sources keep
the latest frame only: a slow consumer misses frames and never lags behind.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Deque, Generator, Iterator, List, Optional, Tuple, Type, Union

import cv2
import numpy as np

from edgevit.errors import DataError
from edgevit.images import SUFFIXES, read_image

_log = logging.getLogger(__name__)

# A picture, uint8 [H, W, 3] in BGR, and its time in the source in seconds.
Picture = Tuple[np.ndarray, float]

_AHEAD = 4  # frames decoded ahead: enough to even out key frames, few enough to stay small
_WAKE_S = 0.1  # how often a waiting thread looks whether it was told to stop
_STALL_S = 5.0  # a live source silent for this long is lost
_JOIN_S = 2.0

_FFMPEG_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"


@dataclass(frozen=True, eq=False)
class Frame:
    """One picture of a camera.

    ``image_bgr`` is ``uint8 [H, W, 3]``. ``index`` counts from 0 what the source delivered: gaps are
    frames that a live camera replaced by newer ones. ``time_s`` is the position in a video, the time
    since the first frame of a live camera, and 0 for pictures. ``captured_at_s`` is on the clock of
    ``time.monotonic()``: when a live camera delivered the frame; for recordings, which do not grow
    old while they wait, when it was handed over.
    """

    image_bgr: np.ndarray
    index: int
    time_s: float
    captured_at_s: float

    @property
    def age_ms(self) -> float:
        """Milliseconds since ``captured_at_s``."""
        return (time.monotonic() - self.captured_at_s) * 1e3


class Camera:
    """Frames from a source that runs in a thread; a context manager and an iterator.

    The source's generator is closed, which releases its device, when the camera is closed, when the
    source ends and when it fails; what it raises is raised from the iterator, after the frames that
    came before.
    """

    def __init__(
        self,
        name: str,
        source: Generator[Picture, None, None],
        live: bool,
        stall_s: float = _STALL_S,
    ) -> None:
        self.name = name
        self.live = live
        self._source = source
        self._stall_s = stall_s
        self._frames: Deque[Frame] = deque(maxlen=1 if live else None)
        self._changed = threading.Condition()
        self._stopped = False
        self._ended = False
        self._error: Optional[BaseException] = None
        self._thread = threading.Thread(target=self._run, name=f"camera {name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the iterator end after the frame it handed out; safe inside a signal handler."""
        self._stopped = True  # no lock, since the interrupted thread may hold it

    def close(self) -> None:
        """Stop, and wait until the source is released."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.warning("%s: the device does not answer; it is left to itself", self.name)
        self._frames.clear()

    def __enter__(self) -> Camera:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Frame]:
        return self

    def __next__(self) -> Frame:
        silent_since_s = time.monotonic()
        with self._changed:
            while not self._frames and not self._ended and not self._stopped:
                self._changed.wait(_WAKE_S)
                if self.live and time.monotonic() - silent_since_s > self._stall_s:
                    self.stop()
                    raise DataError(
                        f"{self.name} delivered no frame for {self._stall_s:g} s; check its cable, "
                        "and that no other program uses it"
                    )
            if self._stopped:
                raise StopIteration
            if self._frames:
                frame = self._frames.popleft()
                self._changed.notify_all()
            elif self._error is not None:
                raise self._error
            else:
                raise StopIteration
        if self.live:
            return frame
        return Frame(frame.image_bgr, frame.index, frame.time_s, time.monotonic())

    def _run(self) -> None:
        try:
            for index, (image, time_s) in enumerate(self._source):
                frame = Frame(image, index, time_s, time.monotonic())
                with self._changed:
                    while not self.live and len(self._frames) >= _AHEAD and not self._stopped:
                        self._changed.wait(_WAKE_S)
                    if self._stopped:
                        return
                    self._frames.append(frame)
                    self._changed.notify_all()
        except BaseException as error:  # belongs to whoever iterates
            self._error = error
        finally:
            self._source.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def open_camera(source: Union[str, int, Path]) -> Camera:
    """Open ``source`` and start reading it.

    ``0`` or ``v4l2:///dev/video0`` is a video device, a path is a video file, an image or a folder
    of images (those in the folders below it too, in name order).

    Raises :class:`DataError` for what can't be opened. Iterating raises it for an image that is
    damaged and for a device that stops delivering. A video that ends before its announced length
    ends after its last whole frame, with a warning in the log.
    """
    text = str(source)
    device = _device_of(text)
    if device is not None:
        return Camera(device, _device_pictures(_open_device(device), device), live=True)
    if "://" in text:
        raise DataError(
            f"{text} is not a known kind of source; give a video file, an image, a folder of images, "
            "a camera index such as 0, or v4l2:///dev/video0"
        )
    path = Path(text)
    if text and path.is_dir():  # Path("") is the working directory
        return Camera(text, _image_pictures(_images_below(path)), live=False)
    if not path.is_file():
        raise DataError(f"the source {text!r} does not exist or is not a file; check its path")
    if path.suffix.lower() in SUFFIXES:
        return Camera(text, _image_pictures([path]), live=False)
    return Camera(text, _video_pictures(_open_video(path), path), live=False)


def _device_of(source: str) -> Optional[str]:
    """The device file that ``source`` means, if it means one."""
    if re.fullmatch(r"[0-9]+", source):
        return f"/dev/video{int(source)}"
    match = re.fullmatch(r"(?:v4l2://)?(/dev/video.+)", source)
    return match.group(1) if match else None


def _images_below(folder: Path) -> List[Path]:
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and path.is_file()  # not a folder, nor a pipe, whose reading would never end
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not paths:
        raise DataError(
            f"{folder} holds no images ({', '.join(SUFFIXES)}), nor do the folders below it; "
            "give another folder, or a video file"
        )
    return paths


def _image_pictures(paths: List[Path]) -> Generator[Picture, None, None]:
    for path in paths:
        yield read_image(path), 0.0


def _open_video(path: Path) -> cv2.VideoCapture:
    with _whole_packets_only():
        capture = cv2.VideoCapture(str(path))
    if not capture.isOpened():
        capture.release()
        raise DataError(
            f"{path} is not a video that OpenCV can decode, or it was cut short and lacks its index; "
            "try to play it, or copy or convert it again"
        )
    return capture


@contextlib.contextmanager
def _whole_packets_only() -> Iterator[None]:
    """Have FFmpeg leave out a packet that the file's end cuts, instead of decoding half a picture."""
    before = os.environ.get(_FFMPEG_OPTIONS)
    if before is None:
        os.environ[_FFMPEG_OPTIONS] = "fflags;discardcorrupt"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FFMPEG_OPTIONS]


def _video_pictures(capture: cv2.VideoCapture, path: Path) -> Generator[Picture, None, None]:
    try:
        fps = _finite(capture.get(cv2.CAP_PROP_FPS))
        announced = int(_finite(capture.get(cv2.CAP_PROP_FRAME_COUNT)))
        count = 0
        time_s = 0.0
        while True:
            ok, image = capture.read()
            if not ok:
                break
            position_s = _finite(capture.get(cv2.CAP_PROP_POS_MSEC)) / 1e3
            if position_s <= 0 and fps > 0:  # not every back-end knows the position
                position_s = count / fps
            time_s = max(time_s, position_s)
            count += 1
            yield image, time_s
    finally:
        capture.release()
    if not count:
        raise DataError(f"{path} holds no frame that can be decoded; convert the video again")
    # Some containers only estimate their number of frames: the clock has to agree that some lack.
    if count < announced and fps > 0 and time_s + 1.5 / fps < announced / fps:
        _log.warning(
            "%s ends after %d of the %d frames that it announces: the file is cut short",
            path,
            count,
            announced,
        )


def _finite(value: float) -> float:
    """``value``, or 0 for what a back-end does not know (negative, or not a number)."""
    return value if math.isfinite(value) and value > 0 else 0.0


def _open_device(device: str) -> cv2.VideoCapture:
    if not Path(device).exists():
        raise DataError(
            f"there is no camera {device}; plug it in, and see which there are with: ls /dev/video*"
        )
    if not os.access(device, os.R_OK | os.W_OK):
        raise DataError(
            f"no permission to use {device}; add yourself to its group with: "
            "sudo usermod -aG video $USER, then log in again"
        )
    capture = cv2.VideoCapture(device, cv2.CAP_V4L2)
    if not capture.isOpened():
        capture.release()
        raise DataError(
            f"{device} can't be opened as a camera; check that no other program uses it, and that it "
            "is a capture device: v4l2-ctl --list-devices"
        )
    # Uncompressed, a USB camera delivers a few large frames a second.
    capture.set(cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*"MJPG"))
    return capture


def _device_pictures(capture: cv2.VideoCapture, device: str) -> Generator[Picture, None, None]:
    start_s: Optional[float] = None
    try:
        while True:
            ok, image = capture.read()
            now_s = time.monotonic()
            if not ok:
                raise DataError(f"{device} stopped delivering frames; check its cable")
            start_s = now_s if start_s is None else start_s
            yield image, now_s - start_s
    finally:
        capture.release()
