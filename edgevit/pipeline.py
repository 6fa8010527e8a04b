"""From recipe to bundle: the steps in order, and what each hands to the next.

    model ─► features ─► heads ─► export ─► calibrate ─► quantize ─► thresholds ─► evaluate ─► benchmark
                                                                                      │
                                                         over budget: report only ◄───┴──► bundle.evb

This is the one place where both halves meet: :mod:`edgevit.compress` makes the candidate, and
:mod:`edgevit.runtime` evaluates it, so that the accuracy in the report is the runtime's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file
from torch import nn

from edgevit import __version__
from edgevit.bundle import Bundle, write_bundle
from edgevit.compress.agreement import Candidate, compare_calibrators
from edgevit.compress.backbone import (
    create_backbone,
    data_config,
    fold_normalization,
    load_backbone,
)
from edgevit.compress.calibration import CalibrationTable, calibrate, choose_images
from edgevit.compress.equalize import equalize
from edgevit.compress.exits import build_stages
from edgevit.compress.export import check_parity, export_stage
from edgevit.compress.features import Features, extract_features
from edgevit.compress.graph import total_macs
from edgevit.compress.heads import assign_folds, fit_head
from edgevit.compress.quantize import quantize_stages
from edgevit.compress.steps import RunFolder, write_json
from edgevit.compress.thresholds import choose_thresholds
from edgevit.errors import BudgetExceededError, DataError
from edgevit.images import ImageFolder, read_image
from edgevit.machine import usable_cores
from edgevit.policy import ExitPolicy
from edgevit.preprocess import Preprocess
from edgevit.recipe import Recipe
from edgevit.report.benchmark import bench
from edgevit.report.compression import Measurements, build_report, run_name
from edgevit.report.html import write_report
from edgevit.runtime.classifier import Classifier
from edgevit.runtime.evaluate import evaluate

# Real images on which every exported graph is compared with PyTorch.
_PARITY_IMAGES = 4
# Training images outside the calibration set on which the calibrators are compared.
_COMPARISON_IMAGES = 64
# Frames of the benchmark in the report, spread evenly over the validation images.
_BENCHMARK_FRAMES = 64
_BENCHMARK_ROUNDS = 5
# The bundle before its report, and before it is known whether it is within the budget.
_CANDIDATE = "candidate.evb"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcome:
    """What a run left: ``bundle`` is a ``.evb`` file, ``report`` the content of ``report.json``."""

    bundle: Path
    report: dict[str, Any]
    report_html: Path


def compress(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    allow_over_budget: bool = False,
    progress: Progress = lambda step, done, total: None,
) -> Outcome:
    """Make a bundle and its report in ``out``; with ``resume``, go on where a run stopped.

    ``progress`` gets the step, units done and units in all. Raises the errors of
    :mod:`edgevit.errors`; :class:`BudgetExceededError` leaves the report and writes no bundle,
    unless ``allow_over_budget``, which marks the bundle in its manifest.
    """
    run = _Run(recipe, RunFolder(out, resume=resume), progress)
    with _torch_threads(recipe.target.threads or usable_cores()):
        run.load_model()
        run.extract_features()
        # The products of a head are small: two threads took eight times as long as one.
        with _torch_threads(1):
            run.train_heads()
        run.export()
        run.calibrate()
        run.quantize()
        run.choose_thresholds()
        run.evaluate()
        run.benchmark()
    return run.finish(allow_over_budget)


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    """The state that steps hand on. Each method is a step: compute into its folder, then read it."""

    def __init__(self, recipe: Recipe, folder: RunFolder, progress: Progress) -> None:
        self.recipe = recipe
        self.folder = folder
        self.progress = progress
        self.train = ImageFolder.scan(recipe.data.train)
        self.val = ImageFolder.scan(recipe.data.val, self.train.classes)
        self.classes = self.train.classes
        if len(self.classes) < 2:
            raise DataError(f"{self.train.root} holds one class; a classifier needs at least two")
        self.train_hashes = _file_hashes(self.train)
        self.val_hashes = _file_hashes(self.val)

    def load_model(self) -> None:
        model = self.recipe.model

        def work(folder: Path) -> None:
            backbone = load_backbone(model)
            mean, std = data_config(backbone)
            fold_normalization(backbone, mean, std)
            save_file(backbone.state_dict(), folder / "backbone.safetensors")
            write_json(folder / "normalization.json", {"mean": mean, "std": std})
            self.progress("model", 1, 1)

        checkpoint = Path(model.checkpoint)
        weights = _sha256(checkpoint.read_bytes()) if checkpoint.is_file() else ""
        done = self.folder.step("model", [asdict(model), weights], work)
        backbone = create_backbone(model.name, model.image_size, model.patch_size)
        # fold_normalization gives the embedding a bias, whether or not the architecture has one.
        state = load_file(done / "backbone.safetensors")
        backbone.patch_embed.proj.bias = nn.Parameter(
            state["patch_embed.proj.bias"], requires_grad=False
        )
        backbone.load_state_dict(state)
        normalization = _read_json(done / "normalization.json")
        self.preprocess = Preprocess(
            size=model.image_size,
            crop=self.recipe.data.crop,
            mean=tuple(normalization["mean"]),
            std=tuple(normalization["std"]),
        )
        self.stages = build_stages(backbone, self.recipe.exits.blocks, len(self.classes))
        self.stage_files = [f"stages/{number + 1}.onnx" for number in range(len(self.stages))]

    def extract_features(self) -> None:
        def features(split: str, images: ImageFolder, folder: Path) -> Features:
            return extract_features(
                self.stages,
                images,
                self.preprocess,
                folder / split,
                skip_corrupt=self.recipe.data.skip_corrupt,
                progress=lambda done, total: self.progress(f"features of {split}", done, total),
            )

        def work(folder: Path) -> None:
            features("train", self.train, folder)
            features("val", self.val, folder)

        inputs = [
            self.preprocess.hash,
            self.recipe.exits.blocks,
            self.recipe.data.skip_corrupt,
            self.train_hashes,
            self.val_hashes,
        ]
        done = self.folder.step("features", inputs, work)
        # Every part is there by now, so this reads and computes nothing.
        self.train_features = features("train", self.train, done)
        self.val_features = features("val", self.val, done)

    def train_heads(self) -> None:
        train = self.recipe.train

        def work(folder: Path) -> None:
            labels = self.train_features.labels
            fold_of = assign_folds(labels, train.folds, train.seed)
            weights: dict[str, torch.Tensor] = {}
            held_out = []
            for number, values in enumerate(self.train_features.values):
                head = fit_head(values, labels, len(self.classes), fold_of)
                self.progress("heads", number + 1, len(self.stages))
                weights[f"{number}.weight"] = torch.from_numpy(head.weight)
                weights[f"{number}.bias"] = torch.from_numpy(head.bias)
                held_out.append(head.held_out_logits)
            save_file(weights, folder / "heads.safetensors")
            np.save(folder / "held_out_logits.npy", np.stack(held_out))

        done = self.folder.step("heads", asdict(train), work)
        weights = load_file(done / "heads.safetensors")
        for number, stage in enumerate(self.stages):
            stage.head.linear.load_state_dict(
                {name: weights[f"{number}.{name}"] for name in ("weight", "bias")}
            )
        self.held_out_logits = np.load(done / "held_out_logits.npy", allow_pickle=False)
        with torch.inference_mode():
            self.float_top1 = np.stack(
                [
                    stage.head.classify(torch.from_numpy(values)).argmax(1).numpy()
                    for stage, values in zip(self.stages, self.val_features.values, strict=True)
                ]
            )

    def export(self) -> None:
        def work(folder: Path) -> None:
            stages = self.stages
            steps = len(stages) + 2
            self.progress("export", 0, steps)
            if self.recipe.quantize.mode != "none":
                stages = equalize(stages, self._pixels(self.calibration_paths))
            images = self._pixels(self.train_features.paths[:_PARITY_IMAGES])
            example = torch.from_numpy(images[:1])
            models = []
            (folder / "stages").mkdir(exist_ok=True)
            for number, (stage, file) in enumerate(zip(stages, self.stage_files, strict=True)):
                models.append(export_stage(stage, example))
                onnx.save(models[-1], folder / file)
                with torch.inference_mode():
                    example = stage.tokens(example)
                self.progress("export", number + 2, steps)
            # Against the stages as they were: this proves the equalisation, too.
            error = check_parity(self.stages, models, images)
            write_json(folder / "parity.json", {"max_abs_error": error, "images": len(images)})
            self.progress("export", steps, steps)

        wanted = self.recipe.quantize
        labels, seed = self.train_features.labels, self.recipe.train.seed
        chosen = choose_images(labels, wanted.calibration_images, seed)
        others = np.setdiff1d(np.arange(len(labels)), chosen)
        compared = others[choose_images(labels[others], _COMPARISON_IMAGES, seed)]
        shown = {self.classes[labels[row]] for row in chosen}
        self.calibration_paths = [self.train_features.paths[row] for row in chosen]
        self.comparison_paths = [self.train_features.paths[row] for row in compared]
        self.missing_classes = [name for name in self.classes if name not in shown]
        done = self.folder.step("export", [wanted.mode, wanted.calibration_images], work)
        self.graph_folder = done
        self.float_graphs = {file: onnx.load(done / file) for file in self.stage_files}
        self.float_bytes = sum((done / file).stat().st_size for file in self.stage_files)
        self.macs = [total_macs(graph) for graph in self.float_graphs.values()]
        self.parity = _read_json(done / "parity.json")

    def calibrate(self) -> None:
        self.table: CalibrationTable | None = None
        if self.recipe.quantize.mode == "none":
            return

        def work(folder: Path) -> None:
            threads = torch.get_num_threads()
            calibration = calibrate(
                self.float_graphs,
                self._pixels(self.calibration_paths),
                self.preprocess.hash,
                self.missing_classes,
                threads,
                lambda done, total: self.progress("calibrate", done, total),
            )
            calibrator, candidates = self.recipe.quantize.calibrator, list[Candidate]()
            if calibrator == "auto":
                calibrator = "min-max"  # where every training image is in the calibration set
                if self.comparison_paths:
                    candidates = compare_calibrators(
                        self.float_graphs,
                        calibration,
                        self._pixels(self.comparison_paths),
                        threads,
                        lambda done, total: self.progress("calibrators", done, total),
                    )
                    calibrator = candidates[0].calibrator
            write_json(folder / "calibration.json", calibration.table(calibrator).to_json())
            write_json(folder / "candidates.json", [found.to_json() for found in candidates])
            for file, channels in calibration.means.items():
                (folder / file).parent.mkdir(exist_ok=True)
                save_numpy(channels, folder / f"{file}.means")

        done = self.folder.step("calibrate", self.recipe.quantize.calibrator, work)
        self.table = CalibrationTable.from_json(_read_json(done / "calibration.json"))
        self.candidates = _read_json(done / "candidates.json")
        self.means = {file: load_numpy(done / f"{file}.means") for file in self.stage_files}

    def quantize(self) -> None:
        self.layers: list[dict[str, Any]] = []
        table = self.table
        if table is None:
            return

        def work(folder: Path) -> None:
            graphs, layers = quantize_stages(self.float_graphs, table, self.means)
            (folder / "stages").mkdir(exist_ok=True)
            for file, graph in graphs.items():
                onnx.save(graph, folder / file)
            write_json(folder / "layers.json", [layer.to_json() for layer in layers])
            self.progress("quantize", 1, 1)

        self.graph_folder = self.folder.step("quantize", self.recipe.quantize.mode, work)
        self.layers = _read_json(self.graph_folder / "layers.json")

    def choose_thresholds(self) -> None:
        def work(folder: Path) -> None:
            labels = self.train_features.labels
            # A head that was fitted without a class's only image can't know that class: what it says
            # of the image tells nothing about an exit.
            judged = np.bincount(labels)[labels] > 1
            logits = self.held_out_logits[:, judged]
            policy = choose_thresholds(
                _softmax(logits).max(-1),
                logits.argmax(-1) == labels[judged],
                self.macs,
                self.recipe.exits.max_lost,
            )
            write_json(folder / "policy.json", policy.to_json())
            self.progress("thresholds", 1, 1)

        done = self.folder.step("thresholds", self.recipe.exits.max_lost, work)
        self.policy = ExitPolicy.from_json(_read_json(done / "policy.json"), len(self.stages) - 1)

    def evaluate(self) -> None:
        """Write a candidate bundle and run it on every validation image, as a device would."""
        target = self.recipe.target
        rows = choose_images(self.val_features.labels, target.check_images, self.recipe.train.seed)

        def work(folder: Path) -> None:
            candidate = write_bundle(folder / _CANDIDATE, self._manifest(rows), self._files(rows))
            total = 2 * len(self.val)
            with Classifier.load(candidate, engine=target.engine, threads=target.threads) as loaded:
                evaluation = evaluate(
                    loaded,
                    self.val,
                    skip_corrupt=self.recipe.data.skip_corrupt,
                    progress=lambda done, _: self.progress("evaluate", done, total),
                )
                top1 = []
                for number, path in enumerate(self.val_features.paths):
                    outputs = loaded.cascade.trace(self.preprocess(read_image(path)))
                    top1.append([output.top1 for output in outputs])
                    self.progress("evaluate", len(self.val) + number + 1, total)
            write_json(folder / "evaluation.json", evaluation.to_json())
            np.save(folder / "top1.npy", np.array(top1).T)

        inputs = [asdict(target), usable_cores()]
        done = self.folder.step("evaluate", inputs, work)
        self.candidate = done / _CANDIDATE
        self.evaluation = _read_json(done / "evaluation.json")
        self.bundle_top1 = np.load(done / "top1.npy", allow_pickle=False)

    def benchmark(self) -> None:
        target = self.recipe.target

        def work(folder: Path) -> None:
            count = len(self.val_features.paths)
            rows = np.linspace(0, count - 1, min(count, _BENCHMARK_FRAMES)).astype(int)
            measured = bench(
                self.candidate,
                self._pixels([self.val_features.paths[row] for row in rows]),
                engine=target.engine,
                threads=target.threads,
                rounds=_BENCHMARK_ROUNDS,
                progress=lambda done, total: self.progress("benchmark", done, total),
            )
            write_json(folder / "benchmark.json", measured.to_json())

        done = self.folder.step("benchmark", [asdict(target), usable_cores()], work)
        self.measured = _read_json(done / "benchmark.json")

    def finish(self, allow_over_budget: bool) -> Outcome:
        """Write the report, then the bundle if it is within the budget."""
        root = self.folder.root
        found = self._measurements()
        report = build_report(found)
        write_json(root / "report.json", report)
        write_report(report, root / "report.html")
        bundle = root / "bundle.evb"
        if not found.within_budget and not allow_over_budget:
            bundle.unlink(missing_ok=True)
            raise BudgetExceededError(
                f"the bundle loses {found.drop_points:.2f} points of accuracy and the budget is "
                f"{self.recipe.budget.max_drop_points:g}, so none was written; see "
                f"{root / 'report.html'}, then lower exits.max_lost, calibrate on more images or "
                "raise budget.max_drop_points"
            )
        candidate = Bundle.load(self.candidate)
        files = {name: candidate.read(name) for name in candidate.manifest["files"]}
        files["report.json"] = json.dumps(report, indent=1).encode()
        manifest = {**candidate.manifest, "over_budget": not found.within_budget}
        write_bundle(bundle, manifest, files)
        return Outcome(bundle, report, root / "report.html")

    def _measurements(self) -> Measurements:
        trained = set(self.train_hashes.values())
        return Measurements(
            recipe=self.recipe,
            classes=self.classes,
            train_images=len(self.train_features.labels),
            val_images_in_train=sum(digest in trained for digest in self.val_hashes.values()),
            lone_classes=tuple(
                self.classes[label]
                for label, count in enumerate(np.bincount(self.train_features.labels))
                if count == 1
            ),
            skipped=(*self.train_features.skipped, *self.val_features.skipped),
            exit_blocks=tuple(stage.exit_block for stage in self.stages),
            policy=self.policy,
            labels=self.val_features.labels,
            float_top1=self.float_top1,
            bundle_top1=self.bundle_top1,
            evaluation=self.evaluation,
            benchmark=self.measured,
            layers=self.layers,
            macs=sum(self.macs),
            calibration=None
            if self.table is None
            else {
                **self.table.evidence(),
                "comparison_images": len(self.comparison_paths) if self.candidates else 0,
                "candidates": self.candidates,
            },
            parity=self.parity,
            float_bytes=self.float_bytes,
            bundle_bytes=self.candidate.stat().st_size,
            seconds=self.folder.seconds,
        )

    def _manifest(self, check_rows: np.ndarray) -> dict[str, Any]:
        model = self.recipe.model
        precision = "float32" if self.table is None else "int8"
        manifest: dict[str, Any] = {
            "name": run_name(self.recipe),
            "created_by": f"edgevit {__version__}",
            "model": {
                "name": model.name,
                "image_size": model.image_size,
                "patch_size": model.patch_size,
            },
            "labels": list(self.classes),
            "preprocess": self.preprocess.to_json(),
            "policy": self.policy.to_json(),
            "stages": [
                {
                    "file": file,
                    "exit_block": stage.exit_block,
                    "precision": precision,
                    "macs": macs,
                }
                for file, stage, macs in zip(self.stage_files, self.stages, self.macs, strict=True)
            ],
            "check_images": [
                {"file": f"check/{number:04d}.png", "label": int(self.val_features.labels[row])}
                for number, row in enumerate(check_rows)
            ],
        }
        if self.table is not None:
            manifest["calibration"] = self.table.evidence()
        return manifest

    def _files(self, check_rows: np.ndarray) -> dict[str, bytes]:
        files = {file: (self.graph_folder / file).read_bytes() for file in self.stage_files}
        if self.table is not None:
            files["calibration.json"] = json.dumps(self.table.to_json(), indent=1).encode()
        images = self._pixels([self.val_features.paths[row] for row in check_rows])
        for number, image in enumerate(images):
            png = cv2.imencode(".png", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))[1]
            files[f"check/{number:04d}.png"] = png.tobytes()
        return files

    def _pixels(self, paths: Sequence[Path]) -> np.ndarray:
        """``uint8 [n, S, S, 3]`` RGB."""
        size = self.preprocess.size
        found = [self.preprocess(read_image(path)) for path in paths]
        return np.stack(found) if found else np.zeros((0, size, size, 3), np.uint8)


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities: np.ndarray = shifted / shifted.sum(-1, keepdims=True)
    return probabilities


def _file_hashes(folder: ImageFolder) -> dict[str, str]:
    """The sha256 of each image by its name below the folder."""
    try:
        return {
            str(path.relative_to(folder.root)): _sha256(path.read_bytes()) for path in folder.paths
        }
    except OSError as error:
        raise DataError(f"can't read {error.filename}: {error.strerror}") from None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
