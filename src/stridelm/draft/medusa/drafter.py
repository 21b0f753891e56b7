"""Drafting with Medusa heads (arXiv 2401.10774): several guesses at once from one hidden state of the target.

That state is the one from which the last known token was drawn: the row that the next step grows from, after the final
norm. It is saved when a step is observed, and nothing else is: there is no KV and nothing to catch up on. A head's
output does not depend on the guesses before it, so all nodes of a tree's level have the same children.

Legend: R requests of the group, D depth, E nodes of a level, H hidden width, S slots, V vocabulary.
"""

from __future__ import annotations

import torch

from stridelm.batch import Draft, ForwardBatch, Verdict
from stridelm.draft.base import Drafter, Group, MemoryNeed, TargetInfo
from stridelm.draft.expand import Branching, Sprout
from stridelm.draft.given import Given, given
from stridelm.draft.guess import Chain, Guessing, branching_rows, chain_depth
from stridelm.draft.heads import HeadSource, check_head, load_head
from stridelm.draft.medusa.head import MedusaHeads, MedusaLayout
from stridelm.models.layers.decoder import Decoder
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.run.heads import TargetRuntime
from stridelm.sample.rows import Rows
from stridelm.sample.sampler import Sampler
from stridelm.types import Request, Span


class MedusaDrafter(Drafter):
    name = "medusa"
    default_depth = 3
    takes = "Medusa heads"
    needs_states = True

    def __init__(self, target: TargetInfo, sampler: Sampler, runtime: TargetRuntime | None = None) -> None:
        """Raises ValueError for weights that do not fit their layout."""
        super().__init__(target, sampler, runtime)
        assert runtime is not None
        self._ops = runtime.ops
        heads = _empty(target)
        layout, slots = heads.layout, target.max_num_seqs + 1
        self.heads = load_head(heads, _source(target, layout), runtime)
        self._states = torch.zeros(slots, layout.width, dtype=runtime.dtype, device=target.device)
        """[S, H] the target's hidden state from which the last known token was drawn."""
        self._ready = torch.zeros(slots, dtype=torch.bool, device=target.device)
        """[S] whether there is one."""

    @classmethod
    def recognises(cls, given: Given) -> bool:
        return MedusaLayout.of(given) is not None

    @classmethod
    def why_not(cls, target: TargetInfo) -> str | None:
        layout = _layout(target)
        if layout is None:
            return "it has no Medusa heads; give the directory of heads that were trained for it as drafter_model"
        return layout.misfit(target)

    @classmethod
    def usual_depth(cls, target: TargetInfo) -> int:
        return min(cls.default_depth, _empty(target).layout.heads)

    @classmethod
    def check_weights(cls, target: TargetInfo, model: Decoder) -> None:
        heads = _empty(target)
        check_head(heads, _source(target, heads.layout), target.device)

    @classmethod
    def memory_need(cls, target: TargetInfo, model: Decoder) -> MemoryNeed:
        return MemoryNeed(sum(parameter.numel() for parameter in _empty(target).parameters()))

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        depth = self.default_depth if speculation.depth is None else speculation.depth
        if depth > self.heads.layout.heads:
            raise ValueError(f"depth {depth} is over {self.heads.layout.heads}, the Medusa heads there are; lower it")
        return branching_rows(speculation, depth)

    def kind(self, span: Span) -> tuple[Branching, int, Guessing]:
        speculation = span.request.speculation
        branching = Branching.of(speculation, speculation.depth or 0)
        return branching, span.depth if branching != Branching() else 0, Guessing.of(speculation)

    def admit(self, request: Request) -> None:
        self._ready[request.slot].fill_(False)

    def propose(self, group: Group) -> Draft:
        branching, depth, guessing = self.kind(group.spans[0])
        if branching != Branching():
            return self._tree(group, branching, depth, guessing)
        depth = chain_depth(group)
        states, ready, positions_LR = self._recall(group, depth)
        guesses, logits_RDV = Chain(group, self.sampler, positions_LR), self.heads(states, depth)
        for level in range(depth):
            guesses.draw(logits_RDV[:, level])
        return guesses.draft(ready)

    def _recall(self, group: Group, levels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._ops.recall(self._states, self._ready, group.table.known, group.slots, 0, levels)

    def _tree(self, group: Group, branching: Branching, depth: int, guessing: Guessing) -> Draft:
        slots, (states, ready, positions_LR) = group.slots, self._recall(group, depth)
        logits_RDV = self.heads(states, depth)
        host_slots = [span.request.slot for span in group.spans]

        def scores(hidden_REH: torch.Tensor, level: int) -> torch.Tensor:
            logits, rows = logits_RDV[:, level - 1], Rows(slots, positions_LR[level - 1])
            # Coupled guesses take the token that wins with the target's noise; all others go by likelihood alone.
            log_probs = self.sampler.log_probs(logits, rows, host_slots, noisy=guessing is Guessing.COUPLED)
            return log_probs[:, None].expand(-1, hidden_REH.shape[1], -1)

        def grow(sprout: Sprout) -> torch.Tensor:
            return sprout.hidden_REH

        return branching.grow(states, depth, scores, grow, ready, group.arena)

    def observe(self, group: Group, batch: ForwardBatch, logits: Logits, verdict: Verdict) -> None:
        of_step = verdict.leaf, batch.decision_index, batch.decisions
        self._ops.keep_leaves(self._states, self._ready, group.slots, group.indices, *of_step, logits.states.final)


def _layout(target: TargetInfo) -> MedusaLayout | None:
    path = target.heads.get("medusa")
    return None if path is None else MedusaLayout.of(given(path))


def _empty(target: TargetInfo) -> MedusaHeads:
    """The heads on the meta device, without memory."""
    layout = _layout(target)
    assert layout is not None
    with torch.device("meta"):
        return MedusaHeads(layout)


def _source(target: TargetInfo, layout: MedusaLayout) -> HeadSource | None:
    return HeadSource(layout.given.path, layout.tensors) if target.weighted else None
