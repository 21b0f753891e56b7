"""Attention of a head's layers to the entries of the target's own pool, which they read and never write.

Legend: R requests, N rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stridelm.attention.base import PagedLayers, PreparedAttention
from stridelm.cache.layout import LayerStates
from stridelm.draft.base import Group
from stridelm.kernels.ops import Ops
from stridelm.run.heads import HeadRows, TargetRuntime, head_layout, place


class TargetMix(PagedLayers):
    """A Mix over the target's entries. Layers of different page groups each have the tables of their own."""

    def __init__(
        self, states: LayerStates, sources: tuple[int, ...], runtime: TargetRuntime, ops: Ops, rows: HeadRows
    ) -> None:
        """states, sources: of each layer, what it makes of the entries that it reads, and whose they are."""
        self._states, self._ops, self._rows = tuple(state.read for state in states), ops, rows
        self._pool, self._sources = runtime.runner.pool, sources
        self._prepared: PreparedAttention = runtime.attention.prepare(rows.geometry)

    def __call__(self, layer: int, inputs: Any) -> torch.Tensor:
        state = self._states[layer]
        mixer = self._prepared.mixer(state)
        entries, slots = self._pool.entries[self._sources[layer]], self._rows.slots[state.group]
        return mixer.mix(state, inputs, entries, slots, self._ops)

    def run_layers(
        self, layers: tuple[int, ...], layers_LF: np.ndarray[Any, Any], call: list[int], wanted_M: torch.Tensor | None
    ) -> bool:
        assert wanted_M is None
        sources, states = tuple(self._sources[i] for i in layers), tuple(self._states[i] for i in layers)
        stored = self._pool.stored(sources, states)
        return self._prepared.mixer(states[0]).run_layers(stored, self._rows.slots, layers_LF, call)


def committed(group: Group, runtime: TargetRuntime, each: int) -> HeadRows:
    """`each` rows of every request that see what its last token sees: the entries before that token, which has none
    itself. To attention, each is a span of its own with the row of the newest entry."""
    slots = group.slots if each == 1 else group.slots.repeat_interleave(each)
    newest = group.table.known[slots] - 2
    most = max(span.start + span.real for span in group.spans)
    return place(head_layout((1,) * len(slots), group.arena), slots, newest, None, runtime, most)
