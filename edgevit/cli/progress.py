"""Progress in the terminal: one bar a step on a TTY, one line a step elsewhere, all on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Callable, Dict, Iterator


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that takes a step's name, the units done and the units in all."""
    try:
        import rich.progress
    except ImportError:  # a device without rich
        yield _plain_lines()
        return
    if not sys.stderr.isatty():
        yield _plain_lines()
        return
    from rich.console import Console

    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description:>18}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bars:
        tasks: Dict[str, rich.progress.TaskID] = {}

        def show(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield show


def _plain_lines(every_s: float = 15.0) -> Callable[[str, int, int], None]:
    """A line when a step begins, every ``every_s`` seconds and when it ends."""
    shown: Dict[str, float] = {}

    def show(step: str, done: int, total: int) -> None:
        now = time.monotonic()
        if step not in shown or done >= total or now - shown[step] >= every_s:
            shown[step] = now
            print(f"{step}: {done} of {total}", file=sys.stderr, flush=True)

    return show
