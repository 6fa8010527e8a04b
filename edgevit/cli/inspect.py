"""``edgevit inspect``: check a bundle and show what is in it. Needs no engine."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, Dict, List

if TYPE_CHECKING:
    from edgevit.bundle import Bundle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="the .evb file")
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def run(args: argparse.Namespace) -> int:
    from edgevit.bundle import Bundle

    found = describe(Bundle.load(args.bundle))
    print(json.dumps(found, indent=2) if args.json else "\n".join(_lines(found)))
    return 0


def describe(bundle: Bundle) -> Dict[str, Any]:
    """What a verified bundle says about itself, as JSON values. ``calibration`` is None for float."""
    files, manifest = bundle.manifest["files"], bundle.manifest
    return {
        "path": str(bundle.path),
        "name": bundle.name,
        "created_by": manifest.get("created_by"),
        "size_bytes": bundle.path.stat().st_size,
        # Loading has checked them all: a bundle with a wrong one does not get here.
        "files_verified": len(files),
        "over_budget": manifest.get("over_budget") is True,
        "model": manifest.get("model"),
        "labels": list(bundle.labels),
        "stages": [
            {
                "file": stage.file,
                "exit_block": stage.exit_block,
                "precision": stage.precision,
                "macs": stage.macs,
                "bytes": files[stage.file]["bytes"],
            }
            for stage in bundle.stages
        ],
        "policy": bundle.policy.to_json(),
        "preprocess": bundle.preprocess.to_json(),
        "check_images": len(bundle.check_images),
        "calibration": manifest.get("calibration"),
    }


def _lines(found: Dict[str, Any]) -> List[str]:
    spec = found["preprocess"]
    thresholds = found["policy"]["thresholds"]
    rows = [
        ("bundle", f"{found['path']} ({found['size_bytes'] / 1e6:.1f} MB)"),
        ("name", found["name"]),
        ("made by", str(found["created_by"])),
        ("files", f"{found['files_verified']}, every hash is right"),
        ("model", _plain(found["model"], "name", "image_size", "patch_size")),
        ("labels", f"{len(found['labels'])}: {', '.join(found['labels'])}"),
        ("input", f"{spec['size']} x {spec['size']}, {spec['crop']}, hash {spec['hash'][:12]}"),
        ("check images", str(found["check_images"])),
        ("calibration", _plain(found["calibration"], "calibrator", "images", "tensors")),
    ]
    if found["over_budget"]:
        rows.append(("OVER BUDGET", "it loses more accuracy than its recipe allows"))
    lines = [f"{name:<14}{value}" for name, value in rows]
    lines += ["", f"{'stage':<20}{'block':>6}{'precision':>11}{'MMACs':>9}{'MB':>8}  leaves at"]
    for number, stage in enumerate(found["stages"]):
        leaves = "always" if number == len(thresholds) else _threshold(thresholds[number])
        lines.append(
            f"{stage['file']:<20}{stage['exit_block']:>6}{stage['precision']:>11}"
            f"{stage['macs'] / 1e6:>9.0f}{stage['bytes'] / 1e6:>8.1f}  {leaves}"
        )
    return lines


def _threshold(threshold: float) -> str:
    # A softmax confidence does not exceed 1.
    return "never" if threshold > 1 else f"confidence {threshold:.4f}"


def _plain(part: Any, *keys: str) -> str:
    """Keys of a part of the manifest that edgevit does not need to run, and so does not check."""
    if not isinstance(part, dict):
        return "none"
    return ", ".join(f"{key.replace('_', ' ')} {part[key]}" for key in keys if key in part)
