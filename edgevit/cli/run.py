"""``edgevit run``: classify a video, images or a camera, live."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, List

from edgevit.cli.arguments import add_engine, at_least

if TYPE_CHECKING:
    from edgevit.runtime.live import LiveSummary

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
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    # OpenCV and its FFmpeg print about what they can't open; our own message says it better.
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    from edgevit.runtime.camera import open_camera
    from edgevit.runtime.classifier import Classifier
    from edgevit.runtime.live import run_live
    from edgevit.runtime.sinks import JsonLinesSink, terminal_sink

    with Classifier.load(
        args.bundle, engine=args.engine, threads=args.threads
    ) as classifier, open_camera(args.source) as camera:
        sink = JsonLinesSink(sys.stdout) if args.json_lines else terminal_sink(sys.stdout)
        summary = run_live(camera, classifier, [sink], args.frames)
    print("\n".join(_lines(summary, classifier.engine)), file=sys.stderr)
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
