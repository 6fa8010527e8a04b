from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from edgevit.report.html import render_report, write_report

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>'

REPORT = {
    "format": "edgevit-report",
    "version": 1,
    "name": "ponds",
    "created": "2026-02-03T04:05:06+00:00",
    "recipe": {"model": {"name": "vit_small", "image_size": 192}, "exits": {"blocks": [6]}},
    "float": {
        "top1": 0.75,
        "n": 400,
        "exits": [{"block": 6, "top1": 0.7}, {"block": 12, "top1": 0.75}],
    },
    "bundle": {
        "top1": 0.74,
        "n": 400,
        "mean_stages": 1.25,
        "exit_counts": [300, 100],
        "engine": "openvino",
        "exits": [
            {"block": 6, "top1": 0.69, "agreement": 0.98, "threshold": 0.8125, "share": 0.75},
            {"block": 12, "top1": 0.74, "agreement": 0.97, "threshold": None, "share": 0.25},
        ],
    },
    "drop_points": 1.0,
    "agreement": 0.97,
    "speedup": 8.04,
    "benchmark": {
        "baseline": {
            "name": "eager PyTorch float32",
            "latency_ms_p50": 80.0,
            "latency_ms_p90": 90.0,
            "latency_ms_p99": 100.0,
            "latency_ms_mean": 83.0,
            "latency_ms_typical": 82.0,
            "latency_ms_typical_spread": [78.0, 85.0],
            "peak_memory_bytes": 600e6,
        },
        "bundle": {
            "engine": "openvino",
            "latency_ms_p50": 10.0,
            "latency_ms_p90": 12.0,
            "latency_ms_p99": 25.0,
            "latency_ms_mean": 11.0,
            "latency_ms_typical": 10.2,
            "latency_ms_typical_spread": [9.0, 11.0],
            "peak_memory_bytes": 200e6,
        },
        "speedup": {
            "median": 8.04,
            "min": 7.5,
            "max": 8.6,
            "statistic": "mean latency of a round",
            "per_round": [7.5, 8.04, 8.6],
        },
        "speedup_mean": {"median": 7.6, "min": 7.0, "max": 8.1},
        "speedup_p50": {"median": 8.0, "min": 7.4, "max": 8.8},
        "runs": [
            {
                "round": 1,
                "side": "baseline",
                "started_s": 0.3,
                "latency_ms_p50": 80.0,
                "latency_ms_mean": 82.0,
            }
        ],
        "frames": 64,
        "threads": 2,
        "machine": {"cpu_model": "Some CPU", "cpu_flags": ["avx2"]},
    },
    "size_bytes": {"float": 90_000_000, "bundle": 25_000_000},
    "quantization": {
        "mode": "static",
        "macs_int8_share": 0.9,
        "layers": [
            {
                "stage": "1",
                "name": "a/MatMul",
                "op": "MatMul",
                "macs": 30,
                "quantized": True,
                "reason": "",
            },
            {
                "stage": "1",
                "name": "b/MatMul",
                "op": "MatMul",
                "macs": 60,
                "quantized": True,
                "reason": "",
            },
            {
                "stage": "2",
                "name": "c/MatMul",
                "op": "MatMul",
                "macs": 10,
                "quantized": False,
                "reason": "attention",
            },
        ],
    },
    "calibration": {"calibrator": "minmax", "images": 128, "graphs": {"1": "ab" * 32}},
    "data": {
        "train": 1000,
        "val": 400,
        "classes": [f"class{i}" for i in range(12)],
        "skipped": [],
    },
    "steps": [{"name": "features", "seconds": 12.34}],
    "machine": {"cpu_model": "Some CPU", "versions": {"torch": "2.14.1"}},
    "budget": {"max_drop_points": 1.5, "met": True},
    "policy": {"score": "max_softmax", "thresholds": [0.8125]},
    "parity": {"max_abs_error": 2.5e-5, "images": 16},
}

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Elements, their attributes and the visible text; fails on tags that do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def test_the_figures_are_on_the_page():
    text = Page(render_report(REPORT)).text
    for words in (
        "ponds",
        "Within the accuracy budget of 1.50 points",
        "74.0 %",  # bundle
        "of 75.0 % in float: 1.00 points lost",
        "8.0\u00d7",
        "82.0 → 10.2 ms a frame; 7.5 to 8.6 times over 3 rounds",
        "25.0 MB",
        "of 90.0 MB in float: 3.6 times smaller",  # 90 / 25
        "3.0\u00d7 less",  # memory: 600 / 200
        "1.25 of 2",
        "\u22121.00 points",
        "block 6 75.0 % 300 0.812 70.0 % 69.0 %",
        "block 12 25.0 % 100 the rest 75.0 % 74.0 %",
        "90.0 % of the multiply-accumulates run in INT8",
        "MatMul 2 90.0 % INT8",  # (30 + 60) of 100
        "MatMul 1 10.0 % float attention",
        "All 3 layers",
        "ab" * 32,
        "class0, class1, class2, class3, class4, class5, class6, class7 and 4 more",
        "features 12.3 s",
        "torch 2.14.1",
        "max abs error 2.5e-05",
    ):
        assert words in text, words


