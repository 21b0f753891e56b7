"""What an attention backend is: geometry in, values out. It never learns why a row is there."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from stridelm.models.layers.decoder import LayerKV
from stridelm.types import DeviceGeometry, Geometry


class PreparedAttention(Protocol):
    """One step's geometry made ready; called once a layer."""

    def attend(
        self, kv: LayerKV, q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor
    ) -> torch.Tensor:
        """Queries of all rows against a layer's pool of P slots, the rows' own KV already written: [N, H, D]."""
        ...


class AttentionBackend(Protocol):
    device: ClassVar[str | None]
    """Device type that the backend is made for; None: any."""
    reads_device: ClassVar[bool]
    """It finds lengths and pages on the device (DeviceGeometry); otherwise the host says them (Geometry)."""

    def __init__(self, deterministic: bool) -> None: ...

    def check(self, layout: tuple[LayerKV, ...], query_heads: int, dtype: torch.dtype) -> None:
        """Raise ValueError for a model that the backend cannot serve."""
        ...

    def prepare(
        self, geometry: Geometry | DeviceGeometry, layout: tuple[LayerKV, ...], query_heads: int
    ) -> PreparedAttention:
        """Work done once a step, shared by all layers."""
        ...
