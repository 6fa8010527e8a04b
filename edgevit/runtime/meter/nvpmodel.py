"""The power mode of a Jetson, from NVIDIA's nvpmodel."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Optional

from edgevit.runtime.meter.reading import Reading
from edgevit.runtime.meter.source import SourceUnavailableError


class NvpmodelSource:
    """The mode at the time of opening: asking starts a program, and a change takes root."""

    name = "nvpmodel"

    def __init__(self, program: str = "nvpmodel") -> None:
        path = shutil.which(program)
        if path is None:
            raise SourceUnavailableError("not installed")
        try:
            done = subprocess.run(  # noqa: S603  # NVIDIA's program, with fixed arguments
                [path, "-q"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=5,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SourceUnavailableError(f"can't be asked: {error}") from error
        self._mode = parse_mode(done.stdout)
        if self._mode is None:
            raise SourceUnavailableError("names no power mode")

    def read(self) -> Reading:
        return Reading(power_mode=self._mode)

    def close(self) -> None:
        """Holds nothing open."""


def parse_mode(output: str) -> Optional[str]:
    """The mode's name in what ``nvpmodel -q`` prints: ``NV Power Mode: MODE_15W_6CORE``."""
    found = re.search(r"NV Power Mode:[ \t]*(\S+)", output)
    return found.group(1) if found else None
