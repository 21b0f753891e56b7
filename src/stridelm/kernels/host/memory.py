"""Tensors as arrays for compiled code. Imports no Numba, so that models can use it on any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

NO_BIAS, NO_NORMS = np.empty(0, np.uint16), np.empty((0, 0), np.uint16)
"""Where compiled code takes an array and there is none."""

WHOLE = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
"""By size in bytes."""


def array(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's memory as an array that Numba accepts: bfloat16 as uint16, since it has no such type."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def copied(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's memory as whole numbers, for code that only copies: one version for each size serves all dtypes."""
    return x.contiguous().view(WHOLE[x.itemsize]).numpy()


def arrays(*tensors: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    """Contiguous, so that one compiled version serves all; those that are written to already are."""
    return [array(tensor.contiguous()) for tensor in tensors]
