"""``edgevit bench``: how much faster a bundle is than its backbone in eager PyTorch."""

from __future__ import annotations

import argparse
import json
from typing import Any, Dict, List, Optional

_STATISTICS = ("typical", "mean", "p50", "p90", "p99")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="the .evb file")
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="images to measure with, in FOLDER and below; default: the bundle's check images",
    )
    parser.add_argument(
        "--engine", default="auto", help="auto, openvino or onnxruntime (default: auto)"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads of both sides; 0: all cores (default)"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds of both sides in turn (default: 7)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def run(args: argparse.Namespace) -> int:
    from edgevit.bundle import Bundle
    from edgevit.cli.progress import progress_bars
    from edgevit.report.benchmark import bench, load_frames

    images = load_frames(Bundle.load(args.bundle), args.data) if args.data else None
    with progress_bars() as show:
        benchmark = bench(
            args.bundle,
            images,
            args.engine,
            args.threads,
            args.rounds,
            lambda done, total: show("turns measured", done, total),
        )
    report = benchmark.to_json()
    print(json.dumps(report, indent=2) if args.json else "\n".join(_lines(report)))
    return 0


def _lines(report: Dict[str, Any]) -> List[str]:
    machine, bundle, baseline = report["machine"], report["bundle"], report["baseline"]
    shares = ", ".join(f"{100 * share:.0f} %" for share in bundle["exit_share"])
    lines = [
        f"{machine['cpu_model']} ({' '.join(machine['cpu_flags'])}), {report['threads']} threads, "
        f"{report['frames']} frames, load {machine['load_1min']} before the start",
        "",
        f"{'latency, ms':<28}"
        + "".join(f"{name:>9}" for name in _STATISTICS)
        + f"{'peak memory':>14}",
    ]
    if baseline is not None:
        lines.append(_row(baseline["name"], baseline))
    lines += [
        _row(f"bundle ({bundle['engine']})", bundle),
        "",
        f"Stages run: {bundle['mean_stages']:.2f} of {len(bundle['exit_share'])} on average; "
        f"frames that leave at each exit: {shares}",
        _speedup(report),
    ]
    return lines


def _row(name: str, side: Dict[str, Any]) -> str:
    figures = "".join(f"{side[f'latency_ms_{key}']:>9.2f}" for key in _STATISTICS)
    return f"{name:<28}{figures}{_megabytes(side['peak_memory_bytes']):>14}"


def _megabytes(size: Optional[int]) -> str:
    return "unknown" if size is None else f"{size / 1e6:.0f} MB"


def _speedup(report: Dict[str, Any]) -> str:
    typical = report["speedup"]
    if typical is None:
        return str(report["baseline_reason"])
    return (
        f"{typical['median']:.1f} times faster by typical latency (median by exit, weighted by share), "
        f"{typical['min']:.1f} to {typical['max']:.1f} by round; "
        f"{report['speedup_mean']['median']:.1f} times by mean, "
        f"{report['speedup_p50']['median']:.1f} by median"
    )
