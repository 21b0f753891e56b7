"""Which rows of a call need which work: found on the host, once for as long as the same rows come back.

Every processor touches only the rows that asked for it, so a row's result cannot depend on the rows beside
it, and a feature that no row asked for costs nothing.

Legend: M rows of the call, X rows among them that need more than a raw argmax, G rows that need one feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stridelm.sample.table import Feature, SamplingTable
from stridelm.upload import upload

if TYPE_CHECKING:
    from stridelm.sample.grammar import Guide

_SINGLE = tuple(f for f in Feature if f.value & (f.value - 1) == 0)


@dataclass(frozen=True, slots=True)
class Part:
    """The rows that need one feature."""

    rows_G: torch.Tensor | None
    """int64 index into the X rows; None: all of them."""
    slots_U: torch.Tensor | None = None
    """PENALTIES: the distinct slots of these rows, so that a history which rows share is counted once."""
    slot_of_G: torch.Tensor | None = None
    """PENALTIES: each row's entry in slots_U; None: row i has entry i."""
    max_top_k: int = 0
    """TOP_K: the largest among these rows."""
    guides: tuple[Guide | None, ...] = ()
    """GRAMMAR: each row's."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The work of one call."""

    special_X: torch.Tensor | None
    """int64 index of the X rows in the call; None: all of them."""
    count: int
    """X."""
    parts: dict[Feature, Part]
    """Only the features that occur, in the order in which they are applied."""


def group(row_slots: Sequence[int], table: SamplingTable) -> Groups:
    """Sort rows by what they need. row_slots: the slot of each row of the call, as the host knows it."""
    flags = [int(table.features(slot)) for slot in row_slots]
    special = [row for row, flag in enumerate(flags) if flag]
    slots = [row_slots[row] for row in special]
    parts: dict[Feature, Part] = {}
    for feature in _SINGLE:
        rows = [i for i, row in enumerate(special) if flags[row] & feature.value]
        if rows:
            parts[feature] = _part(feature, rows, slots, table)
    return Groups(_index(special, len(flags), table.device), len(special), parts)


def _part(feature: Feature, rows: list[int], slots: list[int], table: SamplingTable) -> Part:
    rows_G = _index(rows, len(slots), table.device)
    mine = [slots[row] for row in rows]
    if feature is Feature.GRAMMAR:
        return Part(rows_G, guides=tuple(map(table.guide, mine)))
    if feature is Feature.TOP_K:
        return Part(rows_G, max_top_k=max(map(table.top_k_of, mine)))
    if feature is Feature.PENALTIES:
        entry = {slot: i for i, slot in enumerate(dict.fromkeys(mine))}
        slot_of = None if len(entry) == len(mine) else upload([entry[slot] for slot in mine], table.device)
        return Part(rows_G, upload(list(entry), table.device), slot_of)
    return Part(rows_G)


def _index(rows: list[int], total: int, device: torch.device) -> torch.Tensor | None:
    return None if len(rows) == total else upload(rows, device)
