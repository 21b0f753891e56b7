"""How many rows a step may have: all that were configured; fewer once a step has run out of memory; and more again when
steps have gone well for a while."""

from __future__ import annotations

PATIENCE, MAX_PATIENCE = 16, 1024
"""Steps that must go well before the number of rows is doubled: at first, and after failures that followed such a rise
too soon."""


class RowBudget:
    """Not thread-safe."""

    def __init__(self, most: int) -> None:
        """most: maximum rows of a step, real and draft together."""
        self.most = self.now = most
        self._least = 1
        self._patience = PATIENCE
        self._good = 0
        """Steps that went well since the number last changed."""
        self._risen = False
        """Whether it last changed upwards."""

    @property
    def is_full(self) -> bool:
        return self.now == self.most

    def need(self, rows: int) -> None:
        """From now on a step has room for so many: some request cannot run with fewer."""
        self._least = max(self._least, rows)
        self.now = max(self.now, self._least)

    def fall(self, rows: int) -> bool:
        """A step of so many rows ran out of memory: the next have at most half as many. False if they must have as many
        as they may have now."""
        lower = max(self._least, min(rows, self.now) // 2)
        if lower >= self.now:
            return False
        if self._risen and self._good < self._patience:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
        self.now, self._good, self._risen = lower, 0, False
        return True

    def went_well(self) -> None:
        """A step did not run out of memory."""
        self._good += 1
        if self._good < self._patience:
            return
        if self.is_full:
            self._patience = PATIENCE
        else:
            self.now, self._good, self._risen = min(2 * self.now, self.most), 0, True
