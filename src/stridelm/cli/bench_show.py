"""What `stride bench` shows: a bar while it runs, and a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPED_WIDTH = 240
"""Width in columns of a table that is piped, so that nothing is folded."""


@contextmanager
def progress(runs: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that advances when a run starts; disabled if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=runs)
        started = False

        def on_run(what: str) -> None:
            nonlocal started
            bar.update(task, advance=int(started), description=what)
            started = True

        yield on_run


def show(what: RenderableType) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    console.print(what)
