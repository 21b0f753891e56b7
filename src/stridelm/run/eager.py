"""The eager runner: one forward pass over whatever rows the batch holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stridelm.attention.base import AttentionBackend, PreparedAttention
from stridelm.cache.pages import padded_tables
from stridelm.cache.pool import PagePool
from stridelm.kernels.ops import Ops, QKRope
from stridelm.models.layers.decoder import Decoder
from stridelm.run.trap import PageTrap
from stridelm.types import DeviceGeometry, Draft, ForwardBatch, Geometry, States, Verdict


@dataclass(slots=True)
class Logits:
    """What a forward pass gives: raw logits for the door, in the model's dtype, and where they come from."""

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
        """Layers whose inputs somebody reads, in order."""

    def tap(self, layers: Sequence[int]) -> None:
        """From now on, keep the inputs of these layers too."""
        self.taps = tuple(sorted({*self.taps, *layers}))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Logits:
        """Run all rows; writes their KV at the batch's slots. Raises PageFault if the trap is set and springs."""
        if self.trap is not None:
            self.trap.check(batch, *_places(batch.geometry, batch.ids.device))
        return self.logits(self.states(batch.ids, batch.positions, batch.slots, batch.geometry), batch)

    def states(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        slots: dict[str, torch.Tensor],
        geometry: Geometry | DeviceGeometry,
    ) -> States:
        """Those of N rows; slots: as in ForwardBatch."""
        prepared = self.attention.prepare(geometry, self.pool.layout, self.model.spec.num_heads)
        attend = PagedAttend(self.pool, self.model.ops, prepared, slots)
        tapped: dict[int, torch.Tensor] = {}

        def tap(layer: int, x_NH: torch.Tensor) -> None:
            if layer in self.taps:
                tapped[layer] = x_NH.clone()

        final_NH = self.model(ids_N, positions_N, attend, tap if self.taps else None)
        return States(final_NH, tapped)

    def logits(self, states: States, batch: ForwardBatch) -> Logits:
        hidden_NH = states.final
        prompt = None if batch.prompt_rows is None else self._logits(hidden_NH, batch.prompt_rows)
        decisions = self.model.logits(hidden_NH) if batch.every_row else self._logits(hidden_NH, batch.decisions)
        return Logits(decisions, prompt, states)

    def compact(self, batch: ForwardBatch, draft: Draft, verdict: Verdict) -> None:
        """Move the KV of accepted paths to where a chain's would be. Nothing to do where all drafts are chains.

        Rows of the path at or beyond `kept` copy the null slot onto itself. A span's rows stand in order of depth,
        each behind what the rows before it write: a path's row numbers rise.
        """
        if draft.is_chain:
            return
        geometry = batch.geometry
        depth = torch.arange(verdict.path.shape[1], device=verdict.path.device)
        keep = depth < verdict.kept[:, None]
        base, tables = _places(geometry, verdict.path.device)
        for group, pages in tables.items():
            source = _slots(pages, base[:, None] + verdict.path, geometry.page_size)
            target = _slots(pages, base[:, None] + depth, geometry.page_size)
            self.pool.compact(group, torch.where(keep, source, 0).flatten(), torch.where(keep, target, 0).flatten())

    def _logits(self, hidden_NH: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if not rows.shape[0]:
            return hidden_NH.new_empty(0, self.model.spec.vocab_size)
        return self.model.logits(hidden_NH.index_select(0, rows))


def _places(geometry: Geometry | DeviceGeometry, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """([R] storage index of each span's first draft row, page group -> [R, P] page ids)."""
    if isinstance(geometry, DeviceGeometry):
        base = (geometry.starts + geometry.reals).to(torch.int64)
        return base, {group: pages.to(torch.int64) for group, pages in geometry.tables.items()}
    base = torch.tensor(geometry.starts, device=device) + torch.tensor(geometry.reals, device=device)
    return base, {g: torch.from_numpy(padded_tables(pages)).to(device) for g, pages in geometry.page_tables.items()}


def _slots(pages_RP: torch.Tensor, storage_RD: torch.Tensor, page_size: int) -> torch.Tensor:
    """[R, D] pool slots of storage indices; indices beyond the table are clamped, for the caller to mask."""
    page = (storage_RD // page_size).clamp(max=pages_RP.shape[1] - 1)
    return pages_RP.gather(1, page) * page_size + storage_RD % page_size


class PagedAttend:
    """What the model calls to attend: write this layer's rows, then look."""

    def __init__(
        self,
        pool: PagePool,
        ops: Ops,
        prepared: PreparedAttention,
        slots: dict[str, torch.Tensor],
        lookers: torch.Tensor | None = None,
    ) -> None:
        """lookers: [M] int64 rows that look, for which attention is prepared; all, if None is given."""
        self.pool, self.ops, self.prepared, self.slots, self.lookers = pool, ops, prepared, slots, lookers

    def __call__(self, layer: int, qkv_NXD: torch.Tensor, rope: QKRope) -> torch.Tensor:
        kv, keys, values = self.pool.layout[layer], self.pool.keys[layer], self.pool.values[layer]
        q_NHD = self.ops.rope_and_store(qkv_NXD, rope, keys, values, self.slots[kv.group])
        if self.lookers is not None:
            q_NHD = q_NHD.index_select(0, self.lookers)
        return self.prepared.attend(kv, q_NHD, keys, values)
