"""``edgevit compress``: from a recipe to a bundle and its report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a .toml recipe")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run's folder")
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="change one key of the recipe; may be given again",
    )
    parser.add_argument(
        "--allow-over-budget",
        action="store_true",
        help="write the bundle even if it loses more accuracy than budget.max_drop_points",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    from edgevit.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    try:
        from edgevit import pipeline
    except ImportError as error:
        from edgevit.errors import UserError

        raise UserError(
            f"'{error.name}' is not installed; compressing needs: pip install 'edgevit[workstation]'"
        ) from None
    from edgevit.cli.progress import progress_bars

    with progress_bars() as progress:
        outcome = pipeline.compress(
            recipe,
            args.out,
            resume=args.resume,
            allow_over_budget=args.allow_over_budget,
            progress=progress,
        )
    if args.json:
        print(json.dumps(outcome.report))
    else:
        print("\n".join(summary(outcome.report)))
        print(f"bundle  {outcome.bundle}")
        print(f"report  {outcome.report_html}")
    return 0


def interrupted(args: argparse.Namespace) -> str:
    """What Ctrl-C leaves."""
    return f"finished steps are kept in {args.out}; add --resume to go on"


def summary(report: dict[str, Any]) -> list[str]:
    """The report in a few lines for a terminal."""
    found, baseline = report["bundle"], report["float"]
    size = report["size_bytes"]
    lines = [
        f"top-1   {found['top1']:.4f} (float {baseline['top1']:.4f}, drop {report['drop_points']:.2f} points, "
        f"{found['n']} images)",
        f"stages  {found['mean_stages']:.2f} of {len(found['exit_counts'])} on average; "
        f"frames per exit: {found['exit_counts']}",
    ]
    if report["speedup"] is not None:
        lines.append(
            f"speed   {report['speedup']:.2f} times {report['benchmark']['baseline']['name']} "
            f"(engine {found['engine']})"
        )
    skipped = len(report["data"]["skipped"])
    if skipped:
        lines.append(f"skipped {skipped} image{'s' * (skipped > 1)} that can't be read")
    if report["data"]["lone_classes"]:
        lines.append(
            f"warning one training image for {', '.join(report['data']['lone_classes'])}: the exits were "
            "not judged on these classes; add images"
        )
    if report["data"]["val_in_train"]:
        lines.append(
            f"warning {report['data']['val_in_train']} validation images are also in data.train, so these "
            "accuracies are too good; remove them from one of the two"
        )
    lines.append(f"size    {size['bundle'] / 1e6:.1f} MB (float {size['float'] / 1e6:.1f} MB)")
    return lines
