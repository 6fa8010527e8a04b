"""Sinks: where the live loop's results go."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Deque, Optional, Protocol, TextIO

from edgevit.runtime.camera import Frame
from edgevit.runtime.classifier import Result
from edgevit.runtime.meter import Meter

_REFRESH_S = 0.1
_FPS_FRAMES = 30


class Sink(Protocol):
    """Takes each result, with the frame it is about. What it raises makes the loop drop it."""

    def write(self, result: Result, frame: Frame) -> None: ...

    def close(self) -> None:
        """Called once, whatever happened."""


class JsonLinesSink:
    """One JSON object a line and a frame, flushed at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, result: Result, frame: Frame) -> None:
        line = json.dumps(
            {
                "frame": int(result.frame),
                "time_s": round(float(result.time_s), 6),
                "label": str(result.label),
                "score": float(result.score),
                "exit": int(result.exit),
                "latency_ms": round(float(result.latency_ms), 3),
                "age_ms": round(float(result.age_ms), 3),
            },
            allow_nan=False,  # NaN is not JSON
        )
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class LinesSink:
    """One plain line a frame, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, result: Result, frame: Frame) -> None:
        self._stream.write(
            f"frame {result.frame}  {result.time_s:.2f} s  {_describe(result)}  "
            f"{result.latency_ms:.1f} ms\n"
        )
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class ViewSink:
    """One view that updates in place, drawn with rich; for a terminal."""

    def __init__(self, stream: TextIO, meter: Optional[Meter] = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=stream), auto_refresh=False)
        self._live.start()
        self._meter = meter
        self._latest: Optional[Result] = None
        self._shown_at_s = 0.0
        self._times_s: Deque[float] = deque(maxlen=_FPS_FRAMES)

    def write(self, result: Result, frame: Frame) -> None:
        now_s = time.monotonic()
        self._times_s.append(now_s)
        self._latest = result
        if now_s - self._shown_at_s >= _REFRESH_S:
            self._shown_at_s = now_s
            self._draw(result)

    def _draw(self, result: Result) -> None:
        from rich.text import Text

        span_s = self._times_s[-1] - self._times_s[0]
        fps = f"{(len(self._times_s) - 1) / span_s:.1f}" if span_s > 0 else "-"
        view = Text()
        view.append(result.label, style="bold")
        view.append(
            f"  {result.score:.2f}  exit {result.exit}\n"
            f"frame {result.frame}  {fps} fps  latency {result.latency_ms:.1f} ms  "
            f"age {result.age_ms:.1f} ms",
        )
        usage = _usage(self._meter) if self._meter is not None else ""
        if usage:
            view.append(f"\n{usage}")
        self._live.update(view, refresh=True)

    def close(self) -> None:
        if self._latest is not None:
            self._draw(self._latest)
        self._live.stop()


def terminal_sink(stream: TextIO, meter: Optional[Meter] = None) -> Sink:
    """A view that updates in place where ``stream`` is a terminal and rich is installed, else lines."""
    if stream.isatty():
        try:
            return ViewSink(stream, meter)
        except ImportError:  # a device without rich
            pass
    return LinesSink(stream)


def _usage(meter: Meter) -> str:
    """What is measured now, on one line; what is not measured is left out."""
    reading, energy = meter.read(), meter.recent_energy()
    parts = []
    if reading.power_mw is not None:
        parts.append(f"power {reading.power_mw / 1000:.2f} W")
    if energy is not None and energy.energy_mj_per_frame is not None:
        parts.append(f"{energy.energy_mj_per_frame:.1f} mJ/frame")
    if reading.ram_used_bytes is not None:
        parts.append(f"memory {reading.ram_used_bytes / 2**30:.1f} GiB")
    if reading.temperature_c is not None:
        parts.append(f"{reading.temperature_c:.1f} °C")
    return "  ".join(parts)


def _describe(result: Result) -> str:
    return f"{result.label}  {result.score:.2f}  exit {result.exit}"
