"""How drafters look in charts: each has its own colour and marker, the same in every chart.

A drafter's look follows from its place in the registry, so that a new one gets its own without being named here.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stridelm.draft import DRAFTERS

SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito's colours, which most colour-blind readers can tell apart."""
COLOURS = ("#333333", *SERIES, "#8c6d31")
"""The first is that of `none`, which looks like plain decoding if it is ever drawn."""
MARKERS = tuple("xos^DvP*<>Xphd8H1234+|_.")
FILLS = ("full", "none", "left", "right", "top", "bottom")
"""Marker fills of one drafter's variants in a chart."""
GOLDEN = 0.618034
"""Step around the circle of hues from one colour to the next, which keeps colours far apart for long."""

Row = TypeVar("Row")


def look_of(drafter: str) -> dict[str, Any]:
    """Colour and marker of a registered drafter's lines."""
    place = DRAFTERS.place(drafter)
    return {"color": _colour(place), "marker": MARKERS[place % len(MARKERS)], "markersize": 4}


def looks_of(rows: Sequence[Row], name: Callable[[Row], str]) -> dict[str, dict[str, Any]]:
    """The look of each distinct `name(row)`, in order of rows: its drafter's, with a different marker fill for each
    variant of the same drafter."""
    looks: dict[str, dict[str, Any]] = {}
    variants: dict[str, int] = {}
    for row in rows:
        if name(row) not in looks:
            drafter = row.drafter  # type: ignore[attr-defined]
            count = variants[drafter] = variants.get(drafter, -1) + 1
            looks[name(row)] = {**look_of(drafter), "fillstyle": FILLS[count % len(FILLS)]}
    return looks


def _colour(place: int) -> str:
    if place < len(COLOURS):
        return COLOURS[place]
    red, green, blue = colorsys.hsv_to_rgb(place * GOLDEN % 1.0, 0.55, 0.6)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
