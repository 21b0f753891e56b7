"""How long a step takes, learnt from the steps that ran: a line over the number of rows.

Only steps with prompt rows are measured. Those have so many rows that the device computes for longer than it reads
weights, which makes their time close to a line.
"""

from __future__ import annotations

MEMORY = 0.95
"""Weight of a measured step relative to the next one's: about the last twenty count."""
OUTLIER = 3.0
"""A step that took more than this multiple of what was expected counts as that multiple: something else delayed it."""
FEW = 4
"""Steps before anything counts as an outlier."""


class StepCost:
    """Not thread-safe."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._steps = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows took this long."""
        if self._steps >= FEW:
            seconds = min(seconds, OUTLIER * self.seconds(rows))
        self._steps += 1
        for name, value in (("_weight", 1.0), ("_x", rows), ("_y", seconds), ("_xx", rows**2), ("_xy", rows * seconds)):
            setattr(self, name, MEMORY * getattr(self, name) + value)

    @property
    def known(self) -> bool:
        """Whether any step has been measured."""
        return self._steps > 0

    def seconds(self, rows: int) -> float:
        """Expected duration of a step of so many rows; some step must have been measured."""
        base, each = self._line()
        return base + each * rows

    def rows(self, seconds: float) -> int:
        """The most rows expected to take at most this long."""
        base, each = self._line()
        return max(0, int((seconds - base) / each))

    def _line(self) -> tuple[float, float]:
        """(seconds of a step without rows, seconds per row): least squares, and neither below zero. If the steps had
        nearly the same number of rows, they say nothing of a base."""
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x**2
        proportional = max(y / x, 1e-12)
        if spread < (0.1 * x) ** 2:
            return 0.0, proportional
        each = (self._xy / self._weight - x * y) / spread
        if each <= 0:
            return 0.0, proportional
        base = y - each * x
        return (base, each) if base >= 0 else (0.0, proportional)
