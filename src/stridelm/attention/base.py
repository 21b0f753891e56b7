"""What an attention backend is: geometry in, values out. It never learns why a row is there.

A layer mixes rows by what it remembers (cache/layout.py). A backend offers a mixer for each kind of layer state that it
can serve; a model with another kind is refused when it is loaded.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from stridelm.cache.layout import HeadsKV, LayerState, LayerStates
from stridelm.kernels.ops import Ops, QKRope
from stridelm.types import Geometry

Entries = Mapping[str, torch.Tensor]
"""A layer's tensors by name, [P, ...] over the pool's P slots."""

S = TypeVar("S", bound=LayerState)


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class HeadsInput:
    """What a layer of HeadsKV mixes."""

    qkv_NXD: torch.Tensor
    """Projections: H query heads before G key and G value heads."""
    rope: QKRope
    """How queries and keys are made of theirs."""


class Mix(Protocol):
    """What a model calls to let a layer's rows see one another, and whatever KV the caller keeps."""

    def __call__(self, layer: int, inputs: Any) -> torch.Tensor:
        """inputs: of the kind that the layer's state takes. Returns what each row is given, [N, H, D] of heads."""
        ...


class Mixer(Generic[S]):
    """One step's layers of one kind of state."""

    def __init__(self, backend: AttentionBackend, geometry: Geometry) -> None:
        """Work done once a step, shared by all layers."""
        raise NotImplementedError

    @classmethod
    def check(cls, state: S, dtype: torch.dtype, deterministic: bool) -> None:
        """Raise ValueError for a layer that cannot be served."""

    def mix(
        self,
        state: S,
        inputs: Any,
        entries: Entries,
        slots_N: torch.Tensor,
        ops: Ops,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the rows' entries to the layer's pool at `slots`, then look.

        wanted_M: int64 rows that look, for which the step's geometry is; all, if None is given.
        """
        raise NotImplementedError


class HeadsMixer(Mixer[HeadsKV]):
    """Keys and values by head: what backends differ in is how they attend."""

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
        q_NHD = ops.rope_and_store(inputs.qkv_NXD, inputs.rope, keys, values, slots_N)
        return self.attend(state, q_NHD if wanted_M is None else q_NHD.index_select(0, wanted_M), keys, values)

    def attend(
        self, state: HeadsKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        """Queries of all rows against a layer's pool, the rows' own KV already written: [N, H, D]."""
        raise NotImplementedError


class AttentionBackend:
    device: ClassVar[str | None] = None
    """Device type that the backend is made for; None: any."""
    reads_device: ClassVar[bool] = False
    """It finds lengths and pages on the device, so that steps may be planned on bounds; otherwise the host looks."""
    mixers: ClassVar[Mapping[type[LayerState], type[Mixer[Any]]]]

    def __init__(self, deterministic: bool) -> None:
        """deterministic: a row's bits must not depend on what runs beside it."""
        self.deterministic = deterministic

    def check(self, states: LayerStates, dtype: torch.dtype) -> None:
        """Raise ValueError for a model that the backend cannot serve."""
        for state in dict.fromkeys(states):
            if type(state) not in self.mixers:
                able = ", ".join(kind.__name__ for kind in self.mixers)
                raise ValueError(
                    f"{type(self).__name__} cannot serve layers with {type(state).__name__}, only with {able}; "
                    "choose another attention backend"
                )
            self.mixers[type(state)].check(state, dtype, self.deterministic)

    def prepare(self, geometry: Geometry) -> PreparedAttention:
        """One step made ready. Valid until the next call."""
        return PreparedAttention(self, geometry)

    def static_kind(self, geometry: Geometry, states: LayerStates, dtype: torch.dtype) -> Hashable | None:
        """What a captured forward pass of such a step depends on beside its size; None: it cannot be captured."""
        return None

    def static(self, kind: Hashable, rows: int, spans: int, reach: int, like: Geometry) -> StaticAttention:
        """What captured layers are to read, for so many rows of so many spans, none of which reaches further. like: a
        step of this kind, for the width of its tables."""
        raise NotImplementedError


class StaticAttention(Protocol):
    """A geometry of a fixed size, into which steps are copied: what is missing to the size is padding."""

    geometry: Geometry
    nbytes: int

    def fill(self, geometry: Geometry) -> None:
        """Let the layers that were captured over it read this step from now on."""
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
