"""Which errors say that memory is short, of the device or of the host."""

from __future__ import annotations

import torch

SAYINGS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""In the text of errors without a type of their own: of CUDA's driver and Triton, of torch's allocator on a CPU, of
cuBLAS and cuDNN."""


def is_shortage(error: BaseException | None) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in SAYINGS)
