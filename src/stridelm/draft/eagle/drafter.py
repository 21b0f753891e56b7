"""Drafting with EAGLE-1, -2 and -3 heads (arXiv 2401.15077, 2406.16858, 2503.01840)."""

from __future__ import annotations

from stridelm.draft.base import TargetInfo
from stridelm.draft.eagle.head import Eagle1Head, Eagle3Head, EagleHead
from stridelm.draft.eagle.layout import Layout
from stridelm.draft.given import Given, given
from stridelm.draft.head_drafter import HeadDrafter
from stridelm.draft.heads import DraftHead, HeadSource
from stridelm.models.layers.decoder import Decoder
from stridelm.run.heads import TargetRuntime


class EagleDrafter(HeadDrafter):
    name = "eagle"
    takes = "an EAGLE head of SafeAILab's, SpecForge's or speculators' layout"

    @classmethod
    def recognises(cls, given: Given) -> bool:
        return Layout.of(given) is not None

    @classmethod
    def why_not(cls, target: TargetInfo) -> str | None:
        if "eagle" not in target.heads:
            return "no EAGLE head is given; name its directory in drafter_model"
        return _layout(target).misfit(target)

    @classmethod
    def empty(cls, target: TargetInfo, model: Decoder) -> EagleHead:
        layout = _layout(target)
        if not layout.is_third:
            return Eagle1Head(model, layout.spec(), own_embedding=layout.own_embedding, bias=layout.bias)
        return Eagle3Head(
            model,
            layout.spec(),
            own_embedding=layout.own_embedding,
            taps=layout.taps(model.spec.num_layers),
            draft_vocab=layout.draft_vocab,
            norm_before_residual=layout.norm_before_residual,
        )

    @classmethod
    def source(cls, target: TargetInfo, head: DraftHead) -> HeadSource:
        layout = _layout(target)
        return HeadSource(layout.given.path, layout.tensors)

    @classmethod
    def check_weights(cls, target: TargetInfo, model: Decoder) -> None:
        super().check_weights(target, model)
        layout = _layout(target)
        if layout.is_third:
            layout.ids(target.vocab_size)

    def load(self, head: DraftHead, runtime: TargetRuntime) -> DraftHead:
        head, device = super().load(head, runtime), runtime.model.norm.device
        assert isinstance(head, EagleHead)
        head.prepare(device)
        if isinstance(head, Eagle3Head):
            head.set_vocabulary(_layout(self.target).ids(self.target.vocab_size).to(device))
        return head


def _layout(target: TargetInfo) -> Layout:
    layout = Layout.of(given(target.heads["eagle"]))
    assert layout is not None
    return layout
