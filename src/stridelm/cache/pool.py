"""The tensors behind the pages, and how many pages memory has room for."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from stridelm.models.layers.decoder import LayerKV
from stridelm.progress import size

if TYPE_CHECKING:
    from stridelm.kernels.triton_rows import Pools

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
        self.pools: dict[str, Pools] = {}
        """Page group -> its layers' tensors as one launch finds them, where a kernel moves entries. Made here and kept:
        a captured launch reads it at every replay."""
        if device.type == "cuda" and find_spec("triton"):
            from stridelm.kernels.triton_rows import Pools

            self.pools = {group: Pools.of(self._tensors(group)) for group in pages}

    def compact(self, group: str, source_N: torch.Tensor, target_N: torch.Tensor) -> None:
        """Copy slots source[i] to target[i], all layers of a group, as if all were read before any is written: an
        accepted path moves to where it belongs.

        Both int64. No two targets are the same but in pairs (0, 0), which may stand anywhere. No entry may read what
        one before it writes: `kernels.triton_rows.compact` says which order keeps to that.
        """
        if group in self.pools:
            from stridelm.kernels.triton_rows import compact

            compact(self.pools[group], source_N, target_N)
            return
        for tensor in self._tensors(group):
            tensor.index_copy_(0, target_N, tensor.index_select(0, source_N))

    def _tensors(self, group: str) -> list[torch.Tensor]:
        """Keys and values of a group's layers."""
        layers = zip(self.layout, self.keys, self.values, strict=True)
        return [tensor for layer, *both in layers if layer.group == group for tensor in both]


def bytes_per_token(layout: tuple[LayerKV, ...], dtype: torch.dtype) -> int:
    """Memory that one token's KV takes over all layers."""
    return sum(layer.bytes_per_token(dtype.itemsize) for layer in layout)


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that a pool is cut from, in bytes."""

    device: torch.device
    free: int
    """With the weights in place and nothing else."""
    activations: int = 0
    """What of it the largest step needs while it runs, and captured steps and a drafter's weights keep."""

    @property
    def left(self) -> int:
        """What pages may be cut from."""
        return max(0, self.free - self.activations)

    def page_count(self, page_bytes: int, fraction: float, cap: int) -> int:
        """Pages that the fraction of what is left has room for, at most `cap`.

        Raises ValueError, saying how much is missing, if there is not even room for one page.
        """
        room = int(self.left * fraction)
        if room < page_bytes:
            raise ValueError(
                f"no room for KV: {fraction:g} of {self} is {size(room)}, {size(page_bytes - room)} less than a page "
                f"takes; raise kv_memory_fraction{self._remedy} or free memory"
            )
        return min(cap, room // page_bytes)

    def check(self, pages: int, page_bytes: int) -> None:
        """Raise ValueError, saying how much is missing, if what is left has no room for so many pages."""
        need = pages * page_bytes
        if need > self.left:
            raise ValueError(
                f"num_pages {pages} of {size(page_bytes)} each take {size(need)} and there are {self}: "
                f"{size(need - self.left)} are missing; lower num_pages{self._remedy} or free memory"
            )

    def __str__(self) -> str:
        beside = f", beside {size(self.activations)} for activations and captured steps," if self.activations else ""
        return f"{size(self.left)} free on {self.device}{beside}"

    @property
    def _remedy(self) -> str:
        return ", lower max_num_batched_tokens" if self.activations else ""


def free_memory(device: torch.device) -> int:
    """Bytes free on the device, with what torch keeps of a GPU's for later given back."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
