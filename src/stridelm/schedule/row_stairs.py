"""Up to how many rows a step takes as long: where steps are padded to captured sizes, rows come in stairs.

Legend: D levels, S stairs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from stridelm.schedule.depth_loops import NEVER


class RowStairs:
    def __init__(self, stairs: Callable[[int, int], Sequence[int]]) -> None:
        """stairs: (requests, depth) -> rows up to which steps take as long, ascending; more are not padded."""
        self._stairs = stairs
        self._known: dict[tuple[int, int], Sequence[int]] = {}
        self._tables: dict[tuple[int, int], np.ndarray] = {}
        self._fillings: dict[tuple[int, int], np.ndarray] = {}

    def of(self, requests: int, depth: int) -> Sequence[int]:
        """Those of steps that draft to this depth."""
        if (requests, depth) not in self._known:
            self._known[requests, depth] = self._stairs(requests, depth)
        return self._known[requests, depth]

    def up(self, requests: int, rows: int, depth: int) -> int:
        """Rows that a step of so many is padded to."""
        stairs = self.of(requests, depth)
        place = bisect_left(stairs, rows)
        return stairs[place] if place < len(stairs) else rows

    def down(self, requests: int, rows: int, depth: int) -> int | None:
        """The highest stair of at most so many rows."""
        stairs = self.of(requests, depth)
        place = bisect_right(stairs, rows) - 1
        return None if place < 0 else stairs[place]

    def fillings(self, requests: int, deepest: int) -> np.ndarray:
        """Numbers of draft rows that fill the stairs of any depth up to the deepest."""
        if (requests, deepest) not in self._fillings:
            stairs = np.unique([stair for depth in range(1, deepest + 1) for stair in self.of(requests, depth)])
            filled = stairs.astype(np.int64) - requests
            self._fillings[requests, deepest] = filled[filled > 0]
        return self._fillings[requests, deepest]

    def table(self, requests: int, deepest: int) -> np.ndarray:
        """[D + 1, S] of each depth, with some that no step reaches after the last."""
        if (requests, deepest) not in self._tables:
            stairs = [(), *(self.of(requests, depth) for depth in range(1, deepest + 1))]
            table = np.full((deepest + 1, max(map(len, stairs))), NEVER)
            for depth, each in enumerate(stairs):
                table[depth, : len(each)] = each
            self._tables[requests, deepest] = table
        return self._tables[requests, deepest]