def test_wilson_interval():
    # 8 of 10: 0.490 to 0.943 (Newcombe 1998's formula, computed by hand with z = 1.96).
    report = {"float": {"top1": 0.8, "n": 10}, "bundle": {"top1": 0.8, "n": 10}}
    assert "49.0 to 94.3 %" in Page(render_report(report)).text


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        (0.5, "0.50 points lost"),
        (-0.5, "0.50 points won"),
        (0.0, "nothing lost"),
    ],
)
def test_a_gain_is_not_called_a_loss(drop: float, words: str):
    assert words in Page(render_report({**REPORT, "drop_points": drop})).text


def test_over_budget_is_said():
    report = {**REPORT, "budget": {"max_drop_points": 0.5, "met": False}}
    assert "Over the accuracy budget of 0.50 points" in Page(render_report(report)).text


def test_an_exit_that_is_never_taken():
    report = copy.deepcopy(REPORT)
    report["bundle"]["exits"][0].update(threshold=2.0, share=0.0)
    assert "never" in Page(render_report(report)).text


@pytest.mark.parametrize("missing", sorted(REPORT))
def test_a_missing_part_is_left_out(missing: str):
    page = Page(render_report({key: REPORT[key] for key in REPORT if key != missing}))
    assert "None" not in page.text and "Undefined" not in page.text


def test_an_empty_report_is_a_page():
    assert "To reproduce this" in Page(render_report({})).text


def test_no_baseline_is_explained():
    benchmark = {**REPORT["benchmark"], "baseline": None, "speedup": None}
    benchmark.update(speedup_mean=None, speedup_p50=None)
    benchmark["baseline_reason"] = "no baseline: PyTorch does not import here"
    page = Page(render_report({**REPORT, "benchmark": benchmark, "speedup": None}))
    assert "no baseline: PyTorch does not import here" in page.text
    assert "times as fast" not in page.text and "faster" not in page.text


def hostile(value: object) -> object:
    """The report with every text, key and list entry replaced by an attack."""
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()} | {HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_text_of_others_stays_text():
    source = render_report(hostile(REPORT))
    page = Page(source)
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in "".join(page.words)  # shown, not dropped


def test_hostile_types_do_not_reach_styles():
    report = copy.deepcopy(REPORT)
    attack = "1%;background:url(http://example.org/x)"
    report["bundle"]["exits"][0]["share"] = attack
    report["benchmark"]["bundle"]["latency_ms_typical"] = attack
    report["benchmark"]["bundle"]["latency_ms_p50"] = float("nan")
    styles = [value for name, value in Page(render_report(report)).attributes if name == "style"]
    assert styles
    for style in styles:
        assert re.fullmatch(r"(width|left|right|calc|:|;|[-\d.% ()])+", style), style


def test_the_page_needs_nothing_beside_it():
    source = render_report(REPORT)
    assert not re.search(r"(https?:)?//|url\(|@import|\bsrc=|\bhref=", source)
    policy = dict(Page(source).attributes).get("content")
    assert policy  # a content security policy stands guard in case something slips through
    assert "default-src 'none'" in source
    assert "prefers-color-scheme: dark" in source and "@media print" in source
    assert 'name="viewport"' in source


def test_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "report.html"
    assert write_report(REPORT, target) == target
    assert target.read_text(encoding="utf-8") == render_report(REPORT)
    assert target.stat().st_mode & 0o777 == 0o644

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_report({**REPORT, "name": "other"}, target)
    assert "ponds" in target.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
