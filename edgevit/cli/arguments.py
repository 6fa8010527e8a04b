"""Arguments that several commands take, spelt and checked alike."""

from __future__ import annotations

import argparse
from typing import Callable


def add_engine(parser: argparse.ArgumentParser) -> None:
    """``--engine`` and ``--threads``; which engines there are is checked when one is opened."""
    parser.add_argument(
        "--engine", default="auto", help="auto, openvino or onnxruntime (default: auto)"
    )
    parser.add_argument(
        "--threads", type=at_least(0), default=0, help="CPU threads; 0: all cores (default)"
    )


def at_least(minimum: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number of at least ``minimum``."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number of at least {minimum}"
            )
        return int(text)

    return number
