"""The command line. Each command is a file here with ``add_arguments(parser)`` and ``run(args)``.

Only the file of the command that was asked for is imported, and it imports what it needs when it
runs, so that ``--help`` starts at once.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from typing import List, Optional

from edgevit import __version__
from edgevit.errors import EdgevitError

COMMANDS = {
    "compress": "make a bundle from a recipe: a Vision Transformer and a folder of images",
    "eval": "measure a bundle's accuracy and latency on a folder of labelled images",
    "run": "classify a video, images or a camera, live",
    "inspect": "check a bundle and show what is in it",
    "bench": "measure how much faster a bundle is than its backbone in PyTorch",
}

# What shells report for a program that Ctrl-C ended.
_INTERRUPTED = 130


def main(argv: Optional[List[str]] = None) -> int:
    """Run one command and return the exit status.

    0 is success, 2 a user's mistake, 3 a bundle over its budget, 130 Ctrl-C, 1 the rest. An error is
    one line on standard error; with ``EDGEVIT_DEBUG=1`` it is a traceback. A module may define
    ``interrupted(args) -> str``, which says what Ctrl-C leaves.
    """
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not None, as where it was closed
            # A label that the terminal can't show is written as an escape, and not an error.
            stream.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(
        prog="edgevit",
        description="Vision Transformers on small machines: compress, run live, report true figures.",
        epilog="'edgevit COMMAND --help' describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"edgevit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}."
        )
        if name in argv[:1]:
            importlib.import_module(f"edgevit.cli.{name}").add_arguments(subparser)
    args = parser.parse_args(argv)
    command = importlib.import_module(f"edgevit.cli.{args.command}")
    debug = os.environ.get("EDGEVIT_DEBUG", "") not in ("", "0")
    try:
        status = int(command.run(args))
        sys.stdout.flush()
    except KeyboardInterrupt:
        kept = command.interrupted(args) if hasattr(command, "interrupted") else "nothing was kept"
        return _fail(f"interrupted; {kept}", _INTERRUPTED)
    except BrokenPipeError:
        # The reader has gone, as with `edgevit inspect B | head -1`. What is still in the buffer
        # goes nowhere, or Python would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EdgevitError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_status)
    except Exception as error:
        if debug:
            raise
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _fail(f"{reason} (EDGEVIT_DEBUG=1 shows where it came from)", 1)
    return status


def _fail(message: str, status: int) -> int:
    # Names from a file must not write to the terminal, nor fail to be written.
    line = "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))
    print("edgevit:", line, file=sys.stderr)
    return status
