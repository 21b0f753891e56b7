"""Copies small arrays to the device and back without waiting for its pending work."""

from __future__ import annotations

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


class Download:
    """A tensor on its way to the host: the copy starts on construction."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = download(tensor)
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or self._arrived.query()

    def values(self) -> np.ndarray:
        """Waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def download(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values on the host, from the moment that the device has done its pending work: wait for an event
    recorded later before reading them. On a CPU they are there at once."""
    if not tensor.is_cuda:
        return tensor.numpy()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True).numpy()
