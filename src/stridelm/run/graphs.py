"""CUDA graphs of one engine: captured into one memory pool, within a budget."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_OUTSIDE = 32 << 20
"""Bytes that the driver may take for one graph beside torch's memory: a few MiB in practice. What is missing beyond
that was taken by another process on the card."""


class GraphPool:
    """All graphs share their memory: no two run at once, and the outputs of one are read before another starts."""

    def __init__(self, budget: int, device: torch.device) -> None:
        """budget: bytes of device memory that all graphs together may take."""
        self.budget = budget
        self.spent = 0
        self.graphs = 0
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], T], inputs: int = 0) -> tuple[torch.cuda.CUDAGraph, T] | None:
        """Run `body` once, which compiles what is not compiled yet, and capture it. Returns the graph and what `body`
        returned, whose tensors each replay overwrites; None if the budget or the memory is exhausted, in which case the
        caller runs eagerly.

        inputs: bytes of tensors that the caller allocated for the graph.
        """
        if self.spent >= self.budget:
            return None
        try:
            captured = self._capture(body)
        except torch.OutOfMemoryError:
            self.spent = self.budget
            logger.warning("no memory to capture a step: steps not captured yet run eagerly; lower kv_memory_fraction")
            return None
        self.spent += inputs
        self.graphs += 1
        if self.spent >= self.budget:
            logger.warning(
                "captured steps take %.2f GiB in %d graphs, all of capture_memory: steps of other kinds run eagerly",
                self.spent / 2**30,
                self.graphs,
            )
        return captured

    def seconds(self, graph: torch.cuda.CUDAGraph) -> float:
        """How long a replay takes, which nothing else disturbs: the shorter one of two."""
        found = []
        for _ in range(2):
            torch.cuda.synchronize(self._device)
            began = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize(self._device)
            found.append(time.perf_counter() - began)
        return min(found)

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """A captured tensor without a hold on its memory: to be read after its own graph's replay, and before another's
        overwrites it."""
        borrowed = torch.as_tensor(_Borrowed(tensor), device=tensor.device)
        return borrowed.view(tensor.dtype)

    def _capture(self, body: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # else memory cached by the first run would offset what the capture takes
        before = self._memory()
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
            result = body()
        self.spent += taken(before, self._memory())
        return graph, result

    def _memory(self) -> tuple[int, int]:
        """(bytes free on the device, bytes that torch holds of it in this process)."""
        return torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device)


def taken(before: tuple[int, int], after: tuple[int, int]) -> int:
    """Bytes that a capture took: torch's own, and what the driver keeps for the graph, which shows only in the memory
    of the whole device. (free, reserved) before and after."""
    own = after[1] - before[1]
    outside = before[0] - after[0] - own
    return max(0, own + min(max(0, outside), MOST_OUTSIDE))


class _Borrowed:
    """The address of a tensor, for `torch.as_tensor`: as integers, since the protocol lacks some floats."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": f"<i{size}" if size > 1 else "|u1",
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection during a capture: collecting a discarded engine frees its graphs or pinned memory, which
    would abort the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
