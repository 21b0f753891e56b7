"""Interpolation between the points of a cost table.

Everything is piecewise linear, so what lies between points never leaves the range between them, and grows with
requests, rows, depth and context wherever the points do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T", int, float)
Line = Sequence[tuple[float, float]]
"""(x, seconds), in order of x."""


@dataclass(frozen=True)
class DecodePoint:
    """A step in which every request decodes."""

    requests: int
    rows: int
    """Of the step: one for each request, and those of their drafts."""
    depth: int
    """Of the deepest draft."""
    context: float
    """Tokens that a request had before the step, on average."""
    seconds: float


class DecodeCurve:
    """Seconds of a step by requests, rows, depth and context."""

    def __init__(self, points: Sequence[DecodePoint], rows_by_depth: Sequence[int], stairs: Sequence[int] = ()) -> None:
        """rows_by_depth: draft rows of a request at depth 0, 1, .. stairs: numbers of requests that steps are padded
        to.

        Raises ValueError if two points are for the same step, or unless every number of requests that the points have
        has points at each of their depths, 0 among them.
        """
        self._rows_by_depth, self._stairs = tuple(rows_by_depth), sorted(stairs)
        self._lines: dict[tuple[int, int], dict[float, list[tuple[float, float]]]] = {}
        """(requests, depth) -> share of the draft rows that all requests would have -> seconds by context."""
        for point in sorted(points, key=lambda each: each.context):
            lines = self._lines.setdefault((point.requests, point.depth), {})
            share = self._share(point.requests, point.rows, point.depth)
            line = lines.setdefault(share, [])
            if line and line[-1][0] == point.context:
                raise ValueError(f"two points are for the same step ({point}); leave one out")
            line.append((point.context, point.seconds))
        self.requests = sorted({requests for requests, _ in self._lines})
        self.depths = sorted({0, *(depth for _, depth in self._lines)})
        for requests in self.requests:
            for depth in self.depths:
                if (requests, depth) not in self._lines:
                    raise ValueError(f"no point has {requests} requests at depth {depth}, while others do; add one")

    def seconds(self, requests: int, rows: int, depth: int, context: float) -> float:
        """Of a step whose deepest draft has this depth; neither requests nor depth may exceed the points'. Fewer
        requests than any point has cost what the fewest do."""
        share = self._share(requests, rows, depth)
        if self._stairs:
            requests = self._stairs[bisect_left(self._stairs, requests)]
        low, high, weight = _between(self.requests, requests)
        below, above, part = _between(self.depths, depth)
        total = 0.0
        for count, of_count in ((low, 1 - weight), (high, weight)):
            for level, of_level in ((below, 1 - part), (above, part)):
                if of_count * of_level:
                    total += of_count * of_level * self._at(count, level, share, context)
        return total

    def _at(self, requests: int, depth: int, share: float, context: float) -> float:
        lines = self._lines[requests, depth]
        low, high, weight = _between(sorted(lines), share)
        return (1 - weight) * along(lines[low], context) + weight * along(lines[high], context)

    def _share(self, requests: int, rows: int, depth: int) -> float:
        width = self._rows_by_depth[depth]
        return (rows - requests) / (requests * width) if width else 0.0


@dataclass(frozen=True)
class PromptPoint:
    """A step in which nobody decodes."""

    rows: int
    context: float
    """Tokens that a row sees before itself, on average."""
    seconds: float


class PromptCurve:
    """Seconds of a step by its prompt rows and what they see."""

    def __init__(self, points: Sequence[PromptPoint]) -> None:
        """Raises ValueError if two points are for the same step."""
        self._lines: dict[int, list[tuple[float, float]]] = {}
        for point in sorted(points, key=lambda each: each.context):
            line = self._lines.setdefault(point.rows, [])
            if line and line[-1][0] == point.context:
                raise ValueError(f"two points are for the same step ({point}); leave one out")
            line.append((point.context, point.seconds))
        self._rows = sorted(self._lines)

    def seconds(self, rows: int, context: float) -> float:
        return along([(size, along(self._lines[size], context)) for size in self._rows], rows)


def along(line: Line, x: float) -> float:
    """The value at x: between points by a line, before the first point its value, and after the last as the line
    through the last two goes on, unless it falls."""
    place = bisect_left(line, (x,))
    if place == 0 or len(line) == 1:
        return line[0][1]
    (low, before), (high, after) = line[min(place, len(line) - 1) - 1 :][:2]
    slope = (after - before) / (high - low)
    return before + slope * (x - low) if x <= high else after + max(0.0, slope) * (x - high)


def _between(known: Sequence[T], x: float) -> tuple[T, T, float]:
    """The neighbours of x in sorted numbers, and the weight of the upper one; outside, the nearest twice."""
    place = bisect_left(known, x)
    if place in (0, len(known)) or known[place] == x:
        nearest = known[min(place, len(known) - 1)]
        return nearest, nearest, 0.0
    low, high = known[place - 1], known[place]
    return low, high, (x - low) / (high - low)
