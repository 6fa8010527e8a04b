"""The live loop: camera, classifier, sinks."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from dataclasses import dataclass, replace
from types import FrameType
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from edgevit.runtime.camera import Camera, Frame
from edgevit.runtime.classifier import Result
from edgevit.runtime.meter import Meter
from edgevit.runtime.sinks import Sink

_log = logging.getLogger(__name__)

# Percentiles are over this many latest frames, so that a loop which runs for months does not grow.
_LATENCIES = 65_536


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class LiveSummary:
    """What a run did.

    ``fps`` is frames over the loop's whole time. ``mean_stages`` and ``latency_ms`` are None without
    frames; the latter covers the latest 65,536. ``stopped_by`` is ``end`` (of the source),
    ``frames`` (the number asked for), ``sinks`` (none could be written to), ``SIGINT`` or
    ``SIGTERM``. ``failed_sinks`` says what each sink that was dropped raised.
    """

    frames: int
    seconds: float
    fps: float
    mean_stages: Optional[float]
    latency_ms: Optional[Percentiles]
    stopped_by: str
    failed_sinks: Tuple[str, ...]


def run_live(
    camera: Camera,
    classify: Callable[[np.ndarray], Result],
    sinks: Sequence[Sink] = (),
    max_frames: Optional[int] = None,
    meter: Optional[Meter] = None,
) -> LiveSummary:
    """Classify the camera's frames and hand each result to the sinks, until something ends it.

    On SIGINT and SIGTERM (when called from the main thread) the frame in hand is finished; a second
    signal does what it does without edgevit. The sinks are closed on every way out; the camera is the
    caller's to close, and so is the meter, which counts the frames for the energy per frame.

    A sink that raises is dropped, with a warning; without any left the loop ends. Errors of the
    camera and the classifier are raised.
    """
    working: List[Sink] = list(sinks)
    failed: List[str] = []
    figures = _Figures()
    try:
        with _stop_on_signals(camera) as signals:
            for frame in camera:
                result = _classify(classify, frame)
                figures.add(result)
                if meter is not None:
                    meter.add_frame()
                failed += _hand_over(result, frame, working)
                if sinks and not working:
                    return figures.summary("sinks", failed)
                if figures.frames == max_frames:
                    return figures.summary("frames", failed)
            return figures.summary(signals[0] if signals else "end", failed)
    finally:
        for sink in working:
            _close(sink)


def _classify(classify: Callable[[np.ndarray], Result], frame: Frame) -> Result:
    result = classify(frame.image_bgr)
    return replace(result, frame=frame.index, time_s=frame.time_s, age_ms=frame.age_ms)


def _hand_over(result: Result, frame: Frame, working: List[Sink]) -> List[str]:
    """Write to every sink; those that raise leave ``working`` and what they raised is returned."""
    failed: List[str] = []
    for sink in tuple(working):
        try:
            sink.write(result, frame)
        except Exception as error:
            working.remove(sink)
            _close(sink)
            failed.append(f"{type(sink).__name__}: {error!r}")
            if not isinstance(error, BrokenPipeError):  # the reader left, as `head` does
                _log.warning("%s is dropped: %s", type(sink).__name__, error)
    return failed


def _close(sink: Sink) -> None:
    # Close flushes, which raises again what a write raised; the other sinks must still be closed.
    with contextlib.suppress(Exception):
        sink.close()


@contextlib.contextmanager
def _stop_on_signals(camera: Camera) -> Iterator[List[str]]:
    """While inside, SIGINT and SIGTERM stop the camera; yields a list that gets the signal's name."""
    received: List[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may handle signals
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def stop(number: int, interrupted: Optional[FrameType]) -> None:
        received.append(signal.Signals(number).name)
        camera.stop()
        restore()  # so that a second Ctrl-C gets through whatever hangs

    for number in previous:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        restore()


class _Figures:
    """Running figures of a loop."""

    def __init__(self) -> None:
        self.frames = 0
        self._stages = 0
        self._latencies_ms = np.zeros(_LATENCIES)
        self._start_s = time.monotonic()

    def add(self, result: Result) -> None:
        self._latencies_ms[self.frames % _LATENCIES] = result.latency_ms
        self._stages += result.exit
        self.frames += 1

    def summary(self, stopped_by: str, failed: Sequence[str]) -> LiveSummary:
        seconds = time.monotonic() - self._start_s
        latencies_ms = self._latencies_ms[: self.frames]
        return LiveSummary(
            frames=self.frames,
            seconds=seconds,
            fps=self.frames / seconds if seconds > 0 else 0.0,
            mean_stages=self._stages / self.frames if self.frames else None,
            latency_ms=(
                Percentiles(*(float(v) for v in np.percentile(latencies_ms, (50, 90, 99))))
                if self.frames
                else None
            ),
            stopped_by=stopped_by,
            failed_sinks=tuple(failed),
        )
