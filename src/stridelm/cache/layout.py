"""Describes what each layer caches per token; the pool, the ledger and attention read these descriptions.

A kind of layer (heads of keys and values, one latent row, ...) is a subclass of LayerState. It names the tensors of its
entries, if it has any, and the page group in which they are stored. Layers of one group need the same pages: all of a
request's, or those that a window reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

EIGHT_BITS = torch.float8_e4m3fn
"""In which entries may be stored instead of the model's dtype (kernels/entries.py)."""
FULL = "full"
"""The page group of layers with full attention."""


def group_of(window: int | None) -> str:
    """The page group of layers that attend to the last `window` tokens, their own included; None: to all."""
    return FULL if window is None else f"window_{window}"


@dataclass(frozen=True)
class LayerState:
    """One entry per token, in the pages of a group."""

    group: str
    window: int | None
    """Number of tokens that a row sees, its own included; None: all. The group may hold more than that."""
    stored: torch.dtype | None = field(default=None, kw_only=True)
    """The dtype of its entries; None: the model's."""

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of one entry."""
        raise NotImplementedError

    @property
    def read(self) -> LayerState:
        """The kind of the entries that its rows read; the state itself, unless it keeps none."""
        return self

    def in_eight_bits(self, key_scale: float, value_scale: float) -> LayerState:
        """The same with entries that are divided by these scales and stored in eight bits. Raises ValueError for a
        kind of layer that cannot be."""
        raise ValueError(
            f"layers with {type(self).__name__} cannot be stored in eight bits; leave kv_cache_dtype at 'auto'"
        )

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return sum(map(math.prod, self.tensors().values())) * (self.stored or dtype).itemsize


@dataclass(frozen=True)
class HeadsKV(LayerState):
    """A key and a value for each KV head, read by `heads` query heads."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    """Factor applied to the product of a query and a key."""
    key_scale: float = field(default=1.0, kw_only=True)
    """What a stored key must be multiplied by."""
    value_scale: float = field(default=1.0, kw_only=True)

    @classmethod
    def of(
        cls,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int | None = None,
        group: str | None = None,
        scale: float | None = None,
    ) -> HeadsKV:
        """Keys and values of the same width. group: by default the window's own. scale: by default the inverse of the
        width's square root."""
        scale = head_dim**-0.5 if scale is None else scale
        return cls(group or group_of(window), window, heads, kv_heads, head_dim, head_dim, scale)

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        return {"keys": (self.kv_heads, self.key_dim), "values": (self.kv_heads, self.value_dim)}

    def in_eight_bits(self, key_scale: float, value_scale: float) -> HeadsKV:
        return replace(self, stored=EIGHT_BITS, key_scale=key_scale, value_scale=value_scale)


@dataclass(frozen=True)
class LatentKV(LayerState):
    """One row for all `heads` query heads (DeepSeek-V2, arXiv 2405.04434, section 2.1.3): a latent of width `rank`,
    which every head expands into a key and a value, and after it a key of width `rope_dim` that all heads share."""

    heads: int
    rank: int
    rope_dim: int
    scale: float
    """Factor applied to the product of a query and a key."""
    key_scale: float = field(default=1.0, kw_only=True)
    """What a stored row must be multiplied by, as a key and as a value."""
    expands: tuple[int, int] | None = field(default=None, kw_only=True)
    """Widths of the key, without the part that all heads share, and of the value into which a head expands a latent;
    None: a backend that could attend to these instead is not to."""

    @property
    def value_scale(self) -> float:
        return self.key_scale

    @property
    def one_head(self) -> HeadsKV:
        """The same as a single KV head: keys are whole rows, values are their latents."""
        made = HeadsKV(self.group, self.window, self.heads, 1, self.rank + self.rope_dim, self.rank, self.scale)
        return replace(made, stored=self.stored, key_scale=self.key_scale, value_scale=self.value_scale)

    def as_heads(self, heads: int) -> HeadsKV:
        """The same for so many heads whose keys and values have been expanded; the shared part of keys is apart."""
        assert self.expands is not None
        return HeadsKV(self.group, self.window, heads, heads, *self.expands, self.scale)

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        return {"latents": (self.rank + self.rope_dim,)}

    def in_eight_bits(self, key_scale: float, value_scale: float) -> LatentKV:
        return replace(self, stored=EIGHT_BITS, key_scale=key_scale)


@dataclass(frozen=True)
class Shared(LayerState):
    """No entries: rows read those of an earlier layer in the same group, which every step writes before this layer
    runs."""

    layer: int
    """The number of that layer."""
    entries: LayerState
    """What this layer takes those entries for: its own number of query heads and its own scale."""

    @property
    def read(self) -> LayerState:
        return replace(self.entries, group=self.group, window=self.window)

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def in_eight_bits(self, key_scale: float, value_scale: float) -> Shared:
        return replace(self, entries=self.entries.in_eight_bits(key_scale, value_scale))


LayerStates = tuple[LayerState, ...]
"""A model's layers, in order."""


UNSCALED = (1.0, 1.0)
"""Scales of keys and of values."""


def in_eight_bits(states: Iterable[LayerState], scales: Mapping[int, tuple[float, float]] | None = None) -> LayerStates:
    """The same layers with entries in eight bits. scales: number of a layer -> scales of its keys and values; layers
    that are not in it have UNSCALED. Raises ValueError for a kind of layer that cannot be stored so."""
    known = scales or {}
    layers = enumerate(states)
    owners = ((state.layer if isinstance(state, Shared) else number, state) for number, state in layers)
    return tuple(state.in_eight_bits(*known.get(owner, UNSCALED)) for owner, state in owners)


def bytes_per_token(states: Iterable[LayerState], dtype: torch.dtype) -> int:
    """Memory that one token's entries take over all layers."""
    return sum(state.bytes_per_token(dtype) for state in states)


def windows_of(states: Iterable[LayerState]) -> dict[str, int | None]:
    """Page group -> how far back its pages are needed, set by the layer with the longest window; None: all of them."""
    reaches: dict[str, int | None] = {}
    for state in states:
        known = reaches.get(state.group, None if state.group == FULL else 0)
        reaches[state.group] = None if known is None or state.window is None else max(known, state.window)
    return reaches
