"""Compiles kernels before the first request, so that no request waits for it."""

from __future__ import annotations

import logging
import sys
import threading

import numpy as np
import torch

from stridelm.kernels.host.arithmetic import array, follow_torch
from stridelm.kernels.host.attention import attend
from stridelm.kernels.ops import Ops, QKRope

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0


@torch.inference_mode()
def compile_kernels(ops: Ops, dtype: torch.dtype, *, normed_heads: bool, activation: str = "silu") -> None:
    """Run every kernel that a model needs once on one row, attention included. Loading them from disk takes a quarter
    of a second; on a machine that never ran this dtype, compiling takes about ten, and a warning is logged."""
    notice = threading.Timer(
        PATIENCE_S, logger.warning, ("compiling the CPU kernels for %s: about ten seconds, once per machine", dtype)
    )
    notice.daemon = True
    notice.start()
    try:
        follow_torch()
        _run_once(ops, dtype, normed_heads, activation)
    finally:
        notice.cancel()


def _run_once(ops: Ops, dtype: torch.dtype, normed_heads: bool, activation: str) -> None:
    size = 16
    row, weight = torch.ones(1, size, dtype=dtype), torch.ones(size, dtype=dtype)
    ops.norm(row, weight, 1e-5)
    ops.add_norm(row, row.clone(), weight, 1e-5)
    ops.gate(row, activation)
    zero = torch.zeros(1, dtype=torch.int64)
    angles = torch.zeros(1, size // 2)
    norms = torch.ones(2 * size, dtype=dtype) if normed_heads else None
    keys, values = torch.zeros(2, 1, 1, size, dtype=dtype)
    q = ops.rope_and_store(
        torch.ones(1, 3, size, dtype=dtype), QKRope(1, 1, zero, angles, angles, norms), keys, values, zero
    )
    slots, tiles, one = np.zeros((1, 1), np.int64), np.array([[0, 0, 1]]), np.ones(1, np.int64)
    attend(
        array(q), array(keys), array(values), slots, tiles, one, one, array(zero), sys.maxsize, np.float32(1), array(q)
    )
