"""Progress of long operations: a bar on a terminal, nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_shown = ContextVar("bars are shown", default=True)


def terminal_bar(*columns: ProgressColumn) -> Progress:
    """Bars on stderr, disabled if it is not a terminal. Each task has a field `text`, shown after its bar and before
    the given columns."""
    console = Console(stderr=True)
    shown = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), *columns)
    # A log is not a terminal, even if colours are forced. Leave other code's prints to stdout alone.
    return Progress(*shown, console=console, disable=not console.file.isatty(), redirect_stdout=False)


@contextmanager
def bar(description: str, total: int, unit: str, least: int = 1) -> Iterator[Callable[[int], None]]:
    """A bar for as long as the block runs. Yields a function to call with each amount completed.

    unit: what is counted, such as "graphs"; "bytes" are shown in readable units, with their rate.
    least: a smaller total gets no bar, since it is done before a bar could be read.
    """
    rate = (TransferSpeedColumn(),) if unit == "bytes" else ()
    progress = terminal_bar(*rate, TimeRemainingColumn())
    progress.disable = progress.disable or total < least or not _shown.get()
    with progress:
        done = 0
        task = progress.add_task(description, total=total, text=_text(done, total, unit))

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            progress.update(task, completed=done, text=_text(done, total, unit))

        yield advance


@contextmanager
def no_bars() -> Iterator[None]:
    """Show no bar for what runs inside."""
    token = _shown.set(False)
    try:
        yield
    finally:
        _shown.reset(token)


def size(count: int) -> str:
    """Bytes in readable units: 512 B, 3.4 MiB, 15.0 GiB."""
    if count < 1024:
        return f"{count} B"
    value = count / 1024
    for unit in ("KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _text(done: int, total: int, unit: str) -> str:
    return f"{size(done)} of {size(total)}" if unit == "bytes" else f"{done} of {total} {unit}"
