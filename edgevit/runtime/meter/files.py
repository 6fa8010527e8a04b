"""Reading the one-value files of /proc and /sys."""

from __future__ import annotations

from pathlib import Path
from typing import Optional


def text(path: Path) -> Optional[str]:
    """What the file says, without surrounding blanks; None where it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n\t ")
    except OSError:
        return None


def number(path: Path) -> Optional[float]:
    """The number at the start of the file; None where it can't be read or has none."""
    words = (text(path) or "").split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None
