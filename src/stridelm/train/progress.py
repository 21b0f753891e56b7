"""Shows a run's progress: a bar on a terminal, short lines in a log."""

from __future__ import annotations

import logging
import time
from types import TracebackType

from stridelm.progress import terminal_bar
from stridelm.train.schedule import Clock

logger = logging.getLogger(__name__)


class Reporter:
    """A context manager; call `update` at every log record."""

    def __init__(self, stage: str, line_seconds: float) -> None:
        self.stage, self.line_seconds = stage, line_seconds
        self._last_line = -float("inf")
        self._bar = terminal_bar()
        self._task = self._bar.add_task(stage, total=1.0, text="compiling or warming up")

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, clock: Clock, losses: dict[str, float], tokens_per_second: float, judged: str = "") -> None:
        """Show the state after `clock.step` steps; judged: summary of the last validation."""
        shown = " ".join(f"{name} {value:.4f}" for name, value in losses.items())
        speed, remaining = _count(tokens_per_second), clock.remaining_seconds()
        text = " ".join(filter(None, (f"step {clock.step} {shown}", judged, f"{speed} tokens/s ETA {remaining:.0f} s")))
        self._bar.update(self._task, completed=clock.progress, text=text)
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= self.line_seconds:
            self._last_line = now
            logger.info("%s %3.0f%% %s", self.stage, 100 * clock.progress, text)


def _count(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e5 else f"{value:.0f}"
