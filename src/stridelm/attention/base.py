"""The interface of an attention backend: geometry in, values out. It is never told why a row is there.

How a layer mixes rows depends on the state it keeps (cache/layout.py). A backend has a mixer for each kind of layer
state that it can serve; a model with another kind is refused when it is loaded.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from stridelm.batch import Geometry
from stridelm.cache.layout import HeadsKV, LatentKV, LayerState, LayerStates
from stridelm.cache.pool import StoredLayers
from stridelm.kernels.ops import LatentRope, Ops, QKRope

Entries = Mapping[str, torch.Tensor]
"""A layer's tensors by name, [P, ...] over the pool's P slots."""

S = TypeVar("S", bound=LayerState)


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class HeadsInput:
    """Input of a layer with HeadsKV."""

    qkv_NXD: torch.Tensor
    """Projections: H query heads, then G key and G value heads."""
    rope: QKRope
    """Turns the projections into queries and keys."""

    def unmixed(self) -> torch.Tensor:
        """Zeros instead of each row's values, allocated beside what attention allocates."""
        q_NHD = self.qkv_NXD[:, : self.rope.heads].contiguous()
        return torch.zeros_like(q_NHD)


class Expansion(Protocol):
    """The matrices by which each head expands a latent into its key and its value."""

    def absorb(self, q_NHD: torch.Tensor) -> torch.Tensor:
        """[N, H, R] queries in the space of latents: times each head's transposed expansion of keys."""
        ...

    def values(self, mixed_NHR: torch.Tensor) -> torch.Tensor:
        """[N, H, V] values: each head's sum of weighted latents, expanded."""
        ...

    def absorbs_few(self, q_NHD: torch.Tensor) -> torch.Tensor | None:
        """[H, D, R]: what `absorb` multiplies so few rows by if it takes kernels/head_products.py for them; else
        None."""
        ...

    def expand(self, latents_LR: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """[L, last - first, D + V] keys and, after them, values of the heads from `first` up to `last`. Without the
        promise of equal bits."""
        ...


@dataclass(frozen=True, eq=False)
class LatentInput:
    """Input of a layer with LatentKV. A head's key is an expansion of the latent. The backend chooses: either the
    expansion's transpose is applied to the query, so that queries meet latents as they are stored, or latents are
    expanded."""

    q_NHD: torch.Tensor
    """The part of the queries that is not rotated."""
    turned_NHK: torch.Tensor
    """The part of the queries that is rotated, not yet rotated."""
    rows_NC: torch.Tensor
    """Projections of latent and shared key."""
    rope: LatentRope
    """Turns the projections into latent rows."""
    expansion: Expansion

    def unmixed(self) -> torch.Tensor:
        """Zeros instead of each row's values, allocated beside what attention allocates."""
        turned_NHK = self.turned_NHK.contiguous()
        mixed_NHR = torch.zeros_like(self.expansion.absorb(self.q_NHD))
        del turned_NHK
        return self.expansion.values(mixed_NHR)


class Mix(Protocol):
    """What a model calls so that a layer's rows attend to one another and to the KV that the caller keeps."""

    def __call__(self, layer: int, inputs: Any) -> torch.Tensor:
        """inputs: of the type that the layer's state takes. Returns each row's values, [N, H, D]."""
        ...


class PagedLayers:
    """A Mix over a pool's pages, which may be able to run whole layers."""

    def run_layers(
        self, layers: tuple[int, ...], layers_LF: np.ndarray[Any, Any], call: list[int], wanted_M: torch.Tensor | None
    ) -> bool:
        """As `Mixer.run_layers`; False also if other rows attend than those wanted, None for all. All layers keep keys
        and values."""
        raise NotImplementedError


class Pairs(NamedTuple):
    """How much attention computes, in pairs of a row and an entry that it sees, for those spans of a step that a pass
    which is not captured attends to in another way."""

    captured: float
    """By a captured pass."""
    spared: float
    """How many of these as much time as the other way saves is worth."""


class Mixer(Generic[S]):
    """Serves all layers with one kind of state, for one step."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        """Work done once per step, shared by all layers."""
        raise NotImplementedError

    @classmethod
    def check(cls, state: S, dtype: torch.dtype, deterministic: bool) -> None:
        """Raise ValueError for a layer that cannot be served."""

    @classmethod
    def warm_up(cls, state: S, dtype: torch.dtype, deterministic: bool, page_size: int, device: torch.device) -> None:
        """Launch every kernel that steps may need for such layers, over no rows."""

    @classmethod
    def pairs(cls, state: S, deterministic: bool, geometry: Geometry) -> Pairs:
        """Of one such layer. None by default: both ways are the same."""
        return Pairs(0.0, 0.0)

    @classmethod
    def workspace(cls, state: S, dtype: torch.dtype, deterministic: bool, rows: int, reach: int) -> int:
        """Bytes that such a layer may allocate beside what `unmixed` of its input does, in a step of so many rows that
        see at most `reach` entries."""
        return 0

    def mix(
        self,
        state: S,
        inputs: Any,
        entries: Entries,
        slots_N: torch.Tensor,
        ops: Ops,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the rows' entries to the layer's pool at `slots`, then attend.

        wanted_M: int64 rows that attend, which are those of the step's geometry unless there are none; None: all.
        """
        raise NotImplementedError

    def run_layers(
        self,
        stored: StoredLayers,
        slots: dict[str, torch.Tensor],
        layers_LF: np.ndarray[Any, Any],
        call: list[int],
    ) -> bool:
        """Run layers of attention and a gated MLP as one compiled call (kernels/host/layer.py). slots: page group ->
        [N] int64 pool slot of each row. layers, call: tables (kernels/host/columns.py), the latter from ROWS on. False
        if the backend has no such call."""
        return False


class HeadsMixer(Mixer[HeadsKV]):
    """Keys and values by head: backends differ only in `attend`."""

    @classmethod
    def check(cls, state: HeadsKV, dtype: torch.dtype, deterministic: bool) -> None:
        if state.key_dim != state.value_dim:
            raise ValueError(
                f"keys of width {state.key_dim} and values of {state.value_dim} need attention='reference'"
            )

    def mix(
        self,
        state: HeadsKV,
        inputs: HeadsInput,
        entries: Entries,
        slots_N: torch.Tensor,
        ops: Ops,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = entries["keys"], entries["values"]
        scales = state.key_scale, state.value_scale
        q_NHD = ops.rope_and_store(inputs.qkv_NXD, inputs.rope, keys, values, slots_N, *scales)
        if wanted_M is not None and not len(wanted_M):
            return q_NHD[:0]
        return self.attend(state, q_NHD if wanted_M is None else q_NHD.index_select(0, wanted_M), keys, values)

    def attend(
        self, state: HeadsKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        """[N, H, D]: attend with all rows' queries to a layer's pool, in which the rows' own KV is already written."""
        raise NotImplementedError


class LatentMixer(Mixer[LatentKV]):
    """Latent rows that all heads share: backends differ in `attend`, and may have another way for some rows."""

    def mix(
        self,
        state: LatentKV,
        inputs: LatentInput,
        entries: Entries,
        slots_N: torch.Tensor,
        ops: Ops,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        latents = entries["latents"]
        q_NHD = inputs.q_NHD
        made = inputs.turned_NHK, inputs.rows_NC, inputs.rope
        turned_NHK = ops.rope_and_store_latent(*made, latents, slots_N, state.key_scale)
        if wanted_M is not None and not len(wanted_M):
            return inputs.expansion.values(inputs.expansion.absorb(q_NHD[:0]))
        if wanted_M is not None:
            q_NHD, turned_NHK = (part.index_select(0, wanted_M) for part in (q_NHD, turned_NHK))
        return self.values(state, q_NHD, turned_NHK, latents, inputs.expansion)

    def values(
        self,
        state: LatentKV,
        q_NHD: torch.Tensor,
        turned_NHK: torch.Tensor,
        latents_PC: torch.Tensor,
        expansion: Expansion,
    ) -> torch.Tensor:
        """[N, H, V]: as `attend`, from each head's own query to its own values."""
        return expansion.values(self.attend(state, expansion.absorb(q_NHD), turned_NHK, latents_PC))

    def attend(
        self, state: LatentKV, q_NHR: torch.Tensor, turned_NHK: torch.Tensor, latents_PC: torch.Tensor
    ) -> torch.Tensor:
        """[N, H, R] weighted latents: attend with all rows' queries, of which `turned` is the rotated part, to a
        layer's pool, in which the rows' own entries are already written."""
        raise NotImplementedError


class LatentsAsHead(LatentMixer):
    """Attends by a mixer of heads: a latent row is the key, and its latent the value, of one head that all query heads
    share."""

    heads: ClassVar[type[HeadsMixer]]
    """Reads no more of a value than the state's width."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        self._heads = self.heads(backend, geometry)

    def attend(
        self, state: LatentKV, q_NHR: torch.Tensor, turned_NHK: torch.Tensor, latents_PC: torch.Tensor
    ) -> torch.Tensor:
        rows_PGC = latents_PC[:, None]
        queries = torch.cat((q_NHR, turned_NHK), dim=2)
        return self._heads.attend(state.one_head, queries, rows_PGC, rows_PGC)


class AttentionBackend:
    device: ClassVar[str | None] = None
    """Device type that the backend is made for; None: any."""
    reads_device: ClassVar[bool] = False
    """It reads lengths and pages on the device, so that steps may be planned on bounds; if False, on the host."""
    mixers: ClassVar[Mapping[type[LayerState], type[Mixer[Any]]]]

    def __init__(self, deterministic: bool) -> None:
        """deterministic: a row's bits must not depend on the other rows of the batch."""
        self.deterministic = deterministic
        self._checked: dict[tuple[LayerState, torch.dtype], None] = {}
        """Kinds of layers that it is to serve, in order."""

    def check(self, states: LayerStates, dtype: torch.dtype) -> None:
        """Raise ValueError for a model that the backend cannot serve."""
        for state in dict.fromkeys(state.read for state in states):
            if type(state) not in self.mixers:
                able = ", ".join(kind.__name__ for kind in self.mixers)
                raise ValueError(
                    f"{type(self).__name__} cannot serve layers with {type(state).__name__}, only with {able}; "
                    "choose another attention backend"
                )
            self.mixers[type(state)].check(state, dtype, self.deterministic)
            self._checked[state, dtype] = None

    def warm_up(self, page_size: int, device: torch.device) -> None:
        """Launch every kernel that steps may need, for the layers that were checked, so that none is compiled later."""
        for state, dtype in self._checked:
            self.mixers[type(state)].warm_up(state, dtype, self.deterministic, page_size, device)

    def workspace(self, rows: int, reach: int) -> int:
        """The largest `Mixer.workspace` of the layers that were checked."""
        sizes = (
            self.mixers[type(state)].workspace(state, dtype, self.deterministic, rows, reach)
            for state, dtype in self._checked
        )
        return max(sizes, default=0)

    def pairs(self, geometry: Geometry, layers: Mapping[LayerState, int]) -> Pairs:
        """Of all layers. layers: how many there are of each kind."""
        found = [
            (count, self.mixers[type(state)].pairs(state, self.deterministic, geometry))
            for state, count in layers.items()
        ]
        return Pairs(*(sum(count * each[place] for count, each in found) for place in range(2)))

    def prepare(self, geometry: Geometry) -> PreparedAttention:
        """Prepare one step. Valid until the next call."""
        return PreparedAttention(self, geometry)

    def static_kind(self, geometry: Geometry, states: LayerStates, dtype: torch.dtype) -> Hashable | None:
        """What a captured forward pass of such a step depends on besides its size; None: it cannot be captured."""
        return None

    def static(self, kind: Hashable, rows: int, spans: int, reach: int, like: Geometry) -> StaticAttention:
        """What captured layers read, for up to `rows` rows and `spans` spans with no more than `reach` keys each. like:
        a step of this kind, for the width of its tables."""
        raise NotImplementedError


class StaticAttention(Protocol):
    """A geometry of a fixed size, into which steps are copied and padded."""

    geometry: Geometry
    nbytes: int

    def fill(self, geometry: Geometry) -> None:
        """Copy a step in; the captured layers read it from now on."""
        ...


class PreparedAttention:
    """One step's mixers, each made when the first layer asks for it."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        self._backend, self._geometry = backend, geometry
        self._mixers: dict[type[LayerState], Mixer[Any]] = {}

    def mixer(self, state: LayerState) -> Mixer[Any]:
        """The one for layers of this kind."""
        kind = type(state)
        if kind not in self._mixers:
            self._mixers[kind] = self._backend.mixers[kind](self._backend, self._geometry)
        return self._mixers[kind]
