"""Compiles kernels before the first request, so that no request waits for it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch

from stridelm.kernels.host import pair_attention, simd
from stridelm.kernels.host.arithmetic import follow_torch
from stridelm.kernels.host.attention import attend
from stridelm.kernels.host.columns import READS, ROWS, THREADS
from stridelm.kernels.host.experts import FewRowsOfExperts
from stridelm.kernels.host.geometry import pool_slots, reach, tiles
from stridelm.kernels.host.layer import run_layers
from stridelm.kernels.host.memory import array
from stridelm.kernels.host.philox import fill
from stridelm.kernels.host.router import scores
from stridelm.kernels.host.truncate import keep, nucleus
from stridelm.kernels.ops import Ops, QKRope, Routing
from stridelm.kernels.step_ops import Cut

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0


@torch.inference_mode()
def compile_kernels(ops: Ops, dtype: torch.dtype, *, normed_heads: bool, activation: str = "silu") -> None:
    """Run every kernel that a model needs once on one row, attention included. Loading them from disk takes a quarter
    of a second; on a machine that never ran this dtype, compiling takes ten to forty, and a warning is logged."""
    with _notice(f"{dtype}: about half a minute"):
        follow_torch()
        _run_once(ops, dtype, normed_heads, activation)


@torch.inference_mode()
def compile_experts(ops: Ops, dtype: torch.dtype) -> None:
    """Run every kernel that a mixture of experts needs once on one row."""
    with _notice(f"experts in {dtype}: about ten seconds"):
        row = torch.ones(1, 2 * simd.PAIRS, dtype=dtype)
        logits = scores(row, torch.ones(2, row.shape[1]), None)
        chosen, weights = ops.route(logits, Routing(num_experts=2, num_experts_per_tok=1))
        ops.combine(row[:, None], weights, row)
        if dtype == torch.bfloat16 and simd.is_available():
            FewRowsOfExperts.run_once(row, chosen)


@cache
@torch.inference_mode()
def compile_sampling() -> None:
    """Run every kernel that sampling needs once on one row. They are the same for all dtypes."""
    with _notice("sampling: about five seconds"):
        zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
        columns = (zero, zero, zero, zero)
        fill(torch.empty(1, 4), columns)
        fill(torch.empty(1, 4, dtype=torch.int64), columns)
        fill(torch.empty(1, 1), columns, zero[:, None])
        edge, last = nucleus(torch.zeros(1, 4), one)
        keep(torch.zeros(1, 4), Cut(one, one, edge, last))


@contextmanager
def _notice(what: str) -> Iterator[None]:
    """Log a warning if this takes long enough for someone to wonder."""
    notice = threading.Timer(PATIENCE_S, logger.warning, ("compiling the CPU kernels for %s, once per machine", what))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def _run_once(ops: Ops, dtype: torch.dtype, normed_heads: bool, activation: str) -> None:
    size = 2 * simd.PAIRS
    row, weight = torch.ones(1, size, dtype=dtype), torch.ones(size, dtype=dtype)
    ops.norm(row, weight, 1e-5)
    ops.add_norm(row, row.clone(), weight, 1e-5)
    ops.gate(row, activation)
    ops.join_norms(row, torch.zeros(1, dtype=torch.int64), weight, row, weight, 1e-5)
    zero = torch.zeros(1, dtype=torch.int64)
    angles = torch.zeros(1, size // 2)
    norms = torch.ones(2 * size, dtype=dtype) if normed_heads else None
    keys, values = torch.zeros(2, 1, 1, size, dtype=dtype)
    q = ops.rope_and_store(
        torch.ones(1, 3, size, dtype=dtype), QKRope(1, 1, zero, angles, angles, norms), keys, values, zero
    )
    first = np.zeros(1, np.int32)
    bases, limits = reach(first, first, first, array(zero), array(zero))
    where = pool_slots(first[None], 1), tiles(first, 1, 1), limits, bases
    seen = (*where, array(zero), sys.maxsize, np.float32(1))
    attend(array(q), array(keys), array(values), *seen, array(q))
    if dtype == torch.bfloat16 and pair_attention.fits(size, size):
        pair_attention.attend(array(q), array(keys), array(values), *seen, array(q))
    if dtype == torch.bfloat16 and simd.is_available():
        _run_layers_once()


def _run_layers_once() -> None:
    """For no layer, which reads nothing of its row."""
    call, table = np.zeros(READS + 1, np.int64), np.zeros((0, 0), np.int64)
    call[THREADS], call[ROWS] = follow_torch(), 1
    run_layers(call, table, table, table)
