"""CUDA graphs of one engine: captured into one memory pool, within a budget."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

DRIVERS_SHARE = 6 << 20
"""Bytes that the driver keeps for one graph beside torch's memory. An estimate: the driver tells only how much of the
whole card is free, which other processes change at any time. 220 graphs of an 8B model take 1.7 GiB with torch's."""


class GraphPool:
    """All graphs share their memory: no two run at once, and the outputs of one are read before another starts."""

    def __init__(self, budget: int, device: torch.device) -> None:
        """budget: bytes of device memory that all graphs together may take."""
        self.budget = budget
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Begin anew, once no graph of this pool is left."""
        self.spent = self.graphs = 0
        self._full = False
        """Whether a graph was refused."""
        self._handle = torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], T], inputs: int = 0) -> tuple[torch.cuda.CUDAGraph, T] | None:
        """Run `body` once, which compiles what is not compiled yet, and capture it. Returns the graph and what `body`
        returned, whose tensors each replay overwrites; None if the budget or the memory is exhausted, in which case the
        caller runs eagerly.

        inputs: bytes of tensors that the caller allocated for the graph.
        """
        if self.spent >= self.budget:
            if not self._full:
                self._full = True
                logger.warning(
                    "captured steps take %.2f GiB in %d graphs, all of capture_memory: steps of others run eagerly",
                    self.spent / 2**30,
                    self.graphs,
                )
            return None
        try:
            captured = self._capture(body)
        except torch.OutOfMemoryError:
            self.spent, self._full = self.budget, True
            logger.warning("no memory to capture a step: steps not captured yet run eagerly; lower kv_memory_fraction")
            return None
        self.spent += inputs
        self.graphs += 1
        return captured

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """For all captures: cuBLAS keeps a workspace for every stream that it has run on, 32 MiB on Hopper."""
        return torch.cuda.Stream(self._device)

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
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # else memory cached by the first run would offset what the capture takes
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local")
        with _no_collection(), capture:
            result = body()
        # Of this process alone: other engines may be starting on the card.
        self.spent += max(0, torch.cuda.memory_reserved(self._device) - before) + DRIVERS_SHARE
        return graph, result


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
