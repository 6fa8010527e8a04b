"""The whole of `edgevit compress` on a small task: what it leaves, that its figures are true, and
that it can be stopped anywhere."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from edgevit import cli, pipeline
from edgevit.bundle import Bundle
from edgevit.compress.calibrators import CALIBRATORS
from edgevit.engines import open_stages
from edgevit.errors import BudgetExceededError
from edgevit.images import ImageFolder, read_image
from edgevit.recipe import load_recipe
from edgevit.runtime.evaluate import Evaluation, evaluate
from tests.colours import BLOCKS, CLASSES, SIZE, TRAIN_IMAGES, VAL_IMAGES, fake_bench, write_task

STEPS = (
    "01-model",
    "02-features",
    "03-heads",
    "04-export",
    "05-calibrate",
    "06-quantize",
    "07-thresholds",
    "08-evaluate",
    "09-benchmark",
)
LEFT = (".lock", *STEPS, "bundle.evb", "report.html", "report.json")
# ViT-Ti at 32 pixels: four patches of 16 x 16 and a class token, 12 blocks of width 192.
TOKENS, WIDTH, DEPTH = 5, 192, 12


@dataclass(frozen=True)
class Run:
    recipe: Path
    out: Path
    report: dict[str, Any]

    @property
    def bundle(self) -> Bundle:
        return Bundle.load(self.out / "bundle.evb")


def compress(recipe: Path, out: Path, *overrides: str, **options: bool) -> Run:
    outcome = pipeline.compress(load_recipe(recipe, overrides), out, **options)
    assert (outcome.bundle, outcome.report_html) == (out / "bundle.evb", out / "report.html")
    report = json.loads(outcome.report_html.with_suffix(".json").read_text())
    assert report == json.loads(json.dumps(outcome.report))
    return Run(recipe, out, report)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run, benchmark and all. Tests that change its folder take a copy."""
    root = tmp_path_factory.mktemp("pipeline")
    return compress(write_task(root), root / "out")


@pytest.fixture
def copy(done: Run, tmp_path: Path) -> Run:
    shutil.copytree(done.out, tmp_path / "out")
    return Run(done.recipe, tmp_path / "out", done.report)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "bench", fake_bench)


def figures(run: Run) -> dict[str, Any]:
    """What must be the same whenever the same recipe runs on the same photographs: everything but
    times."""
    report = dict(run.report)
    for key in ("created", "speedup", "benchmark", "steps", "machine"):
        del report[key]
    report["bundle"] = {k: v for k, v in report["bundle"].items() if k != "latency_ms"}
    bundle = run.bundle
    contents = {name: bundle.read(name) for name in bundle.manifest["files"]}
    del contents["report.json"]
    return {"report": report, "contents": contents, "policy": bundle.policy}


# What a run leaves.


def test_the_run_folder(done: Run) -> None:
    assert sorted(entry.name for entry in done.out.iterdir()) == list(LEFT)
    assert "<html" in (done.out / "report.html").read_text()
    assert [step["name"] for step in done.report["steps"]] == [name[3:] for name in STEPS]
    assert all(step["seconds"] >= 0 for step in done.report["steps"])


def test_the_report_keeps_the_keys_others_rely_on(done: Run) -> None:
    report = done.report
    assert {"top1", "n"} <= report["float"].keys()
    assert {"top1", "n", "mean_stages", "exit_counts"} <= report["bundle"].keys()
    assert {"float", "bundle"} <= report["size_bytes"].keys()
    assert {"drop_points", "speedup"} <= report.keys()
    assert report["float"]["n"] == report["bundle"]["n"] == len(CLASSES) * VAL_IMAGES
    assert report["data"]["train"] == len(CLASSES) * TRAIN_IMAGES
    assert report["data"]["classes"] == list(CLASSES)
    assert report["data"]["skipped"] == []
    assert report["speedup"] == report["benchmark"]["speedup"]["median"] > 0


