"""A kind of layer that no backend knows: a row is given the mean of what it sees. For what must hold of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stridelm.cache.layout import LayerState


@dataclass(frozen=True)
class MeanState(LayerState):
    """One vector a token."""

    width: int

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        return {"rows": (self.width,)}
