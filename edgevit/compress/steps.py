"""A run's folder: one sub-folder a step, so that a run can stop anywhere and go on.

A step writes into ``NN-name.partial`` and the folder loses that suffix when the step is whole: a
folder with its final name is complete, whatever happened to the process or the power.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgevit import __version__
from edgevit.errors import UserError

_RECORD = "step.json"
# All that a run leaves which ended before its first step.
_LOCK = ".lock"


class RunFolder:
    """Runs steps in order and skips those that are done and whose inputs are unchanged."""

    def __init__(self, root: Path, *, resume: bool) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            held = {entry.name for entry in root.iterdir()} - {_LOCK}
            if held and not resume:
                raise UserError(
                    f"{root} is not empty; add --resume to go on with the run there, or choose another --out"
                )
            self._lock = (root / _LOCK).open("w")
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{root} is a file or below one; choose another --out") from None
        except OSError as error:
            raise UserError(f"can't write to the folder {root}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process
        except BlockingIOError:
            raise UserError(
                f"another run is writing to {root}; wait for it, or choose another --out"
            ) from None
        self.root = root
        self.seconds: dict[str, float] = {}
        self._key = ""

    def step(self, name: str, inputs: Any, work: Callable[[Path], None]) -> Path:
        """Do one step and return its folder.

        ``inputs`` is everything that decides the result, as JSON values; what came before counts by
        itself. ``work`` fills the folder it gets, which holds what an interrupted try left there if
        that had the same inputs.
        """
        number = len(self.seconds) + 1
        folder = self.root / f"{number:02d}-{name}"
        partial = folder.with_name(f"{folder.name}.partial")
        self._key = hashlib.sha256(
            json.dumps([__version__, self._key, name, inputs], sort_keys=True).encode()
        ).hexdigest()
        record = _read(folder / _RECORD)
        if record.get("key") == self._key:
            self.seconds[name] = float(record["seconds"])
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        before = _read(partial / _RECORD)
        if before.get("key") != self._key:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            before = {"key": self._key, "seconds": 0.0}
            write_json(partial / _RECORD, before)
        started = time.perf_counter()
        try:
            work(partial)
        finally:
            seconds = round(before["seconds"] + time.perf_counter() - started, 2)
            write_json(partial / _RECORD, {"key": self._key, "seconds": seconds})
        partial.rename(folder)
        self.seconds[name] = seconds
        return folder


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
