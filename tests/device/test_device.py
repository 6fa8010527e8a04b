"""The device half on the oldest Python and with the fewest packages that a device has."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import cv2
import numpy as np
import pytest

from edgevit.policy import ExitPolicy
from tests.device.conftest import ROOT, Device, environment_with, find_python38
from tests.tiny_bundle import GAINS, LABELS, expected, picture

WORKSTATION = ("compress", "deploy", "report", "pipeline")

DEVICE_MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).replace(".__init__", "")
    for path in (ROOT / "edgevit").rglob("*.py")
    if path.relative_to(ROOT / "edgevit").parts[0] not in WORKSTATION
    and path.relative_to(ROOT / "edgevit").with_suffix("").parts[0] not in WORKSTATION
    and path.name != "__main__.py"
)

# Leave at exits 1, 2 and 3.
PICTURES = [picture(label, strength) for strength in (1.0, 0.6, 0.2) for label in range(3)]


def decide(frame_bgr: np.ndarray) -> tuple[int, int, float]:
    """Label, exit and confidence, by arithmetic."""
    policy = ExitPolicy((0.7, 0.9))
    for stage in range(len(GAINS)):
        label, confidence = expected(frame_bgr, stage)
        if policy.leaves_at(stage, confidence):
            return label, stage + 1, confidence
    raise AssertionError("the last stage always ends it")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``PICTURES``, one folder a class."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, frame in enumerate(PICTURES):
        path = folder / LABELS[number % 3] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(path), frame)
    return folder


def test_it_is_a_bare_python_38(device: Device) -> None:
    script = (
        "import importlib.util, sys\n"
        "names = 'torch torchvision timm onnx safetensors jinja2 numpy cv2 onnxruntime edgevit'.split()\n"
        "print(sys.version.split()[0], [name for name in names if importlib.util.find_spec(name)])"
    )
    done = device("-c", script)
    assert re.match(r"3\.8\.", done.stdout), done.stderr
    assert done.stdout.split(" ", 1)[1].strip() == "['numpy', 'cv2', 'onnxruntime', 'edgevit']"


def test_every_module_of_the_device_half_imports(device: Device) -> None:
    assert "edgevit.runtime.classifier" in DEVICE_MODULES
    assert "edgevit.cli.run" in DEVICE_MODULES
    script = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__name__)"
    done = device("-W", "error", "-c", script, *DEVICE_MODULES)
    assert done.stdout.split() == DEVICE_MODULES, done.stderr


def test_the_public_names_are_there(device: Device) -> None:
    done = device("-c", "from edgevit import Classifier, Result, __version__; print(__version__)")
    assert done.returncode == 0, done.stderr


def test_a_classifier_gives_the_right_answers(
    device: Device, tiny_bundle: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "frames.npy", np.stack(PICTURES))
    script = (
        "import json, sys\n"
        "import numpy as np\n"
        "from edgevit import Classifier\n"
        "with Classifier.load(sys.argv[1], threads=1) as classifier:\n"
        "    for frame in np.load(sys.argv[2]):\n"
        "        found = classifier(frame)\n"
        "        print(json.dumps([found.index, found.exit, found.score, found.label]))\n"
    )
    done = device("-c", script, tiny_bundle, tmp_path / "frames.npy")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    decided = [decide(frame) for frame in PICTURES]
    assert {exit_ for _, exit_, _ in decided} == {1, 2, 3}
    assert [line[:2] for line in found] == [[label, exit_] for label, exit_, _ in decided]
    assert [line[2] for line in found] == pytest.approx([c for *_, c in decided], abs=1e-5)
    assert [line[3] for line in found] == [LABELS[label] for label, *_ in decided]


def test_run(device: Device, tiny_bundle: Path, pictures: Path) -> None:
    done = device("-m", "edgevit", "run", tiny_bundle, "--source", pictures, "--json-lines")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    frames = [cv2.imread(str(path)) for path in sorted(pictures.rglob("*.png"))]
    decided = [decide(frame) for frame in frames]
    assert [(line["label"], line["exit"]) for line in found] == [
        (LABELS[label], exit_) for label, exit_, _ in decided
    ]


def test_eval(device: Device, tiny_bundle: Path, pictures: Path) -> None:
    done = device("-m", "edgevit", "eval", tiny_bundle, "--data", pictures, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    exits = [exit_ for _, exit_, _ in map(decide, PICTURES)]
    assert found["engine"] == "onnxruntime"
    assert (found["n"], found["top1"]) == (len(PICTURES), 1.0)
    assert found["exit_counts"] == [exits.count(number) for number in (1, 2, 3)]
    assert found["mean_stages"] == pytest.approx(sum(exits) / len(exits))


def test_inspect(device: Device, tiny_bundle: Path) -> None:
    done = device("-m", "edgevit", "inspect", tiny_bundle, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["labels"] == list(LABELS)


@pytest.mark.parametrize("command", ["compress", "eval", "run", "inspect", "bench"])
def test_help_of_every_command(device: Device, command: str) -> None:
    done = device("-m", "edgevit", command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"edgevit {command}" in done.stdout


def test_compressing_says_what_it_needs(device: Device, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("[model]\nname = 'vit'\n[data]\ntrain = 'a'\nval = 'b'\n")
    done = device("-m", "edgevit", "compress", tmp_path / "recipe.toml", "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "edgevit[workstation]" in done.stderr


def test_a_missing_engine_says_what_to_install(device: Device, tiny_bundle: Path) -> None:
    done = device("-m", "edgevit", "inspect", tiny_bundle)
    assert done.returncode == 0, done.stderr
    done = device("-m", "edgevit", "run", tiny_bundle, "--source", "0", "--engine", "openvino")
    assert done.returncode == 2
    assert "pip install openvino" in done.stderr


def test_a_damaged_bundle_is_one_line(device: Device, tiny_bundle: Path, tmp_path: Path) -> None:
    data = tiny_bundle.read_bytes()
    damaged = tmp_path / "damaged.evb"
    position = data.index(b"stages/2.onnx") + 40
    for content in (data[: len(data) // 2], data[:position] + b"\xff" + data[position + 1 :]):
        damaged.write_bytes(content)
        done = device("-m", "edgevit", "inspect", damaged)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert "damaged.evb" in done.stderr


def test_an_environment_that_was_left_half_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = find_python38()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel = write_wheel(tmp_path)
    made = Path(environment_with([str(wheel)], python))
    module = made.parents[1] / "lib/python3.8/site-packages/thing.py"
    assert module.is_file()
    # As a kill leaves it: part of the files, and no mark that says it is whole.
    module.unlink()
    (made.parents[1] / "whole").unlink()
    assert environment_with([str(wheel)], python) == str(made)
    assert module.is_file()
    # A whole one is used as it is.
    module.unlink()
    assert environment_with([str(wheel)], python) == str(made)
    assert not module.exists()


def write_wheel(folder: Path) -> Path:
    """A package of one empty module, so that installing needs no package index."""
    path = folder / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing.py", "")
        archive.writestr(
            "thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"
        )
        archive.writestr(
            "thing-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("thing-1.0.dist-info/RECORD", "")
    return path
