"""Drafting with Medusa heads (arXiv 2401.10774): several guesses at once from one state of the target.

The state is the one from which the last known token was drawn: of the row that the next step grows from, behind the
final norm. It is kept when a step is observed; nothing else is, there is no KV and nothing to catch up with.

Legend: R requests of the group, D depth, H hidden width, S slots.
"""

from __future__ import annotations

import torch

from stridelm.draft.base import Drafter, Group, Target, chain, within_bounds
from stridelm.draft.given import Given, given
from stridelm.draft.heads import load_head
from stridelm.draft.medusa.head import MedusaHeads, MedusaLayout
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.run.heads import Serving
from stridelm.sample.processors import Rows
from stridelm.sample.sampler import Sampler
from stridelm.types import CANDIDATE, Draft, ForwardBatch, Request, Verdict


class MedusaDrafter(Drafter):
    name = "medusa"
    default_depth = 3
    takes = "Medusa heads"

    def __init__(self, target: Target, sampler: Sampler, serving: Serving | None = None) -> None:
        """Raises ValueError for weights that do not fit their layout."""
        super().__init__(target, sampler, serving)
        assert serving is not None
        layout = _layout(target)
        assert layout is not None
        with torch.device("meta"):
            heads = MedusaHeads(layout)
        tensors = layout.tensors if target.weighted else None
        self.heads = load_head(heads, layout.given.path, tensors, serving)
        slots = target.max_num_seqs + 1
        self._states = torch.zeros(slots, layout.width, dtype=serving.dtype, device=target.device)
        """[S, H] the target's state from which the last known token was drawn."""
        self._ready = torch.zeros(slots, dtype=torch.bool, device=target.device)
        """[S] whether there is one."""

    @classmethod
    def recognises(cls, given: Given) -> bool:
        return MedusaLayout.of(given) is not None

    @classmethod
    def why_not(cls, target: Target) -> str | None:
        layout = _layout(target)
        if layout is None:
            return "it has no Medusa heads; give the directory of heads that were trained for it as drafter_model"
        return layout.misfit(target)

    def ladder(self, speculation: Speculation) -> tuple[int, ...]:
        depth = self.default_depth if speculation.depth is None else speculation.depth
        if depth > self.heads.layout.heads:
            raise ValueError(f"depth {depth} is over {self.heads.layout.heads}, the Medusa heads there are; lower it")
        return tuple(range(depth + 1))

    def admit(self, request: Request) -> None:
        self._ready[request.slot] = False

    def propose(self, group: Group) -> Draft:
        depth, slots = max(span.draft for span in group.spans), group.slots
        logits_RDV = self.heads(self._states[slots], depth)
        positions_RD = group.table.known[slots][:, None] + torch.arange(depth, device=slots.device)
        host_slots = [span.request.slot for span in group.spans for _ in range(depth)]
        # No head knows what those before it guess, and neither do penalties here: only acceptance can suffer.
        rows = Rows(slots.repeat_interleave(depth), positions_RD.flatten())
        tokens = self.sampler.draw(logits_RDV.flatten(0, 1), rows, host_slots)
        live = self._ready[slots][:, None] & within_bounds(group, depth)
        return chain(depth, CANDIDATE, slots.device).draft(tokens.view(-1, depth), live)

    def observe(self, group: Group, batch: ForwardBatch, logits: Logits, verdict: Verdict) -> None:
        node = verdict.leaf[group.indices] + 1
        decision = batch.decision_index[group.indices].gather(1, node[:, None])[:, 0]
        rows = batch.decisions[decision.clamp(min=0)]  # padding has none
        self._states[group.slots] = logits.states.final.index_select(0, rows)
        self._ready[group.slots] = torch.ones_like(group.slots, dtype=torch.bool)


def _layout(target: Target) -> MedusaLayout | None:
    path = target.heads.get("medusa")
    return None if path is None else MedusaLayout.of(given(path))