def test_the_bundle_says_what_it_is(done: Run) -> None:
    bundle = done.bundle
    assert bundle.labels == CLASSES
    assert [stage.exit_block for stage in bundle.stages] == [*BLOCKS, DEPTH]
    assert {stage.precision for stage in bundle.stages} == {"int8"}
    assert bundle.manifest["over_budget"] is False
    assert bundle.policy.thresholds == tuple(done.report["policy"]["thresholds"])
    assert json.loads(bundle.read("report.json")) == done.report
    assert len(bundle.check_images) == 6


def test_sizes_are_those_of_the_files(done: Run) -> None:
    sizes = done.report["size_bytes"]
    graphs = (done.out / "04-export" / "stages").glob("*.onnx")
    assert sizes["float"] == sum(graph.stat().st_size for graph in graphs)
    assert sizes["bundle"] == (done.out / "08-evaluate" / "candidate.evb").stat().st_size
    # The bundle itself holds the report besides.
    beside = (done.out / "bundle.evb").stat().st_size - sizes["bundle"]
    assert 0 < beside < 2 * (done.out / "report.json").stat().st_size
    assert sizes["float"] > 3.5 * sizes["bundle"]


# What computes.


def test_the_share_of_macs_in_int8(done: Run) -> None:
    patches = TOKENS - 1
    block = TOKENS * WIDTH * (3 * WIDTH + WIDTH + 4 * WIDTH + 4 * WIDTH)
    heads = (len(BLOCKS) + 1) * 2 * WIDTH * len(CLASSES)
    linear = patches * 16 * 16 * 3 * WIDTH + DEPTH * block + heads
    attention = DEPTH * 2 * TOKENS * TOKENS * WIDTH
    quantization = done.report["quantization"]
    layers = quantization["layers"]
    assert sum(layer["macs"] for layer in layers if layer["quantized"]) == linear
    assert sum(layer["macs"] for layer in layers if not layer["quantized"]) == attention
    assert quantization["macs_int8_share"] == pytest.approx(linear / (linear + attention))
    assert sum(stage.macs for stage in done.bundle.stages) == linear + attention


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_every_linear_layer_runs_in_int8(done: Run, engine: str) -> None:
    pytest.importorskip(engine)
    stages = open_stages(done.bundle, engine=engine, threads=1)
    kernels = [stages[number].linear_layers() for number in range(len(stages))]
    # A head a stage, four layers a block, and the patch embedding.
    assert [len(found) for found in kernels] == [1 + 4 * 4 + 1, 4 * 4 + 1, 4 * 4 + 1]
    assert all(int8 for found in kernels for _, int8 in found), kernels


# Whether the figures are true.


