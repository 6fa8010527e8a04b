"""`edgevit compress`: bad input, Ctrl-C and what it prints. What it makes is in test_pipeline.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from edgevit import cli, pipeline
from tests.colours import CLASSES, TRAIN_IMAGES, fake_bench, write_task

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    write_task(root)
    return root


@pytest.fixture
def task(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that a run needs, to spoil."""
    monkeypatch.delenv("EDGEVIT_DEBUG", raising=False)
    monkeypatch.setattr(pipeline, "bench", fake_bench)
    shutil.copytree(template, tmp_path / "task")
    return tmp_path / "task"


def compress(task: Path, *words: str) -> int:
    out = [] if "--out" in words else ["--out", str(task / "out")]
    return cli.main(["compress", str(task / "colours.toml"), *out, *words])


def refused(task: Path, capsys: Captured, *words: str) -> str:
    """The error of a run that must end with status 2 before its first step: one line, alone."""
    assert compress(task, *words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:9]) == ("", 1, "edgevit: ")
    assert not list((task / "out").glob("[0-9]*"))
    return err


def stopped(task: Path, capsys: Captured, *words: str) -> str:
    """The error of a run that must end with status 2 in one of its steps: one line, the last, after
    the lines that tell of progress."""
    assert compress(task, *words) == 2
    out, err = capsys.readouterr()
    *progress, last = err.splitlines()
    assert not out and "Traceback" not in err
    assert all(" of " in line and not line.startswith("edgevit: ") for line in progress), err
    assert last.startswith("edgevit: ")
    assert not list((task / "out").glob("bundle*")) and not list((task / "out").glob("report*"))
    return last


# Mistakes that are found at once.


def test_a_misspelt_key(task: Path, capsys: Captured) -> None:
    recipe = task / "colours.toml"
    recipe.write_text(recipe.read_text().replace("folds", "fold"))
    line = 1 + recipe.read_text().splitlines().index("        fold = 2")
    error = refused(task, capsys)
    assert f"{recipe}, line {line}" in error and "'fold'" in error and "'folds'" in error
    assert not (task / "out").exists()


def test_a_misspelt_override(task: Path, capsys: Captured) -> None:
    error = refused(task, capsys, "--set", "exits.block=[3]")
    assert "--set exits.block=[3]" in error and "'blocks'" in error


def test_no_recipe(task: Path, capsys: Captured) -> None:
    (task / "colours.toml").unlink()
    assert str(task / "colours.toml") in refused(task, capsys)


@pytest.mark.parametrize("split", ["train", "val"])
def test_no_folder(split: str, task: Path, capsys: Captured) -> None:
    shutil.rmtree(task / split)
    assert str(task / split) in refused(task, capsys)


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_empty_class_folder(split: str, task: Path, capsys: Captured) -> None:
    for path in (task / split / "green").iterdir():
        path.unlink()
    (task / split / "green" / "notes.txt").write_text("to do")
    assert f"{task / split / 'green'} holds no images" in refused(task, capsys)


def test_a_class_that_train_lacks(task: Path, capsys: Captured) -> None:
    (task / "val" / "red").rename(task / "val" / "crimson")
    error = refused(task, capsys)
    assert str(task / "val") in error and "crimson" in error and "red" in error


def test_one_class(task: Path, capsys: Captured) -> None:
    for split in ("train", "val"):
        for name in CLASSES[1:]:
            shutil.rmtree(task / split / name)
    error = refused(task, capsys)
    assert str(task / "train") in error and "two" in error


def test_after_such_a_mistake_the_same_command_is_right(task: Path, capsys: Captured) -> None:
    """It left nothing that would need --resume."""
    (task / "val").rename(task / "away")
    refused(task, capsys)
    (task / "away").rename(task / "val")
    (task / "train" / "red").rename(task / "train" / "crimson")
    assert "red" in refused(task, capsys)  # and not that the folder is in use


