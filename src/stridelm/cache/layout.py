"""What a layer remembers of the tokens before a row, as a value: the pool, the ledger and attention read it from here.

A kind of layer (heads of keys and values, one latent row, ...) is a subclass of LayerState. It names the tensors of its
entries, and the page group in which they lie. Layers of one group need the same pages: all of a request's, or those
that a window reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

FULL = "full"
"""The page group of layers that look at everything."""


def group_of(window: int | None) -> str:
    """The page group of layers that look back over `window` tokens, their own included; None: over all."""
    return FULL if window is None else f"window_{window}"


@dataclass(frozen=True)
class LayerState:
    """One entry a token, in the pages of a group."""

    group: str
    window: int | None
    """How many tokens a row sees, its own included; None: everything. The group may hold more than that."""

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of one entry."""
        raise NotImplementedError

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return sum(map(math.prod, self.tensors().values())) * dtype.itemsize


@dataclass(frozen=True)
class HeadsKV(LayerState):
    """A key and a value for each KV head, at which `heads` query heads look."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    """Of a query's product with a key."""

    @classmethod
    def of(
        cls, heads: int, kv_heads: int, head_dim: int, window: int | None = None, group: str | None = None
    ) -> HeadsKV:
        """Keys and values of one width, scaled by its root. group: the window's own, if not given."""
        return cls(group or group_of(window), window, heads, kv_heads, head_dim, head_dim, head_dim**-0.5)

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        return {"keys": (self.kv_heads, self.key_dim), "values": (self.kv_heads, self.value_dim)}


LayerStates = tuple[LayerState, ...]
"""A model's layers, in order."""


def bytes_per_token(states: Iterable[LayerState], dtype: torch.dtype) -> int:
    """Memory that one token's entries take over all layers."""
    return sum(state.bytes_per_token(dtype) for state in states)


def windows_of(states: Iterable[LayerState]) -> dict[str, int | None]:
    """Page group -> how far back its pages are needed, as the layer that looks furthest does; None: all of them."""
    reaches: dict[str, int | None] = {}
    for state in states:
        known = reaches.get(state.group, None if state.group == FULL else 0)
        reaches[state.group] = None if known is None or state.window is None else max(known, state.window)
    return reaches
