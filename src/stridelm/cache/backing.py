"""Memory under tensors whose addresses stay while their size changes.

A backing reserves addresses for the most that a tensor may ever hold, and has memory under a prefix of them. Kernels,
strides and captured graphs know only the addresses, so memory can be moved from one tensor's end to another's without
them. Behind the prefix, reads are harmless and give zeros; nothing may be written there.
"""

from __future__ import annotations

import logging
import mmap
from typing import Protocol

import torch

logger = logging.getLogger(__name__)


class Backing(Protocol):
    """A tensor's addresses, and memory under the first of them."""

    @property
    def bytes(self) -> torch.Tensor:
        """uint8, of the full size that was reserved. The memory lives as long as this tensor or a view of it does."""
        ...

    def resize(self, size: int) -> None:
        """Have memory under the first `size` bytes, rounded up to whole chunks. Chunks that are added hold zeros;
        contents of those that leave are lost. On a GPU, the caller has waited until nothing that was launched can use
        them."""
        ...


class ElasticMemory(Protocol):
    """Makes the backings of one device. Chunks that one of them gives back serve the others."""

    chunk: int
    """Bytes in which memory is given and taken back."""

    def reserve(self, size: int, backed: int) -> Backing:
        """Addresses for `size` bytes, the first `backed` of which have memory, all zeros."""
        ...

    def wait(self) -> None:
        """Wait until nothing that was launched on the device can use memory that is about to leave."""
        ...


class HostBacking:
    """Anonymous pages, which the kernel provides when they are first written and takes back on request."""

    def __init__(self, size: int, backed: int, chunk: int) -> None:
        self._map = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._chunk = chunk
        self._backed = rounded(backed, chunk)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def bytes(self) -> torch.Tensor:
        return self._bytes

    def resize(self, size: int) -> None:
        backed = rounded(size, self._chunk)
        if backed < self._backed:
            end = min(self._backed, len(self._map))
            self._map.madvise(mmap.MADV_DONTNEED, backed, end - backed)
        self._backed = backed


class HostMemory:
    chunk = mmap.PAGESIZE

    def reserve(self, size: int, backed: int) -> HostBacking:
        assert backed <= size
        return HostBacking(size, backed, self.chunk)

    def wait(self) -> None:
        """A step on the host has ended when it returns."""


def elastic_memory(device: torch.device) -> ElasticMemory | None:
    """What can move memory between tensors on this device; None if its driver cannot, which is logged."""
    if device.type == "cpu":
        return HostMemory()
    from stridelm.cache.cuda_backing import CudaMemory, DriverError

    try:
        return CudaMemory(device)
    except (DriverError, OSError) as error:
        logger.warning("the split of KV between page groups stays as it is at the start: %s", error)
        return None


def rounded(size: int, chunk: int) -> int:
    """The size in whole chunks."""
    return -(-size // chunk) * chunk
