"""Copies small arrays to the device and back without waiting for its pending work, and tells when that was done."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch


def upload(values: Sequence[int] | np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the values: int64, or an array's own dtype, unless one is given.

    `torch.tensor(values, device=...)` would wait until the device has finished all earlier work.
    """
    if isinstance(values, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(values))
    else:
        tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.to(device, dtype, non_blocking=True)


def staging(*shape: int, device: torch.device) -> torch.Tensor:
    """int64 zeros on the host, pinned for CUDA so that copies to the device do not block."""
    return torch.zeros(*shape, dtype=torch.int64, pin_memory=device.type == "cuda")


class Mark:
    """The moment at which the device will have done all that was launched before: on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self.made = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    @property
    def has_passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Mark) -> float:
        """Seconds on the device. Both must have passed."""
        if self._event is None or earlier._event is None:
            return self.made - earlier.made
        return earlier._event.elapsed_time(self._event) / 1e3


class Download:
    """A tensor on its way to the host: the copy starts on construction."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = download(tensor)
        self.arrived = Mark(tensor.device)

    def values(self) -> np.ndarray:
        """Waits until they are there."""
        self.arrived.wait()
        return self._values


def download(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values on the host, from the moment that the device has done its pending work: wait for an event
    recorded later before reading them. On a CPU they are there at once."""
    if not tensor.is_cuda:
        return tensor.numpy()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True).numpy()
