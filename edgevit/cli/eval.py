"""``edgevit eval``: what a bundle is worth on labelled images, measured by the code that runs live."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, List

from edgevit.cli.arguments import add_engine

if TYPE_CHECKING:
    from edgevit.runtime.evaluate import Evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="the .evb file")
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        required=True,
        help="labelled images: one folder a class, named as the bundle's labels are",
    )
    add_engine(parser)
    parser.add_argument(
        "--skip-corrupt",
        action="store_true",
        help="leave out images that can't be read, and say how many",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def run(args: argparse.Namespace) -> int:
    from edgevit.bundle import Bundle
    from edgevit.cli.progress import progress_bars
    from edgevit.images import ImageFolder
    from edgevit.runtime.classifier import Classifier
    from edgevit.runtime.evaluate import evaluate

    bundle = Bundle.load(args.bundle)
    folder = ImageFolder.scan(args.data, bundle.labels)
    with Classifier(bundle, args.engine, args.threads) as classifier, progress_bars() as show:
        evaluation = evaluate(
            classifier,
            folder,
            args.skip_corrupt,
            lambda done, total: show("images", done, total),
        )
    print(json.dumps(evaluation.to_json()) if args.json else "\n".join(_lines(evaluation)))
    return 0


def _lines(evaluation: Evaluation) -> List[str]:
    report = evaluation.to_json()
    latency_ms = report["latency_ms"]
    lines = [
        f"top-1    {report['top1']:.4f} ({evaluation.right} of {report['n']} images)",
        f"stages   {report['mean_stages']:.2f} of {len(report['exit_counts'])} on average; "
        f"images that left at each exit: {', '.join(map(str, report['exit_counts']))}",
        f"latency  p50 {latency_ms['p50']:.2f} ms, p90 {latency_ms['p90']:.2f} ms, "
        f"p99 {latency_ms['p99']:.2f} ms on {report['engine']}",
    ]
    if report["skipped"]:
        lines.append(f"skipped  {len(report['skipped'])} that can't be read:")
        lines += [f"         {path}" for path in report["skipped"]]
    return lines
