"""Memory on the host whose size changes while its addresses stay."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from stridelm.cache.backing import HostBacking, HostMemory, elastic_memory, rounded

CHUNK = HostMemory.chunk
MIB = 2**20


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_addresses_stay() -> None:
    """Whatever the size, the tensor is the same, and what is under the smallest size keeps its contents."""
    backing = HostMemory().reserve(10 * CHUNK + 7, 3 * CHUNK)
    tensor, address = backing.bytes, backing.bytes.data_ptr()
    assert tensor.shape == (10 * CHUNK + 7,) and tensor.dtype == torch.uint8
    tensor[: 3 * CHUNK] = 5
    for size in (10 * CHUNK + 7, CHUNK + 1, 4 * CHUNK, 0, 10 * CHUNK):
        backing.resize(size)
        assert backing.bytes.data_ptr() == address
    assert bool((tensor == 0).all())


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_what_comes_back_is_zero(size: int) -> None:
    """Chunks that left hold zeros, while they are away and when they are back; the others are as they were."""
    backing = HostBacking(4 * CHUNK, 4 * CHUNK, CHUNK)
    backing.bytes.fill_(9)
    kept = rounded(size, CHUNK)
    for count in (size, 4 * CHUNK):
        backing.resize(count)
        assert bool((backing.bytes[:kept] == 9).all()) and bool((backing.bytes[kept:] == 0).all())


def test_memory_is_given_back() -> None:
    """To the machine: the process is smaller by what was shrunk."""
    backing = HostMemory().reserve(64 * MIB, 64 * MIB)
    before = resident()
    backing.bytes.fill_(1)
    full = resident()
    assert full - before > 60 * MIB
    backing.resize(4 * MIB)
    assert full - resident() > 55 * MIB


def test_a_view_keeps_the_memory() -> None:
    """Tensors outlive what they were made from."""
    view = HostMemory().reserve(8 * CHUNK, 8 * CHUNK).bytes.view(torch.float32)[5:]
    view.fill_(2.5)
    junk = [torch.full((CHUNK,), 7, dtype=torch.uint8) for _ in range(64)]
    assert bool((view == 2.5).all()) and junk


def test_every_device_has_its_own() -> None:
    assert isinstance(elastic_memory(torch.device("cpu")), HostMemory)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_the_split_stays(caplog: pytest.LogCaptureFixture) -> None:
    """A device whose driver cannot map memory is served with the split of the start, and the log says so."""
    with caplog.at_level("WARNING"):
        assert elastic_memory(torch.device("cuda")) is None
    assert "split of KV between page groups stays" in caplog.text
