"""Commits a step on a GPU, and writes what the host reads of it, one program per request.

Legend: as in step_ops.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton.language as tl

from stridelm.batch import Verdict
from stridelm.kernels.index_kernel import NODES, index_kernel


@index_kernel
def commit_rows(
    lengths,
    slots,
    counts,
    kept,
    drafted,
    accepted,
    reached,
    reals,
    sources,
    tokens,
    table,
    stride_counts,
    stride_kept,
    stride_drafted,
    stride_accepted,
    stride_reached,
    stride_tokens,
    nodes,
):
    """Grid (R). sources: or None."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    stays, real = tl.load(kept + request * stride_kept), tl.load(reals + request)
    if slot >= 0:
        tl.store(lengths + slot, tl.load(lengths + slot) + real + stays)
    row = table + request * (7 + nodes)
    tl.store(row, tl.load(counts + request * stride_counts))
    tl.store(row + 1, stays)
    tl.store(row + 2, tl.load(drafted + request * stride_drafted))
    tl.store(row + 3, tl.load(accepted + request * stride_accepted))
    tl.store(row + 4, tl.load(reached + request * stride_reached))
    tl.store(row + 5, real)
    tl.store(row + 6, tl.zeros_like(real) if sources is None else tl.load(sources + request))
    node_K = tl.arange(0, NODES)
    exists_K = node_K < nodes
    tl.store(row + 7 + node_K, tl.load(tokens + request * stride_tokens + node_K, mask=exists_K), mask=exists_K)


def commit(
    lengths_S: torch.Tensor,
    slots_R: torch.Tensor,
    verdict: Verdict,
    reals_R: torch.Tensor,
    sources_R: torch.Tensor | None,
) -> torch.Tensor:
    numbers = (verdict.counts, verdict.kept, verdict.drafted, verdict.accepted, verdict.reached)
    tokens_RK = verdict.tokens
    assert lengths_S.is_contiguous() and slots_R.is_contiguous() and reals_R.is_contiguous()
    assert (sources_R is None or sources_R.is_contiguous()) and (tokens_RK.shape[1] < 2 or tokens_RK.stride(1) == 1)
    requests, nodes = tokens_RK.shape
    table = torch.empty(requests, 7 + nodes, dtype=torch.int64, device=slots_R.device)
    if requests:
        commit_rows[(requests,)](
            lengths_S,
            slots_R,
            *numbers,
            reals_R,
            sources_R,
            tokens_RK,
            table,
            *(each.stride(0) for each in numbers),
            tokens_RK.stride(0),
            nodes,
            num_warps=1,
        )
    return table