def test_an_out_that_holds_something(task: Path, capsys: Captured) -> None:
    (task / "out").mkdir()
    (task / "out" / "thesis.tex").write_text("all my work")
    error = refused(task, capsys)
    assert str(task / "out") in error and "--resume" in error
    assert [path.name for path in (task / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("below", [False, True])
def test_an_out_that_is_a_file(below: bool, task: Path, capsys: Captured) -> None:
    (task / "plain").write_text("text")
    out = task / "plain" / "deeper" if below else task / "plain"
    error = refused(task, capsys, "--out", str(out))
    assert str(out) in error and "another --out" in error
    assert (task / "plain").read_text() == "text"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nobody may write")
def test_an_out_where_nobody_may_write(task: Path, capsys: Captured) -> None:
    assert "/proc/edgevit/out" in refused(task, capsys, "--out", "/proc/edgevit/out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_out_without_permission(task: Path, capsys: Captured) -> None:
    (task / "locked").mkdir(mode=0o500)
    out = task / "locked" / "out"
    error = refused(task, capsys, "--out", str(out))
    assert str(out) in error and "Permission denied" in error


def test_a_name_that_is_too_long(task: Path, capsys: Captured) -> None:
    assert "too long" in refused(task, capsys, "--out", str(task / ("x" * 300)))


# Mistakes that a step finds.


def test_an_unknown_model(task: Path, capsys: Captured) -> None:
    error = stopped(task, capsys, "--set", "model.name=vit_tinny_patch16_224")
    assert "'vit_tinny_patch16_224'" in error and "vit_tiny_patch16_224" in error


def test_a_model_that_is_no_vision_transformer(task: Path, capsys: Captured) -> None:
    assert "'resnet18'" in stopped(task, capsys, "--set", "model.name=resnet18")


def test_no_checkpoint(task: Path, capsys: Captured) -> None:
    (task / "weights.safetensors").unlink()
    assert str(task / "weights.safetensors") in stopped(task, capsys)


def test_a_checkpoint_cut_short(task: Path, capsys: Captured) -> None:
    os.truncate(task / "weights.safetensors", 100_000)
    assert str(task / "weights.safetensors") in stopped(task, capsys)


def test_a_checkpoint_that_does_not_fit(task: Path, capsys: Captured) -> None:
    other = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=2)
    state = {**other.state_dict(), "adapter.weight": torch.zeros(2)}
    save_file(state, task / "weights.safetensors")
    error = stopped(task, capsys)
    assert str(task / "weights.safetensors") in error
    assert "blocks.2.norm1.weight" in error and "unknown: adapter.weight" in error


@pytest.mark.parametrize("block", [12, 13])
def test_an_exit_behind_the_backbone(block: int, task: Path, capsys: Captured) -> None:
    error = stopped(task, capsys, "--set", f"exits.blocks=[4,{block}]")
    assert "exits.blocks" in error and f"holds {block}" in error and "1 to 11" in error


@pytest.fixture
def corrupt(task: Path) -> Path:
    """A JPEG in the training folder of which the second half is missing."""
    path = task / "train" / "red" / "broken.jpg"
    Image.open(task / "train" / "red" / "00.png").save(path)
    os.truncate(path, path.stat().st_size // 2)
    return path


def test_a_corrupt_jpeg_is_named(task: Path, corrupt: Path, capsys: Captured) -> None:
    error = stopped(task, capsys)
    assert str(corrupt) in error and "data.skip_corrupt = true" in error


def test_a_corrupt_jpeg_is_skipped_on_request_and_counted(
    task: Path, corrupt: Path, capsys: Captured
) -> None:
    assert compress(task, "--set", "data.skip_corrupt=true") == 0
    out, _ = capsys.readouterr()
    report = json.loads((task / "out" / "report.json").read_text())
    assert report["data"]["skipped"] == [str(corrupt)]
    assert report["data"]["train"] == len(CLASSES) * TRAIN_IMAGES
    skipped = [line for line in out.splitlines() if line.startswith("skipped")]
    assert skipped == ["skipped 1 image that can't be read"]
    # For people there is where things are; for programs one object and nothing else.
    assert str(task / "out" / "bundle.evb") in out and str(task / "out" / "report.html") in out
    assert compress(task, "--set", "data.skip_corrupt=true", "--resume", "--json") == 0
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1
    again = json.loads(out)
    assert again["bundle"] == report["bundle"] and again["data"] == report["data"]


# Ctrl-C.


@pytest.fixture
def interrupted(task: Path) -> tuple[int, str, str]:
    """Status and output of a run that got Ctrl-C when its first step was done."""
    words = ["compress", str(task / "colours.toml"), "--out", str(task / "out")]
    with subprocess.Popen(
        [sys.executable, "-m", "edgevit", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if (task / "out" / "01-model").exists():
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_ctrl_c_says_what_is_kept_and_resume_goes_on(
    interrupted: tuple[int, str, str], task: Path, capsys: Captured
) -> None:
    status, out, err = interrupted
    assert (status, out) == (130, "")
    last = err.splitlines()[-1]
    assert last.startswith("edgevit: interrupted; ")
    assert str(task / "out") in last and "--resume" in last and "Traceback" not in err
    assert not list((task / "out").glob("bundle*"))

    assert compress(task) == 2  # not by accident over what was kept
    assert "--resume" in capsys.readouterr().err
    (task / "out" / "01-model" / "old").touch()
    assert compress(task, "--resume") == 0
    assert (task / "out" / "01-model" / "old").exists()  # it was not done again
    assert (task / "out" / "bundle.evb").is_file()


def test_odd_file_names_and_a_class_with_one_image_are_reported(
    task: Path, tmp_path: Path, capsys: Captured
) -> None:
    """Names that are no text must not end a run in its last step."""
    recipe = task / "odd\nname.toml"
    (task / "colours.toml").rename(recipe)
    for path in sorted((task / "train" / "red").iterdir())[1:]:
        path.unlink()
    Path(os.fsdecode(bytes(task / "train" / "blue") + b"/bad\xff.jpg")).touch()
    out = tmp_path / "out"
    status = cli.main(
        f"compress@{recipe}@--out@{out}@--allow-over-budget@--set@data.skip_corrupt=true".split("@")
    )
    printed = capsys.readouterr()
    assert status == 0, printed.err
    report = json.loads((out / "report.json").read_text())
    assert report["name"] == "odd?name"
    assert report["data"]["lone_classes"] == ["red"]
    assert "bad?.jpg" in report["data"]["skipped"][0]
    assert "one training image for red" in printed.out
