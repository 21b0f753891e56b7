"""Backings on a GPU, through the CUDA driver's virtual memory management.

Addresses are reserved once. Memory is made in chunks of the device's granularity (2 MiB) and mapped under a prefix of
the addresses. Under the rest, one chunk of zeros is mapped again and again: kernels read masked keys wherever an old
page table points, and a read without memory would end the process.

Source: CUDA driver API, section "Virtual Memory Management". A mapping can only be unmapped whole, so every chunk is
mapped by a call of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import finalize

import torch

PINNED = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED"""
ON_DEVICE = 1
"""CU_MEM_LOCATION_TYPE_DEVICE"""
READ_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE"""
MINIMUM = 0
"""CU_MEM_ALLOC_GRANULARITY_MINIMUM"""
SUPPORTED = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"""

Address = ctypes.c_uint64
Handle = ctypes.c_uint64
Size = ctypes.c_size_t


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _AccessDesc(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(Size), ctypes.POINTER(_AllocationProp), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(Address), Size, Size, Address, ctypes.c_uint64),
    "cuMemAddressFree": (Address, Size),
    "cuMemCreate": (ctypes.POINTER(Handle), Size, ctypes.POINTER(_AllocationProp), ctypes.c_uint64),
    "cuMemRelease": (Handle,),
    "cuMemMap": (Address, Size, Size, Handle, ctypes.c_uint64),
    "cuMemUnmap": (Address, Size),
    "cuMemSetAccess": (Address, Size, ctypes.POINTER(_AccessDesc), Size),
    "cuMemsetD8_v2": (Address, ctypes.c_ubyte, Size),
}