def chain(graphs: Sequence[bytes], images: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """``top1`` and ``confidence [exits, n]`` at every exit, by ONNX Runtime and nothing of ours."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # Or INT8 sums saturate on processors without VNNI, and answers differ.
    options.add_session_config_entry("session.x64quantprecision", "1")
    sessions = [
        onnxruntime.InferenceSession(
            graph,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["MatMulAddFusion"],
        )
        for graph in graphs
    ]
    top1, confidence = [], []
    for image in images:
        value, answers, sure = image[None], [], []
        for session in sessions:
            names = [output.name for output in session.get_outputs()]
            found = dict(
                zip(names, session.run(names, {session.get_inputs()[0].name: value}), strict=True)
            )
            logits = found["logits"][0].astype(float)
            odds = np.exp(logits - logits.max())
            answers.append(int(logits.argmax()))
            sure.append(float(odds.max() / odds.sum()))
            value = found.get("tokens")
        top1.append(answers)
        confidence.append(sure)
    return np.array(top1).T, np.array(confidence).T


def test_accuracy_drop_and_exits_are_those_of_an_evaluation_of_our_own(done: Run) -> None:
    bundle, report = done.bundle, done.report
    images, labels = [], []
    for label, name in enumerate(CLASSES):
        for path in sorted((done.recipe.parent / "val" / name).iterdir()):
            images.append(bundle.preprocess(read_image(path)))
            labels.append(label)
    assert images[0].shape == (SIZE, SIZE, 3)
    n = len(labels)

    graphs = sorted((done.out / "04-export" / "stages").iterdir())
    float_top1, _ = chain([graph.read_bytes() for graph in graphs], images)
    float_right = (float_top1 == labels).sum(1)
    top1, confidence = chain([bundle.read(stage.file) for stage in bundle.stages], images)
    exits = np.where(
        confidence[0] >= bundle.policy.thresholds[0],
        0,
        np.where(confidence[1] >= bundle.policy.thresholds[1], 1, 2),
    )
    right = int((top1[exits, range(n)] == labels).sum())
    counts = [int((exits == number).sum()) for number in range(3)]

    assert report["float"]["top1"] == float_right[-1] / n
    assert [exit_["top1"] for exit_ in report["float"]["exits"]] == list(float_right / n)
    assert report["bundle"]["top1"] == right / n
    assert report["bundle"]["exit_counts"] == counts
    assert report["bundle"]["mean_stages"] == pytest.approx(np.mean(exits) + 1)
    assert report["drop_points"] == pytest.approx(100 * (float_right[-1] - right) / n)
    for number, exit_ in enumerate(report["bundle"]["exits"]):
        assert exit_["top1"] == (top1[number] == labels).mean()
        assert exit_["agreement"] == (top1[number] == float_top1[number]).mean()
        assert exit_["share"] == counts[number] / n
    # Answers that are wrong, frames that differ and exits that are taken: this says something.
    assert 0 < right < n and float_right[-1] != right and sum(count > 0 for count in counts) > 1
    assert right / n > 0.6  # and the colours were learned


# The calibrator.


def test_the_calibrator_is_the_one_that_agrees_best(done: Run) -> None:
    found = done.report["calibration"]
    candidates = found["candidates"]
    assert {c["calibrator"] for c in candidates} == set(CALIBRATORS)
    ranks = [(-c["agreement"], c["logit_error"]) for c in candidates]
    assert ranks == sorted(ranks)
    assert found["calibrator"] == candidates[0]["calibrator"]
    table = json.loads(done.bundle.read("calibration.json"))
    assert table["calibrator"] == found["calibrator"]
    # All that are left, with at most 64 of them.
    left = len(CLASSES) * TRAIN_IMAGES - found["images"]
    assert found["comparison_images"] == min(left, 64) > 0
    html = (done.out / "report.html").read_text()
    assert all(name in html for name in CALIBRATORS)


@pytest.mark.usefixtures("quick")
def test_a_calibrator_can_be_named(copy: Run) -> None:
    run = compress(copy.recipe, copy.out, "quantize.calibrator=percentile-99.9", resume=True)
    found = run.report["calibration"]
    assert (found["calibrator"], found["candidates"]) == ("percentile-99.9", [])
    assert found["comparison_images"] == 0
    table = json.loads(run.bundle.read("calibration.json"))
    shares = [
        s for part in table["clipped"].values() for name, s in part.items() if name != "pixels"
    ]
    # A tensor of n values has none beyond the range where 0.1 % of n is less than one.
    assert max(shares) == pytest.approx(0.001, rel=0.05) == found["largest_clipped_share"]


@pytest.mark.usefixtures("quick")
def test_without_images_to_compare_on_nothing_is_clipped(copy: Run) -> None:
    run = compress(copy.recipe, copy.out, "quantize.calibration_images=1000", resume=True)
    found = run.report["calibration"]
    assert found["images"] == len(CLASSES) * TRAIN_IMAGES
    assert (found["calibrator"], found["candidates"]) == ("min-max", [])
    assert found["comparison_images"] == found["clipped_tensors"] == 0


# Other recipes, from a finished run.


@pytest.mark.usefixtures("quick")
def test_without_quantization_the_bundle_is_float(copy: Run) -> None:
    run = compress(copy.recipe, copy.out, "quantize.mode=none", resume=True)
    bundle, report = run.bundle, run.report
    assert {stage.precision for stage in bundle.stages} == {"float32"}
    assert report["quantization"] == {"mode": "none", "layers": [], "macs_int8_share": 0.0}
    assert report["calibration"] is None and "calibration" not in bundle.manifest
    assert "calibration.json" not in bundle.manifest["files"]
    assert report["agreement"] == 1.0  # the same answers as PyTorch's at full depth
    for stage in bundle.stages:
        assert bundle.read(stage.file) == (copy.out / "04-export" / stage.file).read_bytes()
    for opened in open_stages(bundle, engine="onnxruntime", threads=1):
        assert opened.linear_layers() and not any(int8 for _, int8 in opened.linear_layers())


@pytest.mark.usefixtures("quick")
def test_without_early_exits_every_frame_takes_the_one_stage(copy: Run) -> None:
    run = compress(copy.recipe, copy.out, "exits.blocks=[]", resume=True)
    assert [stage.exit_block for stage in run.bundle.stages] == [DEPTH]
    assert run.bundle.policy.thresholds == ()
    assert run.report["bundle"]["mean_stages"] == 1.0
    assert run.report["bundle"]["exit_counts"] == [len(CLASSES) * VAL_IMAGES]
    # The final head learns from the same features, exits before it or not.
    assert run.report["float"]["top1"] == copy.report["float"]["top1"]


@pytest.mark.parametrize(
    ("override", "first"),
    [
        ("budget.max_drop_points=99", None),
        ("target.check_images=3", "08-evaluate"),
        ("exits.max_lost=0", "07-thresholds"),
        ("quantize.calibration_images=12", "04-export"),
        ("quantize.calibrator=entropy", "05-calibrate"),
        ("train.folds=3", "03-heads"),
        ("data.crop=squash", "02-features"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_a_changed_recipe_redoes_what_depends_on_it(
    copy: Run, override: str, first: str | None
) -> None:
    for step in STEPS:
        (copy.out / step / "old").touch()
    run = compress(copy.recipe, copy.out, override, resume=True)
    redone = [step for step in STEPS if not (copy.out / step / "old").exists()]
    assert redone == ([] if first is None else list(STEPS[STEPS.index(first) :]))
    assert run.report["recipe"] != copy.report["recipe"]
    assert json.loads(run.bundle.read("report.json")) == run.report


@pytest.mark.usefixtures("quick")
def test_a_changed_photograph_redoes_what_depends_on_it(tmp_path: Path, copy: Run) -> None:
    task = tmp_path / "task"
    shutil.copytree(copy.recipe.parent / "train", task / "train")
    here = f"data.train={task / 'train'}"
    same = compress(copy.recipe, copy.out, here, resume=True)
    (copy.out / "02-features" / "old").touch()
    assert same.report["bundle"]["top1"] == copy.report["bundle"]["top1"]

    (task / "train" / "red" / "00.png").unlink()
    run = compress(copy.recipe, copy.out, here, resume=True)
    assert not (copy.out / "02-features" / "old").exists()
    assert run.report["data"]["train"] == len(CLASSES) * TRAIN_IMAGES - 1


# Stopped in the middle.

# Runs the pipeline again and again in one folder, each time in a child that kills itself at the
# first sign of life of another step. Nothing else of ours runs in a process that is killed so.
_KILLED = """
import json, os, signal, sys
from pathlib import Path
from edgevit import pipeline
from edgevit.recipe import load_recipe
from tests.colours import fake_bench

recipe, out, *steps = sys.argv[1:]
pipeline.bench = fake_bench
for step in steps:
    def progress(name, done, total):
        if name == step:
            os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if not child:
        pipeline.compress(load_recipe(recipe), Path(out), resume=True, progress=progress)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = sorted(entry.name for entry in Path(out).iterdir() if entry.is_dir())
    print(json.dumps([os.WIFSIGNALED(status) and os.WTERMSIG(status), found]))
"""


@pytest.mark.usefixtures("quick")
def test_a_run_killed_in_every_step_ends_as_one_that_was_not(done: Run, tmp_path: Path) -> None:
    kills = {
        "model": "01-model",
        "features of train": "02-features",
        "features of val": "02-features",
        **{name[3:]: name for name in STEPS[2:]},
    }
    found = subprocess.run(
        [sys.executable, "-c", _KILLED, str(done.recipe), str(tmp_path / "out"), *kills],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    ends = [json.loads(line) for line in found.stdout.splitlines()]
    whole = [STEPS[: STEPS.index(step)] for step in kills.values()]
    assert ends == [
        [signal.SIGKILL, [*before, f"{step}.partial"]]
        for step, before in zip(kills.values(), whole, strict=True)
    ]
    assert not list((tmp_path / "out").glob("bundle*"))

    run = compress(done.recipe, tmp_path / "out", resume=True)
    assert figures(run) == figures(done)
    assert sorted(entry.name for entry in run.out.iterdir()) == list(LEFT)


@pytest.mark.usefixtures("quick")
def test_a_finished_run_ends_as_it_did(copy: Run) -> None:
    assert figures(compress(copy.recipe, copy.out, resume=True)) == figures(copy)


# Over the budget.


@pytest.fixture
def one_lost(copy: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose bundle gets exactly one image less right than the float model."""
    right = round(copy.report["float"]["top1"] * copy.report["float"]["n"])

    def losing(classifier: Any, folder: ImageFolder, **options: Any) -> Evaluation:
        return dataclasses.replace(evaluate(classifier, folder, **options), right=right - 1)

    monkeypatch.setattr(pipeline, "evaluate", losing)
    shutil.rmtree(copy.out / "08-evaluate")
    return copy


POINTS = 100 / (len(CLASSES) * VAL_IMAGES)


def test_over_the_budget_there_is_a_report_and_no_bundle(
    one_lost: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    strict = "budget.max_drop_points=0"
    with pytest.raises(BudgetExceededError, match=r"report\.html.*budget\.max_drop_points"):
        compress(one_lost.recipe, one_lost.out, strict, resume=True)
    left = {entry.name for entry in one_lost.out.iterdir()}
    assert left == {*LEFT} - {"bundle.evb"}  # not even the one of the run before
    report = json.loads((one_lost.out / "report.json").read_text())
    assert report["drop_points"] == pytest.approx(POINTS)
    assert report["budget"] == {"max_drop_points": 0.0, "met": False}

    words = ["compress", str(one_lost.recipe), "--out", str(one_lost.out), "--resume"]
    assert cli.main([*words, "--set", strict]) == 3
    out, err = capsys.readouterr()
    assert not out
    last = err.splitlines()[-1]
    assert last.startswith("edgevit: ") and f"{POINTS:.2f} points" in last
    assert not (one_lost.out / "bundle.evb").exists()


def test_over_the_budget_by_permission_the_bundle_says_so(one_lost: Run) -> None:
    strict = "budget.max_drop_points=0"
    run = compress(one_lost.recipe, one_lost.out, strict, resume=True, allow_over_budget=True)
    assert run.bundle.manifest["over_budget"] is True
    assert run.report["budget"]["met"] is False


@pytest.mark.parametrize(("budget", "met"), [(1.01 * POINTS, True), (0.99 * POINTS, False)])
def test_the_budget_is_the_largest_drop_that_is_allowed(
    one_lost: Run, budget: float, met: bool
) -> None:
    run = compress(
        one_lost.recipe,
        one_lost.out,
        f"budget.max_drop_points={budget}",
        resume=True,
        allow_over_budget=True,
    )
    assert run.report["budget"]["met"] is met
    assert run.bundle.manifest["over_budget"] is not met
