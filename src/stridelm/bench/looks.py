"""How drafters look in charts: each its own colour and its own marker, the same in every chart whatever else is drawn.

A drafter's look is its place in the registry, so that a new one has its own without being named here.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stridelm.draft import DRAFTERS

SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito's colours, which most colour-blind readers can tell apart."""
COLOURS = ("#333333", *SERIES, "#8c6d31")
"""The first is `none`'s, which is drawn as plain decoding is, if ever."""
MARKERS = ("x", "o", "s", "^", "D", "v", "P", "*", "<", ">", "X", "p", "h", "d", "8", "H", "1", "2", "3", "4")
FILLS = ("full", "none", "left", "right", "top", "bottom")
"""Of one drafter's variants in a chart."""
GOLDEN = 0.618034
"""Of the way around the circle of hues from one colour to the next: none comes near an earlier one soon."""

Row = TypeVar("Row")


def look_of(drafter: str) -> dict[str, Any]:
    """Colour and marker of a registered drafter's lines."""
    place = DRAFTERS.place(drafter)
    return {"color": _colour(place), "marker": MARKERS[place % len(MARKERS)], "markersize": 4}


def looks_of(rows: Sequence[Row], name: Callable[[Row], str]) -> dict[str, dict[str, Any]]:
    """How each thing that `name` makes of rows is drawn, in their order: as its drafter, and variants of one drafter
    with markers filled differently."""
    found: dict[str, dict[str, Any]] = {}
    variants: dict[str, int] = {}
    for row in rows:
        if name(row) not in found:
            drafter = row.drafter  # type: ignore[attr-defined]
            count = variants[drafter] = variants.get(drafter, -1) + 1
            found[name(row)] = {**look_of(drafter), "fillstyle": FILLS[count % len(FILLS)]}
    return found


def _colour(place: int) -> str:
    if place < len(COLOURS):
        return COLOURS[place]
    red, green, blue = colorsys.hsv_to_rgb(place * GOLDEN % 1.0, 0.55, 0.6)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
