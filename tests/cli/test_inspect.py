from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from edgevit import cli
from edgevit.bundle import write_bundle


def rewritten(bundle: Path, path: Path, **changes: Any) -> Path:
    """A copy of ``bundle`` with other values in its manifest."""
    with zipfile.ZipFile(bundle) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        files = {name: archive.read(name) for name in manifest.pop("files")}
    return write_bundle(path, {**manifest, **changes}, files)


def test_json(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tiny_bundle), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert not captured.err
    with zipfile.ZipFile(tiny_bundle) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        manifest = json.loads(archive.read("manifest.json"))
    assert found["labels"] == ["red", "green", "blue"]
    assert found["size_bytes"] == len(tiny_bundle.read_bytes())
    assert found["files_verified"] == len(sizes) - 1  # all but the manifest, which lists them
    assert found["stages"] == [
        {
            "file": f"stages/{number}.onnx",
            "exit_block": number,
            "precision": "float32",
            "macs": 12 if number == 1 else 9,
            "bytes": sizes[f"stages/{number}.onnx"],
        }
        for number in (1, 2, 3)
    ]
    assert found["policy"] == {"score": "max_softmax", "thresholds": [0.7, 0.9]}
    assert found["preprocess"] == manifest["preprocess"]
    assert found["check_images"] == 3
    assert found["calibration"] is None
    assert found["over_budget"] is False


def test_for_a_person(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tiny_bundle)]) == 0
    out = capsys.readouterr().out
    for said in ("red, green, blue", "every hash is right", "stages/3.onnx", "0.7000", "always"):
        assert said in out
    assert "BUDGET" not in out


def test_calibration_and_budget(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence = {"calibrator": "min-max", "images": 128, "tensors": 62, "graphs": {"a": "b"}}
    changed = rewritten(
        tiny_bundle,
        tmp_path / "b.evb",
        calibration=evidence,
        over_budget=True,
        policy={"score": "max_softmax", "thresholds": [2.0, 0.5]},
    )
    assert cli.main(["inspect", str(changed), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["calibration"] == evidence
    assert found["over_budget"] is True
    assert cli.main(["inspect", str(changed)]) == 0
    out = capsys.readouterr().out
    assert "calibrator min-max, images 128, tensors 62" in out
    assert "OVER BUDGET" in out
    assert "never" in out and "0.5000" in out


@pytest.mark.parametrize("value", [None, 3, "x", [1], {}, {"name": {"a": 1}}])
def test_parts_that_are_not_needed_to_run_may_be_anything(
    value: object, tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = rewritten(
        tiny_bundle,
        tmp_path / "b.evb",
        model=value,
        created_by=value,
        calibration=value,
        over_budget=value,
    )
    assert cli.main(["inspect", str(odd)]) == 0
    assert cli.main(["inspect", str(odd), "--json"]) == 0
    assert "BUDGET" not in capsys.readouterr().out


def test_one_wrong_byte_is_found_and_named(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(tiny_bundle) as archive:
        content = archive.read("stages/2.onnx")
    data = bytearray(tiny_bundle.read_bytes())
    start = data.index(content)
    data[start + len(content) // 2] ^= 1
    broken = tmp_path / "broken.evb"
    broken.write_bytes(data)
    assert cli.main(["inspect", str(broken)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "stages/2.onnx" in captured.err and captured.err.count("\n") == 1


def test_needs_no_engine(tiny_bundle: Path) -> None:
    """A bundle can be checked where nothing that runs it is installed."""
    digest = hashlib.sha256(tiny_bundle.read_bytes()).hexdigest()
    program = (
        "import sys\n"
        "for name in ('onnxruntime', 'openvino', 'torch', 'onnx', 'rich'): sys.modules[name] = None\n"
        "from edgevit.cli import main\n"
        "sys.exit(main())"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(tiny_bundle)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert hashlib.sha256(tiny_bundle.read_bytes()).hexdigest() == digest
