"""Where a drafting head's weights come from, what is known of them before they are read, and loading them."""

from __future__ import annotations

from typing import ClassVar

import torch

from stridelm.draft.base import Drafter, MemoryNeed, TargetInfo
from stridelm.draft.heads import DraftHead, HeadSource, check_head, load_head
from stridelm.models.layers.decoder import Decoder
from stridelm.run.heads import TargetRuntime


class HeadWeights(Drafter):
    """Base of drafters with a head; subclasses say how it is built and what its files hold."""

    needs_states: ClassVar[bool] = True

    @classmethod
    def empty(cls, target: TargetInfo, model: Decoder) -> DraftHead:
        """The head without its weights. Raises ValueError for a config that does not describe one."""
        raise NotImplementedError

    @classmethod
    def source(cls, target: TargetInfo, head: DraftHead) -> HeadSource:
        """Where the weights of `empty` come from; it gets the formats in which they are stored."""
        raise NotImplementedError

    def load(self, head: DraftHead, runtime: TargetRuntime) -> DraftHead:
        """The head with its weights, on the target's device. Raises ValueError if they do not fit."""
        source = self.source(self.target, head)
        return load_head(head, source if self.target.weighted else None, runtime)

    @classmethod
    def check_weights(cls, target: TargetInfo, model: Decoder) -> None:
        head = cls._on_meta(target, model)
        source = cls.source(target, head)
        check_head(head, source if target.weighted else None, target.device)

    @classmethod
    def memory_need(cls, target: TargetInfo, model: Decoder) -> MemoryNeed:
        head = cls._on_meta(target, model)
        return MemoryNeed(sum(parameter.numel() for parameter in head.parameters()), head.layer_states)

    @classmethod
    def _on_meta(cls, target: TargetInfo, model: Decoder) -> DraftHead:
        with torch.device("meta"):
            return cls.empty(target, model)
