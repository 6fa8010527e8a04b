"""``report.html``: what ``report.json`` says, as one page that needs nothing beside it.

No scripts, no fonts, no pictures from elsewhere: the file can be mailed, printed and opened offline.
Everything in the report is escaped, because class names and recipes are other people's text.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Union

from edgevit.policy import NEVER

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_ABSENT = "\u2013"  # a dash
# A list in the reproducibility block shows this many entries; report.json has them all.
_LIST_SHOWN = 8


def write_report(report: Mapping[str, Any], path: Union[str, Path]) -> Path:
    """Write the page whole or not at all; parts that the report lacks are left out."""
    path = Path(path)
    page = render_report(report)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(page)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def render_report(report: Mapping[str, Any]) -> str:
    """The page as text."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        # A missing part reads as nothing, at any depth: old reports and short runs have fewer.
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=_percent,
        fixed=_fixed,
        whole=_whole,
        bytes=_bytes,
        width=_width,
        plain=_plain,
        threshold=_threshold,
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        report=report,
        exits=_exits(report),
        ops=_ops_by_type(report),
        intervals={side: _interval(_part(report, side)) for side in ("float", "bundle")},
        smaller=_ratio(report, "size_bytes", "float", "bundle"),
        leaner=_memory_ratio(report),
        slowest_ms=_slowest(report),
    )


def _exits(report: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """One entry an exit: what the float model and the bundle do there."""
    bundle = _part(report, "bundle")
    in_float = {row.get("block"): row for row in _rows(_part(report, "float").get("exits"))}
    counts = bundle.get("exit_counts")
    counts = counts if isinstance(counts, list) else []
    rows = _rows(bundle.get("exits"))
    exits = []
    for index, row in enumerate(rows):
        share = _number(row.get("share"))
        count = counts[index] if index < len(counts) else None
        if share is None and _number(count) is not None and _number(bundle.get("n")):
            share = count / bundle["n"]
        exits.append(
            {
                **row,
                "share": share,
                "count": count,
                "float_top1": in_float.get(row.get("block"), {}).get("top1"),
                "last": index == len(rows) - 1,
            }
        )
    return exits


def _ops_by_type(report: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """Layers by operator, quantized or not, and why not: their number and share of the work."""
    found: Dict[Any, Dict[str, Any]] = {}
    layers = _rows(_part(report, "quantization").get("layers"))
    total = sum(_number(layer.get("macs")) or 0 for layer in layers)
    for layer in layers:
        key = (str(layer.get("op")), layer.get("quantized") is True, str(layer.get("reason") or ""))
        entry = found.setdefault(
            key,
            {
                "op": key[0],
                "quantized": key[1],
                "reason": key[2],
                "count": 0,
                "share": 0.0 if total else None,
            },
        )
        entry["count"] += 1
        if total:
            entry["share"] += (_number(layer.get("macs")) or 0) / total
    return sorted(found.values(), key=lambda e: (not e["quantized"], -e["count"], e["op"]))


def _interval(side: Mapping[str, Any]) -> Optional[List[float]]:
    """95 % Wilson interval of ``top1`` on ``n`` images: what another draw of images could give."""
    top1, n = _number(side.get("top1")), _number(side.get("n"))
    if top1 is None or not n or not 0 <= top1 <= 1 or n < 1:
        return None
    z = 1.959964
    center = (top1 + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(top1 * (1 - top1) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return [center - half, center + half]


def _ratio(report: Mapping[str, Any], part: str, over: str, under: str) -> Optional[float]:
    sizes = _part(report, part)
    numerator, denominator = _number(sizes.get(over)), _number(sizes.get(under))
    return numerator / denominator if numerator and denominator else None


def _memory_ratio(report: Mapping[str, Any]) -> Optional[float]:
    benchmark = _part(report, "benchmark")
    peaks = {
        side: _part(benchmark, side).get("peak_memory_bytes") for side in ("baseline", "bundle")
    }
    return _ratio({"peaks": peaks}, "peaks", "baseline", "bundle")


def _slowest(report: Mapping[str, Any]) -> float:
    """The right end of the latency axis, ms."""
    benchmark = _part(report, "benchmark")
    tails = [
        _number(_part(benchmark, side).get(f"latency_ms_{key}"))
        for side in ("baseline", "bundle")
        for key in ("typical", "p50", "p99")
    ]
    return max([tail for tail in tails if tail is not None] or [1.0])


def _part(report: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = report.get(key)
    return value if isinstance(value, Mapping) else {}


def _rows(value: Any) -> List[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _number(value: Any) -> Optional[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _percent(value: Any, digits: int = 1) -> str:
    number = _number(value)
    return _ABSENT if number is None else f"{100 * number:.{digits}f} %"


def _fixed(value: Any, digits: int = 1) -> str:
    number = _number(value)
    return _ABSENT if number is None else f"{number:.{digits}f}"


def _whole(value: Any) -> str:
    number = _number(value)
    return _ABSENT if number is None else f"{number:,.0f}"


def _bytes(value: Any) -> str:
    number = _number(value)
    if number is None:
        return _ABSENT
    if number >= 1e9:
        return f"{number / 1e9:.2f} GB"
    return f"{number / 1e6:.1f} MB" if number >= 1e6 else f"{number / 1e3:.1f} kB"


def _width(value: Any, of: Any = 1.0) -> str:
    """A CSS length in percent: only ever digits, whatever the report holds."""
    number, whole = _number(value), _number(of)
    if number is None or not whole:
        return "0%"
    return f"{min(max(100 * number / whole, 0.0), 100.0):.2f}%"


def _threshold(value: Any) -> str:
    number = _number(value)
    if number is None:
        return _ABSENT
    return "never" if number >= NEVER else f"{number:.3f}"


def _plain(value: Any) -> str:
    """A value of the reproducibility block as text."""
    if value is None or value == "":
        return _ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(_plain(item) for item in value[:_LIST_SHOWN])
        more = len(value) - _LIST_SHOWN
        return (f"{shown} and {more} more" if more > 0 else shown) or _ABSENT
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items()) or _ABSENT
    return str(value)