class _Driver:
    """The driver's functions, which raise DriverError."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise DriverError(f"the CUDA driver has no {name}; update it to 450 or later") from error
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function

    def __call__(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            text = ctypes.c_char_p()
            self._functions["cuGetErrorName"](status, ctypes.byref(text))
            known = text.value.decode() if text.value else f"error {status}"
            remedy = "lower kv_memory_fraction" if status == 2 else "set num_pages, which fixes the split"
            raise DriverError(f"{name} failed with {known}; {remedy}")


@cache
def _driver() -> _Driver:
    return _Driver()


class CudaMemory:
    """Chunks of one device: those that tensors have given back, and those that are made when there are none."""

    def __init__(self, device: torch.device) -> None:
        """Raises DriverError if the driver or the device cannot map memory, OSError if there is no driver."""
        self._cuda = _driver()
        self._device = device
        torch.cuda.synchronize(device)  # the driver's calls need the context that torch makes
        ordinal, supported = ctypes.c_int(), ctypes.c_int()
        self._cuda("cuDeviceGet", ctypes.byref(ordinal), device.index or 0)
        self._cuda("cuDeviceGetAttribute", ctypes.byref(supported), SUPPORTED, ordinal)
        if not supported.value:
            raise DriverError(f"{device} has no virtual memory management")
        location = _Location(ON_DEVICE, ordinal.value)
        self._prop = _AllocationProp(type=PINNED, location=location)
        self._access = _AccessDesc(location, READ_WRITE)
        granularity = Size()
        self._cuda("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._prop), MINIMUM)
        self.chunk: int = granularity.value
        self._spare: list[int] = []
        """Handles of chunks that no tensor has."""
        self._zeros = self._create()
        """Handle of the chunk that stands for missing memory."""
        close = finalize(self, _release, self._cuda, self._spare, self._zeros)
        close.atexit = False  # the end of the process releases everything, and torch may be gone by then
        self._fill_zeros()

    def reserve(self, size: int, backed: int) -> CudaBacking:
        assert backed <= size
        return CudaBacking(self, self._device, size, backed)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    # For the backings.

    def reserve_addresses(self, size: int) -> int:
        start = Address()
        self._cuda("cuMemAddressReserve", ctypes.byref(start), size, 0, 0, 0)
        return start.value

    def free_addresses(self, start: int, size: int) -> None:
        self._cuda("cuMemAddressFree", start, size)

    def take(self) -> int:
        """The handle of a chunk that no tensor has."""
        return self._spare.pop() if self._spare else self._create()

    def give_back(self, handle: int) -> None:
        self._spare.append(handle)

    def map(self, start: int, handle: int | None) -> None:
        """Put a chunk under these addresses, None for zeros. Kernels may use it after `open`."""
        self._cuda("cuMemMap", start, self.chunk, 0, self._zeros if handle is None else handle, 0)

    def unmap(self, start: int) -> None:
        self._cuda("cuMemUnmap", start, self.chunk)

    def open(self, start: int, end: int) -> None:
        """Let kernels use these addresses, which all have memory under them."""
        if end > start:
            self._cuda("cuMemSetAccess", start, end - start, ctypes.byref(self._access), 1)

    def clear(self, start: int, end: int) -> None:
        """Fill with zeros, and wait for it, since kernels run in other streams."""
        if end > start:
            with torch.cuda.device(self._device):
                self._cuda("cuMemsetD8_v2", start, 0, end - start)
                torch.cuda.synchronize(self._device)

    def _create(self) -> int:
        handle = Handle()
        self._cuda("cuMemCreate", ctypes.byref(handle), self.chunk, ctypes.byref(self._prop), 0)
        return handle.value

    def _fill_zeros(self) -> None:
        start = self.reserve_addresses(self.chunk)
        self.map(start, None)
        self.open(start, start + self.chunk)
        self.clear(start, start + self.chunk)
        self.unmap(start)
        self.free_addresses(start, self.chunk)


class _Range:
    """Addresses in whole chunks: the first have chunks of their own, the others share the zeros. Everything is given
    back once nothing refers to this object; a tensor made from it does, and so does each of its views."""

    def __init__(self, memory: CudaMemory, size: int) -> None:
        self._memory, self._chunk = memory, memory.chunk
        self._handles: list[int] = []
        """Of the chunks under the first addresses, in order."""
        self._count = -(-size // self._chunk)
        self.start = memory.reserve_addresses(self._count * self._chunk)
        mapped: list[int] = []
        close = finalize(self, _close, memory, self.start, self._count * self._chunk, mapped, self._handles)
        close.atexit = False
        for index in range(self._count):
            memory.map(self._at(index), None)
            mapped.append(self._at(index))
        memory.open(self.start, self._at(self._count))
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.start, False),
            "strides": None,
        }

    def resize(self, count: int) -> None:
        """Have chunks of its own under the first `count` chunks' addresses."""
        had = len(self._handles)
        while len(self._handles) > count:
            at = self._at(len(self._handles) - 1)
            self._memory.unmap(at)
            self._memory.map(at, None)
            self._memory.give_back(self._handles.pop())
        self._memory.open(self._at(len(self._handles)), self._at(had))
        try:
            while len(self._handles) < count:
                handle = self._memory.take()
                at = self._at(len(self._handles))
                self._memory.unmap(at)
                self._memory.map(at, handle)
                self._handles.append(handle)
        finally:
            self._memory.open(self._at(had), self._at(len(self._handles)))
            self._memory.clear(self._at(had), self._at(len(self._handles)))

    def _at(self, index: int) -> int:
        return self.start + index * self._chunk


class CudaBacking:
    def __init__(self, memory: CudaMemory, device: torch.device, size: int, backed: int) -> None:
        self._range, self._chunk = _Range(memory, max(1, size)), memory.chunk
        self.resize(backed)
        self._bytes = torch.as_tensor(self._range, device=device)
        assert self._bytes.data_ptr() == self._range.start, "torch made a copy"

    @property
    def bytes(self) -> torch.Tensor:
        return self._bytes

    def resize(self, size: int) -> None:
        self._range.resize(-(-size // self._chunk))


def _close(memory: CudaMemory, start: int, size: int, mapped: list[int], handles: list[int]) -> None:
    """Take everything out of the addresses and give them back."""
    memory.wait()
    for at in mapped:
        memory.unmap(at)
    memory.free_addresses(start, size)
    for handle in handles:
        memory.give_back(handle)


def _release(cuda: _Driver, spare: list[int], zeros: int) -> None:
    for handle in (*spare, zeros):
        cuda("cuMemRelease", handle)
