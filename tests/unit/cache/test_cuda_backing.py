"""The calls that move a GPU's memory, against a driver that holds to the rules of CUDA's virtual memory management."""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from stridelm.cache import cuda_backing
from stridelm.cache.cuda_backing import CudaMemory, DriverError, _AccessDesc, _AllocationProp, _Range

CHUNK = 1 << 21
CUDA = torch.device("cuda:0")


class RuleDriver:
    """Addresses, chunks and mappings of one device. Contents are one number per chunk."""

    def __init__(self, chunks: int = 10**6, supported: bool = True) -> None:
        self.left, self.supported = chunks, supported
        self.next = 1 << 40
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        """Address -> handle."""
        self.open: set[int] = set()
        self.contents: dict[int, int] = {}
        """Handle -> what its bytes are; rubbish at first."""
        self.released: set[int] = set()

    def __call__(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)

    def cuDeviceGet(self, found: Any, ordinal: int) -> None:
        found._obj.value = ordinal

    def cuDeviceGetAttribute(self, found: Any, attribute: int, device: Any) -> None:
        assert attribute == 102
        found._obj.value = int(self.supported)

    def cuMemGetAllocationGranularity(self, found: Any, prop: Any, option: int) -> None:
        assert (prop._obj.type, prop._obj.location.type, prop._obj.location.id, option) == (1, 1, 0, 0)
        found._obj.value = CHUNK

    def cuMemAddressReserve(self, found: Any, size: int, alignment: int, wanted: int, flags: int) -> None:
        assert size > 0 and size % CHUNK == 0 and (alignment, wanted, flags) == (0, 0, 0)
        found._obj.value, self.reserved[self.next] = self.next, size
        self.next += size + CHUNK

    def cuMemAddressFree(self, start: int, size: int) -> None:
        assert self.reserved.pop(start) == size
        assert not any(start <= at < start + size for at in self.mapped), "mapped addresses are freed"

    def cuMemCreate(self, found: Any, size: int, prop: Any, flags: int) -> None:
        assert size == CHUNK and flags == 0
        if not self.left:
            raise DriverError("cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY; lower kv_memory_fraction")
        self.left -= 1
        found._obj.value = handle = len(self.contents) + 1
        self.contents[handle] = 99

    def cuMemRelease(self, handle: int) -> None:
        assert handle in self.contents and handle not in self.released
        self.released.add(handle)

    def cuMemMap(self, start: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert (size, offset, flags) == (CHUNK, 0, 0) and handle in self.contents and handle not in self.released
        assert start not in self.mapped and any(a <= start < a + n for a, n in self.reserved.items())
        self.mapped[start] = handle

    def cuMemUnmap(self, start: int, size: int) -> None:
        assert size == CHUNK
        del self.mapped[start]
        self.open.discard(start)

    def cuMemSetAccess(self, start: int, size: int, access: Any, count: int) -> None:
        assert count == 1 and (access._obj.location.type, access._obj.flags) == (1, 3)
        chunks = range(start, start + size, CHUNK)
        assert size % CHUNK == 0 and all(at in self.mapped for at in chunks)
        self.open.update(chunks)

    def cuMemsetD8_v2(self, start: int, value: int, size: int) -> None:
        for at in range(start, start + size, CHUNK):
            assert at in self.open
            self.contents[self.mapped[at]] = value

    # What a kernel does.

    def read(self, at: int) -> int:
        assert at in self.open, "an illegal address"
        return self.contents[self.mapped[at]]

    def write(self, at: int, value: int) -> None:
        assert at in self.open, "an illegal address"
        self.contents[self.mapped[at]] = value


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[RuleDriver]:
    made = RuleDriver()
    monkeypatch.setattr(cuda_backing, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    yield made
    gc.collect()  # before the driver's functions are torch's own again


def test_structures_are_the_drivers() -> None:
    """The sizes and offsets of cuda.h on 64-bit machines."""
    assert ctypes.sizeof(_AllocationProp) == 32 and ctypes.sizeof(_AccessDesc) == 12
    fields = [getattr(_AllocationProp, name).offset for name, *_ in _AllocationProp._fields_]
    assert fields == [0, 4, 8, 16, 24]


def test_random_sizes(driver: RuleDriver) -> None:
    """Through any changes of size, every reserved address can be read: what was written under the size is there, chunks
    that are new hold zeros, and so does all beyond. No chunk is under two addresses but the zeros, and as many exist as
    were in use at once."""
    memory, rng = CudaMemory(CUDA), random.Random(5)
    ranges = [_Range(memory, 20 * CHUNK - 5) for _ in range(3)]
    written: list[list[int]] = [[], [], []]
    most = 0
    for turn in range(600):
        number = rng.randrange(3)
        size, held = rng.randint(0, 20), written[number]
        ranges[number].resize(size)
        del held[size:]
        held += [0] * (size - len(held))
        for index in range(size):
            if rng.random() < 0.3:
                held[index] = turn + 1
                driver.write(ranges[number].start + index * CHUNK, turn + 1)
        most = max(most, sum(map(len, written)))
        for each, values in zip(ranges, written, strict=True):
            assert [driver.read(each.start + i * CHUNK) for i in range(20)] == values + [0] * (20 - len(values))
        own = [driver.mapped[r.start + i * CHUNK] for r, w in zip(ranges, written, strict=True) for i in range(len(w))]
        assert len(set(own)) == len(own)
    assert len(driver.contents) == most + 1


def test_everything_is_given_back(driver: RuleDriver) -> None:
    """Chunks and addresses, once nothing refers to the tensors and the memory any more."""
    memory = CudaMemory(CUDA)
    one, other = _Range(memory, 9 * CHUNK), _Range(memory, 1)
    one.resize(7)
    other.resize(1)
    one.resize(2)
    del one, memory
    gc.collect()
    assert driver.reserved and not driver.released, "a tensor is left"
    del other
    gc.collect()
    assert not driver.reserved and not driver.mapped and driver.released == set(driver.contents)


def test_when_memory_runs_out(driver: RuleDriver) -> None:
    """The error is raised, and everything can be read as before; memory that another gives back serves again."""
    memory = CudaMemory(CUDA)
    one, other = _Range(memory, 8 * CHUNK), _Range(memory, 8 * CHUNK)
    driver.left = 6
    one.resize(4)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY; lower kv_memory_fraction"):
        other.resize(5)
    assert [driver.read(other.start + i * CHUNK) for i in range(8)] == [0] * 8
    one.resize(1)
    other.resize(5)
    driver.write(other.start + 4 * CHUNK, 3)
    assert driver.read(one.start + 3 * CHUNK) == 0


def test_a_device_without_it(driver: RuleDriver) -> None:
    driver.supported = False
    with pytest.raises(DriverError, match="no virtual memory management"):
        CudaMemory(CUDA)
