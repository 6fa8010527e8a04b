"""``edgevit run``: classify a video, images or a camera, live."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, List, Optional

from edgevit.cli.arguments import add_engine, at_least

if TYPE_CHECKING:
    from edgevit.runtime.live import LiveSummary
    from edgevit.runtime.meter import Energy, Reading

# What shells report for a program that Ctrl-C ended. SIGTERM is how a service is stopped: success.
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="the .evb file")
    parser.add_argument(
        "--source",
        metavar="S",
        required=True,
        help="a video file, an image, a folder of images, a camera index such as 0, "
        "or v4l2:///dev/video0",
    )
    parser.add_argument(
        "--frames", metavar="N", type=at_least(1), help="stop after N frames (default: at the end)"
    )
    parser.add_argument(
        "--json-lines",
        action="store_true",
        help="one JSON object a frame on standard output, and nothing else there",
    )
    parser.add_argument(
        "--idle",
        metavar="S",
        type=at_least(2),
        help="first measure the idle power for S seconds, for the energy per frame above idle",
    )
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    # OpenCV and its FFmpeg print about what they can't open; our own message says it better.
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    from edgevit.runtime.camera import open_camera
    from edgevit.runtime.classifier import Classifier
    from edgevit.runtime.live import run_live
    from edgevit.runtime.meter import open_meter
    from edgevit.runtime.sinks import JsonLinesSink, terminal_sink

    with open_meter() as meter:
        idle_power_mw = meter.measure_idle(args.idle) if args.idle else None
        with Classifier.load(
            args.bundle, engine=args.engine, threads=args.threads
        ) as classifier, open_camera(args.source) as camera:
            sink = (
                JsonLinesSink(sys.stdout) if args.json_lines else terminal_sink(sys.stdout, meter)
            )
            summary = run_live(camera, classifier, [sink], args.frames, meter)
        lines = _lines(summary, classifier.engine)
        lines += usage_lines(meter.read(), meter.energy(), idle_power_mw)
    print("\n".join(lines), file=sys.stderr)
    if summary.failed_sinks:
        # What could not be written is still in the buffer; without this Python tries once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return _INTERRUPTED if summary.stopped_by == "SIGINT" else 0


def _lines(summary: LiveSummary, engine: str) -> List[str]:
    reason = {
        "end": "the source ended",
        "frames": "as many as asked for",
        "sinks": "standard output can't be written to any more",
        "SIGINT": "interrupted",
        "SIGTERM": "told to stop",
    }[summary.stopped_by]
    frames = "1 frame" if summary.frames == 1 else f"{summary.frames} frames"
    lines = [f"{frames} in {summary.seconds:.1f} s, {summary.fps:.1f} fps ({reason})"]
    if summary.latency_ms is not None:
        lines.append(
            f"Stages run: {summary.mean_stages:.2f} on average; latency on {engine} "
            f"p50 {summary.latency_ms.p50:.1f} ms, p90 {summary.latency_ms.p90:.1f} ms, "
            f"p99 {summary.latency_ms.p99:.1f} ms"
        )
    return lines


def usage_lines(
    reading: Reading, energy: Optional[Energy], idle_power_mw: Optional[float]
) -> List[str]:
    """Power, memory and temperature for people; of what was not measured, why."""
    lines = [_power(reading, energy, idle_power_mw)]
    if reading.ram_used_bytes is not None and reading.ram_total_bytes is not None:
        used, total = reading.ram_used_bytes / 2**30, reading.ram_total_bytes / 2**30
        lines.append(f"Memory: {used:.1f} of {total:.1f} GiB in use on the whole machine")
    else:
        lines.append(f"Memory: not measured ({reading.absent.get('ram_used_bytes', 'no reason')})")
    if reading.temperature_c is not None:
        place = reading.points.get("temperature_c", "chip")
        held_down = ", clocks held down by heat" if reading.throttled else ""
        lines.append(f"Temperature: {reading.temperature_c:.1f} °C ({place}){held_down}")
    else:
        lines.append(
            f"Temperature: not measured ({reading.absent.get('temperature_c', 'no reason')})"
        )
    lines += [f"Power rail left out: {rail}" for rail in reading.dropped]
    return lines


def _power(reading: Reading, energy: Optional[Energy], idle_power_mw: Optional[float]) -> str:
    if reading.power_mw is None:
        return f"Power: not measured ({reading.absent.get('power_mw', 'no reason')})"
    where = f"at {reading.points['power_mw']}, from {reading.sources['power_mw']}"
    if reading.power_mode is not None:
        where += f", power mode {reading.power_mode}"
    if reading.jetson_clocks is not None:
        where += f", jetson_clocks {'on' if reading.jetson_clocks else 'off'}"
    if energy is None or energy.energy_mj_per_frame is None:
        return (
            f"Power: {reading.power_mw:.0f} mW {where}; "
            "no energy per frame: power was measured for less than 2 s"
        )
    line = (
        f"Power: {energy.mean_power_mw:.0f} mW {where}; {energy.energy_mj_per_frame:.2f} mJ a frame"
    )
    if energy.marginal_energy_mj_per_frame is not None:
        line += (
            f", {energy.marginal_energy_mj_per_frame:.2f} mJ above the idle {idle_power_mw:.0f} mW"
        )
    return line
