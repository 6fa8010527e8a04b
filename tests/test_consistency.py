"""One preprocessing and one accuracy: training, calibration, eval and run see the same pixels, and
the bundle's figure is what the runtime reaches."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from edgevit import Classifier, cli, pipeline
from edgevit.compress import features
from edgevit.engines.onnxruntime import OnnxRuntimeStage
from edgevit.images import ImageFolder, read_image
from edgevit.recipe import load_recipe

SIZE = 32
EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Made:
    """A compressed model, the photographs that are both its train and its val folder, others of the
    same classes, and the images that reached the model in training, in order."""

    bundle: Path
    report: dict[str, Any]
    folder: Path
    others: Path
    trained_on: list[bytes]


def write_photographs(folder: Path, seed: int) -> None:
    """Every kind of file that a decoder or a resize could treat in its own way, in two classes that
    are hard to tell apart, so that answers are wrong and exits differ."""
    generator = np.random.default_rng(seed)
    for shade, name in ((0, "dark"), (4, "light")):
        (folder / name).mkdir(parents=True)
        for number, (height, width) in enumerate([(48, 64), (64, 48), (31, 33), (200, 40)] * 2):
            pixels = generator.integers(shade, shade + 252, (height, width, 3), np.uint8)
            image = Image.fromarray(pixels)
            image.save(folder / name / f"{number}.{('png', 'jpg')[number % 2]}")
        exif = Image.Exif()
        exif[EXIF_ORIENTATION] = 6
        image.save(folder / name / "turned.jpg", exif=exif)
        image.convert("L").save(folder / name / "grey.png")
        image.convert("CMYK").save(folder / name / "cmyk.jpg")
        image.convert("RGBA").save(folder / name / "rgba.png")
        Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257).save(folder / name / "deep.png")
        Image.fromarray(pixels[:1, :1]).save(folder / name / "pixel.png")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The whole pipeline on a small backbone of random weights."""
    root = tmp_path_factory.mktemp("consistency")
    write_photographs(root / "photographs", 0)
    write_photographs(root / "others", 1)
    torch.manual_seed(0)
    backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    save_file(backbone.state_dict(), root / "weights.safetensors")
    (root / "recipe.toml").write_text(
        f"""
        [model]
        name = "vit_tiny_patch16_224"
        checkpoint = "weights.safetensors"
        image_size = {SIZE}
        [data]
        train = "photographs"
        val = "photographs"
        [train]
        folds = 2
        [quantize]
        calibration_images = 1000
        [exits]
        blocks = [2, 4]
        max_lost = 0.2
        [target]
        engine = "onnxruntime"
        threads = 1
        """
    )
    trained_on: list[bytes] = []
    exit_features = features.exit_features

    def recording(stages: Any, images: np.ndarray) -> np.ndarray:
        trained_on.extend(image.tobytes() for image in images)
        return exit_features(stages, images)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "exit_features", recording)
        outcome = pipeline.compress(
            load_recipe(root / "recipe.toml"), root / "out", allow_over_budget=True
        )
    return Made(outcome.bundle, outcome.report, root / "photographs", root / "others", trained_on)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The images that reach the first stage, in order; without the blank one of the warm-up."""
    images: list[bytes] = []
    run = OnnxRuntimeStage.run

    def recording(self: OnnxRuntimeStage, value: Any) -> Any:
        if value.shape == (1, SIZE, SIZE, 3) and value.any():
            assert value.dtype == np.uint8
            images.append(value.tobytes())
        return run(self, value)

    monkeypatch.setattr(OnnxRuntimeStage, "run", recording)
    return images


def test_every_path_sees_identical_pixels(
    made: Made, seen: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    images = len(ImageFolder.scan(made.folder))
    words = ["--engine", "onnxruntime"]

    assert cli.main(["eval", str(made.bundle), "--data", str(made.folder), *words]) == 0
    evaluated = list(seen)
    assert len(evaluated) == images
    assert len(set(evaluated)) > images / 2  # the recording is of pictures, not of one buffer

    seen.clear()
    assert cli.main(["run", str(made.bundle), "--source", str(made.folder), *words]) == 0
    assert sorted(seen) == sorted(evaluated)

    # The same folder was train and val: once for each.
    assert made.trained_on == evaluated * 2

    capsys.readouterr()
    assert cli.main(["inspect", str(made.bundle), "--json"]) == 0
    calibration = json.loads(capsys.readouterr().out)["calibration"]
    assert calibration["images"] == images  # all of them, in the folder's order
    assert calibration["images_sha256"] == hashlib.sha256(b"".join(evaluated)).hexdigest()


def test_check_images_are_those_pixels(made: Made, seen: list[bytes]) -> None:
    """What the device benchmarks and tests itself with has been through the same code."""
    with Classifier.load(made.bundle, engine="onnxruntime") as classifier:
        for path in ImageFolder.scan(made.folder).paths:
            classifier(read_image(path))
        bundle = classifier.bundle
    assert bundle.check_images
    for image in bundle.check_images:
        pixels = np.asarray(Image.open(io.BytesIO(bundle.read(image.file))))
        assert pixels.tobytes() in seen


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_eval_and_a_loop_through_the_classifier_agree_exactly(
    engine: str, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(engine)
    words = ["--engine", engine, "--threads", "1", "--json"]
    assert cli.main(["eval", str(made.bundle), "--data", str(made.others), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    right, exits = 0, [0, 0, 0]
    with Classifier.load(made.bundle, engine=engine, threads=1) as classifier:
        for folder in sorted(made.others.iterdir()):
            for path in sorted(folder.iterdir()):
                result = classifier(read_image(path))
                right += result.label == folder.name
                exits[result.exit - 1] += 1
    n = sum(exits)
    assert (found["n"], found["top1"], found["exit_counts"]) == (n, right / n, exits)
    assert found["mean_stages"] == (exits[0] + 2 * exits[1] + 3 * exits[2]) / n
    assert found["engine"] == engine
    assert 0 < right < n and sum(count > 0 for count in exits) > 1  # the agreement says something


def test_the_reports_figure_is_the_runtimes(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--engine", "onnxruntime", "--threads", "1", "--json"]
    assert cli.main(["eval", str(made.bundle), "--data", str(made.folder), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    for key in ("n", "top1", "mean_stages", "exit_counts", "engine"):
        assert made.report["bundle"][key] == found[key]
