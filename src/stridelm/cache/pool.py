"""The tensors behind the pages, and how many pages memory has room for."""

from __future__ import annotations

import logging

import torch

from stridelm.models.layers.decoder import LayerKV

logger = logging.getLogger(__name__)


class PagePool:
    """Keys and values of every layer: [slots, kv heads, head size] each. Slot = page * page_size + offset; the null
    page 0 takes what padding writes. Zeroed, so that a masked read is finite."""

    def __init__(
        self,
        layout: tuple[LayerKV, ...],
        pages: dict[str, int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.page_size = page_size
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for layer in layout:
            shape = ((pages[layer.group] + 1) * page_size, layer.kv_heads, layer.head_dim)
            self.keys.append(torch.zeros(shape, dtype=dtype, device=device))
            self.values.append(torch.zeros(shape, dtype=dtype, device=device))

    def compact(self, group: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots `source` to `target`, all layers of a group: an accepted path moves to where it belongs."""
        for layer, keys, values in zip(self.layout, self.keys, self.values, strict=True):
            if layer.group == group:
                keys.index_copy_(0, target, keys.index_select(0, source))
                values.index_copy_(0, target, values.index_select(0, source))


def bytes_per_token(layout: tuple[LayerKV, ...], dtype: torch.dtype) -> int:
    """Memory that one token's KV takes over all layers."""
    return sum(layer.bytes_per_token(dtype.itemsize) for layer in layout)


def page_count(
    layout: tuple[LayerKV, ...], page_size: int, dtype: torch.dtype, device: torch.device, fraction: float, cap: int
) -> int:
    """Pages that a fraction of the free memory has room for, at most `cap`.

    Raises ValueError if there is not even room for one page.
    """
    free = free_memory(device)
    page_bytes = bytes_per_token(layout, dtype) * page_size
    pages = min(cap, int(free * fraction) // page_bytes)
    if pages < 1:
        raise ValueError(
            f"no room for KV: {fraction:.0%} of {free / 2**20:.0f} MiB free on {device} is under one page of "
            f"{page_bytes} bytes; raise kv_memory_fraction or free memory"
        )
    return pages


def free_memory(device: torch.device) -> int:
    """Bytes free on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
