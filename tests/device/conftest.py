from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

ROOT = Path(__file__).resolve().parents[2]

Device = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    """Runs Python 3.8 with given arguments, as on a device: numpy, OpenCV, ONNX Runtime and edgevit.

    The environment is made from the ranges in pyproject.toml on first use (about a minute, from the
    package index) and kept in the user's cache folder.
    """
    python = environment_with(device_requirements(), find_python38())
    cache = tmp_path_factory.mktemp("cache")

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        # No environment variable of the test run may lend the device a package.
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": str(cache),
        }
        return subprocess.run(
            [python, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=cache,
            env=environment,
        )

    return run


def find_python38() -> str:
    """A real CPython 3.8; skips where there is none."""
    candidates = sorted(map(str, pyenv_versions().glob("3.8*/bin/python3.8")), reverse=True)
    # On the PATH it may be a shim of pyenv that only says that 3.8 is not active: hence the try.
    candidates += [found for found in [shutil.which("python3.8")] if found]
    for candidate in candidates:
        done = subprocess.run(
            [candidate, "-c", "import sys; print(sys.implementation.name, *sys.version_info[:2])"],
            capture_output=True,
            text=True,
        )
        if done.stdout.split() == ["cpython", "3", "8"]:
            return candidate
    pytest.skip("no CPython 3.8 here, neither from pyenv nor as python3.8 on the PATH")


def pyenv_versions() -> Path:
    root = os.environ.get("PYENV_ROOT")
    return (Path(root) if root else Path.home() / ".pyenv") / "versions"


def device_requirements() -> list[str]:
    """What ``pip install edgevit[cpu]`` asks for."""
    project = read_toml(ROOT / "pyproject.toml")["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["cpu"]]


def read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))


def environment_with(requirements: list[str], python: str) -> str:
    """The interpreter of a virtual environment that holds ``requirements`` and nothing else."""
    identity = hashlib.sha256("\n".join([python, *requirements]).encode()).hexdigest()[:12]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgevit-tests"
    base.mkdir(parents=True, exist_ok=True)
    folder = base / f"py38-{identity}"
    whole = folder / "whole"
    with (base / f"py38-{identity}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test run may be making it
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            run_or_fail(python, "-m", "venv", str(folder))
            install = ("-m", "pip", "install", "--only-binary=:all:")
            run_or_fail(str(folder / "bin/python"), *install, *requirements)
            whole.touch()
    return str(folder / "bin/python")


def run_or_fail(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}:\n{done.stdout[-2000:]}", pytrace=False)
