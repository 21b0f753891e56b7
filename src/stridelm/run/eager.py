"""The eager runner: one forward pass over whatever rows the batch holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stridelm.attention.base import AttentionBackend, PagedLayers, PreparedAttention
from stridelm.batch import ForwardBatch, Geometry, Onward, States
from stridelm.cache.pool import PagePool, draft_places
from stridelm.kernels.ops import Ops
from stridelm.models.layers.decoder import Decoder, ModelInput
from stridelm.run.onward import onward
from stridelm.run.trap import PageTrap


@dataclass(slots=True)
class Logits:
    """What a forward pass returns: raw logits for verification, in the model's dtype, and the states they come from."""

    decisions: torch.Tensor
    """[M, V] for the batch's decision rows."""
    prompt: torch.Tensor | None
    """[P, V] for its prompt rows."""
    states: States


class EagerRunner:
    def __init__(self, model: Decoder, pool: PagePool, attention: AttentionBackend, check_pages: bool = False) -> None:
        self.model = model
        self.pool = pool
        self.attention = attention
        self.trap = PageTrap(pool) if check_pages else None
        self.taps: tuple[int, ...] = ()
        """Layers whose inputs drafters read, in order."""

    def tap(self, layers: Sequence[int]) -> None:
        """From now on, return the inputs of these layers too."""
        self.taps = tuple(sorted({*self.taps, *layers}))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Logits:
        """Run all rows and write their KV to the batch's slots. Raises PageFault if `check_pages` finds a wrong
        index."""
        if self.trap is not None:
            self.trap.check(batch, *draft_places(batch.geometry))
        states = self.states(batch.ids, batch.positions, batch.slots, batch.geometry, onward(batch))
        return self.logits(states, batch)

    def states(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        slots: dict[str, torch.Tensor],
        geometry: Geometry,
        some: Onward | None = None,
    ) -> States:
        """The states of N rows. slots: as in ForwardBatch. some: those that go on after the last layer that stores
        entries; None: all."""
        every = PagedMix(self.pool, self.model.ops, self.attention.prepare(geometry), slots)
        mix: PagedMix | OnwardMix = every
        rows_M: torch.Tensor | None = None
        if some is not None:
            mix, rows_M = OnwardMix(self.model.last_storing, every, self.attention, some), some.rows
        tapped: dict[int, torch.Tensor] = {}

        def tap(layer: int, x_NH: torch.Tensor) -> None:
            goes_on = rows_M is not None and layer > self.model.last_storing
            tapped[layer] = spread(x_NH, rows_M, len(ids_N)) if goes_on else x_NH

        final = self.model(ModelInput(ids_N, positions_N, mix, tap, self.taps, rows_M))
        return States(spread(final, rows_M, len(ids_N)), tapped)

    def logits(self, states: States, batch: ForwardBatch) -> Logits:
        hidden_NH = states.final
        prompt = None if batch.prompt_rows is None else self._logits(hidden_NH, batch.prompt_rows)
        decisions = self.model.logits(hidden_NH) if batch.every_row else self._logits(hidden_NH, batch.decisions)
        return Logits(decisions, prompt, states)

    def _logits(self, hidden_NH: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if not rows.shape[0]:
            return hidden_NH.new_empty(0, self.model.spec.vocab_size)
        return self.model.logits(hidden_NH.index_select(0, rows))


def spread(x_MH: torch.Tensor, rows_M: torch.Tensor | None, rows: int) -> torch.Tensor:
    """[N, H] with these rows, and zeros for all others; None: they are all rows."""
    if rows_M is None:
        return x_MH
    return x_MH.new_zeros(rows, x_MH.shape[1]).index_copy_(0, rows_M, x_MH)


class PagedMix(PagedLayers):
    """Called by the model to mix a layer's rows: writes their KV entries, then runs attention."""

    def __init__(
        self,
        pool: PagePool,
        ops: Ops,
        prepared: PreparedAttention,
        slots: dict[str, torch.Tensor],
        lookers: torch.Tensor | None = None,
    ) -> None:
        """lookers: [M] int64 rows that attend, for which `prepared` was made; None for all."""
        self.pool, self.ops, self.prepared, self.slots, self.lookers = pool, ops, prepared, slots, lookers

    def __call__(self, layer: int, inputs: Any) -> torch.Tensor:
        state, entries = self.pool.read[layer], self.pool.entries[layer]
        mixer = self.prepared.mixer(state)
        return mixer.mix(state, inputs, entries, self.slots[state.group], self.ops, self.lookers)

    def run_layers(
        self, layers: tuple[int, ...], layers_LF: np.ndarray[Any, Any], call: list[int], wanted_M: torch.Tensor | None
    ) -> bool:
        if self.lookers is not wanted_M:
            return False
        stored = self.pool.stored(layers)
        mixer = self.prepared.mixer(stored.states[0])
        return mixer.run_layers(stored, self.slots, layers_LF, call)


class OnwardMix(PagedLayers):
    """Mixes a step's layers when only some of its rows go on: all rows up to layer `last`, which stores the entries of
    all and lets those attend; and those alone after it."""

    def __init__(self, last: int, every: PagedMix, attention: AttentionBackend, some: Onward) -> None:
        # Where nobody goes on, nothing attends: no backend has to plan that.
        prepared = attention.prepare(some.geometry) if len(some.rows) else every.prepared
        slots = {group: slots_N[some.rows] for group, slots_N in every.slots.items()}
        self._last, self._every = last, every
        self._at_last = PagedMix(every.pool, every.ops, prepared, every.slots, some.rows)
        self._after = PagedMix(every.pool, every.ops, prepared, slots)

    def __call__(self, layer: int, inputs: Any) -> torch.Tensor:
        return self._of(layer)(layer, inputs)

    def run_layers(
        self, layers: tuple[int, ...], layers_LF: np.ndarray[Any, Any], call: list[int], wanted_M: torch.Tensor | None
    ) -> bool:
        mix = self._of(layers[0])
        return mix is self._of(layers[-1]) and mix.run_layers(layers, layers_LF, call, wanted_M)

    def _of(self, layer: int) -> PagedMix:
        return self._every if layer < self._last else self._at_last if layer == self._last else self._after
