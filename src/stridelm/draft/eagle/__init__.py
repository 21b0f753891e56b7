"""Drafting with EAGLE-1, -2 and -3 heads (arXiv 2401.15077, 2406.16858, 2503.01840)."""

from __future__ import annotations

import torch

from stridelm.draft.base import Target
from stridelm.draft.eagle.head import Eagle1Head, Eagle3Head, EagleHead
from stridelm.draft.eagle.layout import Layout
from stridelm.draft.follow import FollowingDrafter
from stridelm.draft.given import Given, given
from stridelm.draft.heads import load_head
from stridelm.run.heads import Serving


class EagleDrafter(FollowingDrafter):
    name = "eagle"
    takes = "an EAGLE head of SafeAILab's, SpecForge's or speculators' layout"

    @classmethod
    def recognises(cls, given: Given) -> bool:
        return Layout.of(given) is not None

    @classmethod
    def why_not(cls, target: Target) -> str | None:
        if "eagle" not in target.heads:
            return "no EAGLE head is given; name its directory in drafter_model"
        return _layout(target).misfit(target)

    def load(self, serving: Serving) -> EagleHead:
        layout, target = _layout(self.target), serving.model
        with torch.device("meta"):
            head = self._empty(layout, serving)
        head = load_head(head, layout.given.path, layout.tensors if self.target.weighted else None, serving)
        head.prepare(target.norm.device)
        if isinstance(head, Eagle3Head):
            head.ids = layout.ids(target.spec.vocab_size).to(target.norm.device)
        return head

    def _empty(self, layout: Layout, serving: Serving) -> EagleHead:
        target, spec = serving.model, layout.spec()
        if not layout.is_third:
            return Eagle1Head(target, spec, own_embedding=layout.own_embedding, bias=layout.bias)
        return Eagle3Head(
            target,
            spec,
            own_embedding=layout.own_embedding,
            taps=layout.taps(target.spec.num_layers),
            draft_vocab=layout.draft_vocab,
            norm_before_residual=layout.norm_before_residual,
        )


def _layout(target: Target) -> Layout:
    layout = Layout.of(given(target.heads["eagle"]))
    assert layout is not None
    return layout
