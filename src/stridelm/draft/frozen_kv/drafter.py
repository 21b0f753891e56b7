"""Drafting with heads that read the target's keys and values and keep none: Gemma 4's assistants, and heads of the same
layout for other targets.

With n known tokens the target has entries 0 .. n - 2, and the hidden state from which token n - 1 was drawn. A chain
begins with that token and that state; each further guess is made from the guess before it and from the head's own
output there. The head's rows write nothing, so all of a chain have the same position, that of token n - 1, and see the
same entries:

    token        0   1   2  ...  n-2   n-1 | g0    g1    g2
    entry        0   1   2  ...  n-2       |
    row                                n-1 | n-1   n-1
    guesses                            g0  | g1    g2

So there is nothing to catch up on and nothing to give back: a request's last state is all that is kept of it, and it is
kept at every step, at depth 0 too. What a window has passed is not read either: the row sees what the target's next row
will see, less that row's own entry.

Legend: R requests of the group, E nodes of a level that grow, S slots, H hidden width, B the target's.
"""

from __future__ import annotations

import torch

from stridelm.batch import Draft, ForwardBatch, Verdict
from stridelm.draft.base import Group, TargetInfo
from stridelm.draft.expand import Branching, Sprout
from stridelm.draft.frozen_kv.head import FrozenKVHead
from stridelm.draft.frozen_kv.layout import Layout, layout_of, spec_of
from stridelm.draft.frozen_kv.ordered import OrderedHead
from stridelm.draft.frozen_kv.reading import TargetMix, committed
from stridelm.draft.given import Given, given
from stridelm.draft.guess import Chain, Guessing, Shape, branching_rows, chain_depth, scores_of, shape_of
from stridelm.draft.head_weights import HeadWeights
from stridelm.draft.heads import DraftHead, HeadSource, store_as_in
from stridelm.models.layers.decoder import Decoder
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.run.heads import TargetRuntime
from stridelm.sample.sampler import Sampler
from stridelm.types import Request, Span


class FrozenKVDrafter(HeadWeights):
    name = "frozen_kv"
    default_depth = 3
    takes = "an assistant of Gemma 4's layout, whose layers read the model's own keys and values"

    def __init__(self, target: TargetInfo, sampler: Sampler, runtime: TargetRuntime | None = None) -> None:
        """Raises ValueError for weights that do not fit, or if attention cannot serve the head."""
        super().__init__(target, sampler, runtime)
        assert runtime is not None
        self.runtime = runtime
        head = self.load(self._on_meta(target, runtime.model), runtime)
        assert isinstance(head, FrozenKVHead)
        self.head = head
        self._reads = head.reading(runtime.runner.pool.states)
        runtime.attention.check(self._reads, runtime.dtype)
        head.spec.prepare(head.ops, runtime.dtype)
        slots, width = target.max_num_seqs + 1, runtime.model.spec.hidden_size
        self._states = torch.zeros(slots, width, dtype=runtime.dtype, device=target.device)
        """[S, B] the target's hidden state from which the last known token was drawn."""
        self._ready = torch.zeros(slots, dtype=torch.bool, device=target.device)
        """[S] whether there is one."""

    @classmethod
    def recognises(cls, given: Given) -> bool:
        return layout_of(given) is not None

    @classmethod
    def why_not(cls, target: TargetInfo) -> str | None:
        if cls.name not in target.heads:
            return "no assistant is given; name its directory in drafter_model"
        return _layout(target).misfit(target)

    @classmethod
    def empty(cls, target: TargetInfo, model: Decoder) -> FrozenKVHead:
        layout = _layout(target)
        return FrozenKVHead(model, spec_of(layout.text, model.spec), layout.centroids, tied=layout.tied)

    @classmethod
    def source(cls, target: TargetInfo, head: DraftHead) -> HeadSource:
        assert isinstance(head, FrozenKVHead)
        layout = _layout(target)
        loading = store_as_in(head, layout.given, target.weighted)
        return HeadSource(layout.given.path, layout.tensors, head.leaves_out, loading)

    @classmethod
    def check_weights(cls, target: TargetInfo, model: Decoder) -> None:
        super().check_weights(target, model)
        layout = _layout(target)
        if layout.centroids is not None and target.weighted:
            layout.ids()

    def load(self, head: DraftHead, runtime: TargetRuntime) -> DraftHead:
        head, device, layout = super().load(head, runtime), runtime.model.norm.device, _layout(self.target)
        assert isinstance(head, FrozenKVHead)
        head.prepare(device)
        if isinstance(head.head, OrderedHead):
            ids = layout.ids() if self.target.weighted else torch.arange(head.spec.vocab_size)
            head.head.ids = ids.view(head.head.ids.shape).to(device)
        return head

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        return branching_rows(speculation, self.depth_of(speculation))

    def kind(self, span: Span) -> Shape:
        return shape_of(span)

    def admit(self, request: Request) -> None:
        self._ready[request.slot].fill_(False)

    def propose(self, group: Group) -> Draft:
        slots, depth = group.slots, chain_depth(group)
        state_RH, ready, place_LR = self.runtime.ops.recall(
            self._states, self._ready, group.table.known, slots, -1, 1 + depth
        )
        last, mix = place_LR[0].clamp(min=0), self._mix(group, 1)
        out_RH = self.head.forward(0, group.table.tokens[slots, last], state_RH, last, mix)
        shape = self.kind(group.spans[0])
        if isinstance(shape, tuple):
            return self._tree(group, out_RH, last, ready, *shape)
        guesses = Chain(group, self.sampler, place_LR[1:])
        for level in range(depth):
            if level:
                out_RH = self.head.forward(0, guesses.tokens[-1], self.head.passed_on(out_RH), last, mix)
            guesses.draw(self.head.logits(out_RH))
        return guesses.draft(ready)

    def _tree(
        self,
        group: Group,
        out_RH: torch.Tensor,
        last_R: torch.Tensor,
        ready_R: torch.Tensor,
        branching: Branching,
        depth: int,
        guessing: Guessing,
    ) -> Draft:
        scores = scores_of(group, self.sampler, self.head.logits, guessing)

        def grow(sprout: Sprout) -> torch.Tensor:
            each = sprout.tokens.shape[1]
            hidden, positions = self.head.passed_on(sprout.hidden_REH.flatten(0, 1)), last_R.repeat_interleave(each)
            out = self.head.forward(0, sprout.tokens.flatten(), hidden, positions, self._mix(group, each))
            return out.view_as(sprout.hidden_REH)

        return branching.grow(out_RH, depth, scores, grow, ready_R, group.arena)

    def _mix(self, group: Group, each: int) -> TargetMix:
        rows = committed(group, self.runtime, each)
        return TargetMix(self._reads, self.head.sources, self.runtime, self.head.ops, rows)

    def observe(self, group: Group, batch: ForwardBatch, logits: Logits, verdict: Verdict) -> None:
        of_step = verdict.leaf, batch.decision_index, batch.decisions
        self.runtime.ops.keep_leaves(
            self._states, self._ready, group.slots, group.indices, *of_step, logits.states.final
        )


def _layout(target: TargetInfo) -> Layout:
    layout = layout_of(given(target.heads[FrozenKVDrafter.name]))
    assert layout is not None
    return layout
