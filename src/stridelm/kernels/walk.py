"""From drawn tokens to a Verdict on a GPU, one program per request, which also appends the emitted tokens to the token
table.

Everything is read on the device, so a captured launch serves any requests. A request with a negative slot is padding:
it emits nothing and leaves the table unchanged. `commit` then moves what is committed.

All fields of a Verdict are views of one tensor:

    counts kept leaf drafted accepted reached | tokens [K] | rows [K] | path [W]

Beyond the emitted tokens, and for a request that does not decide, tokens, rows and path are 0.

Legend: R requests, W draft rows, K = W + 1 nodes (the last real row, then the draft rows), S slots, L token columns.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from stridelm.batch import CANDIDATE, Draft, Verdict
from stridelm.kernels.index_kernel import NODES, index_kernel
from stridelm.kernels.step_ops import Sureness
from stridelm.types import MAX_DRAFT_ROWS

_CANDIDATE = tl.constexpr(CANDIDATE)
_NUMBERS = tl.constexpr(6)
"""Fields of a Verdict that are one number per request."""
_WARPS = 1
"""One warp per program: what it stores cannot be seen by its own earlier loads."""


# Device code


@triton.jit
def _candidates(roles, valid, row_K, drafted_K):
    """Which of the drafted rows of a request are live candidates."""
    live_K = tl.load(valid + row_K, mask=drafted_K, other=0) != 0
    return live_K & (tl.load(roles + row_K, mask=drafted_K, other=-1) == _CANDIDATE)


@triton.jit
def _store_numbers(verdict, count, kept, leaf, drafted, accepted, reached):
    tl.store(verdict, count)
    tl.store(verdict + 1, kept)
    tl.store(verdict + 2, leaf)
    tl.store(verdict + 3, drafted)
    tl.store(verdict + 4, accepted)
    tl.store(verdict + 5, reached)


@triton.jit
def _emit(verdict, tokens, known, slot, stride_s, count, emitted_K, at_K, token_K, place_K, source_K, node_K, nodes):
    """Store `count` tokens at places `at`, and the decision row of each emitted node at its place: in the verdict, with
    0 after the last, and the tokens in the token table too, after the known ones."""
    verdict_tokens = verdict + _NUMBERS
    verdict_rows = verdict_tokens + nodes
    rest_K = (node_K >= count) & (node_K < nodes)
    tl.store(verdict_tokens + at_K, token_K, mask=emitted_K)
    tl.store(verdict_tokens + node_K, tl.zeros_like(token_K), mask=rest_K)
    tl.store(verdict_rows + place_K, source_K, mask=emitted_K)
    tl.store(verdict_rows + node_K, tl.zeros_like(source_K), mask=rest_K)
    if count > 0:
        length = tl.load(known + slot)
        tl.store(tokens + slot * stride_s + length + at_K, token_K, mask=emitted_K)
        tl.store(known + slot, length + count)


@triton.jit
def _store_path(verdict, accepted_K, depth_K, row_K, node_K, kept, width):
    """Store each accepted row at its depth, with 0 after the last."""
    path = verdict + _NUMBERS + 2 * (width + 1)
    tl.store(path + depth_K - 1, row_K.to(tl.int64), mask=accepted_K)
    tl.store(path + node_K, tl.zeros_like(depth_K), mask=(node_K >= kept) & (node_K < width))


@index_kernel
def walk_trees(
    verdict,
    tokens,
    known,
    drawn,
    index,
    drafts,
    parents,
    roles,
    depths,
    ancestors,
    valid,
    decides,
    slots,
    stride_verdict,
    stride_s,
    stride_drawn,
    stride_index,
    stride_drafts,
    stride_parents,
    stride_roles,
    stride_depths,
    stride_ancestors,
    stride_live,
    width,
):
    """Grid (R). A draft row is accepted, and its own drawn token emitted, if it and all its ancestors are live
    candidates that hold the token drawn at their parent. Siblings hold different tokens, so there is at most one such
    row per depth, and its depth is its place in the output."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    decided = (slot >= 0) & (tl.load(decides + request) != 0)
    verdict += request * stride_verdict
    drawn += request * stride_drawn
    node_K = tl.arange(0, NODES)
    row_K = node_K - 1
    root_K = (row_K < 0) & decided
    drafted_K = (row_K >= 0) & (row_K < width) & decided

    candidate_K = _candidates(roles + request * stride_roles, valid + request * stride_live, row_K, drafted_K)
    guess_K = tl.load(drafts + request * stride_drafts + row_K, mask=candidate_K, other=0)
    parent_K = tl.load(parents + request * stride_parents + row_K, mask=candidate_K, other=-1)
    depth_K = tl.load(depths + request * stride_depths + row_K, mask=candidate_K, other=0)
    ancestors_K = tl.load(ancestors + request * stride_ancestors + row_K, mask=candidate_K, other=0)

    right_K = candidate_K & (guess_K == tl.load(drawn + parent_K + 1, mask=candidate_K, other=0))
    # One bit per row, so that the sum is the union.
    right = tl.sum(tl.where(right_K, tl.full([NODES], 1, tl.int64) << tl.maximum(row_K, 0), 0))
    accepted_K = right_K & ((ancestors_K & ~right) == 0)
    kept = tl.sum(accepted_K.to(tl.int64))
    leaf = tl.max(tl.where(accepted_K & (depth_K == kept), row_K, -1))
    tested_below = tl.max((candidate_K & (parent_K == leaf)).to(tl.int64))
    drafted = tl.sum(candidate_K.to(tl.int64))
    count = kept + decided.to(tl.int64)

    emitted_K = root_K | accepted_K
    token_K = tl.load(drawn + node_K, mask=emitted_K, other=0)
    source_K = tl.load(index + request * stride_index + node_K, mask=emitted_K, other=0)
    _store_numbers(verdict, count, kept, leaf.to(tl.int64), drafted, kept, kept + tested_below)
    nodes = width + 1
    _emit(verdict, tokens, known, slot, stride_s, count, emitted_K, depth_K, token_K, depth_K, source_K, node_K, nodes)
    _store_path(verdict, accepted_K, depth_K, row_K, node_K, kept, width)


@index_kernel
def follow_kept(
    verdict,
    tokens,
    known,
    drawn,
    index,
    drafts,
    parents,
    roles,
    depths,
    valid,
    keeps,
    decides,
    slots,
    stride_verdict,
    stride_s,
    stride_drawn,
    stride_index,
    stride_drafts,
    stride_parents,
    stride_roles,
    stride_depths,
    stride_live,
    stride_keeps,
    width,
):
    """Grid (R). Children come after their parents, so one pass over the rows finds the path."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    decided = (slot >= 0) & (tl.load(decides + request) != 0)
    verdict += request * stride_verdict
    node_K = tl.arange(0, NODES)
    row_K = node_K - 1
    root_K = (row_K < 0) & decided
    drafted_K = (row_K >= 0) & (row_K < width) & decided

    candidate_K = _candidates(roles + request * stride_roles, valid + request * stride_live, row_K, drafted_K)
    keep_K = candidate_K & (tl.load(keeps + request * stride_keeps + row_K, mask=drafted_K, other=0) != 0)
    guess_K = tl.load(drafts + request * stride_drafts + row_K, mask=candidate_K, other=0)
    parent_K = tl.load(parents + request * stride_parents + row_K, mask=candidate_K, other=-1)
    depth_K = tl.load(depths + request * stride_depths + row_K, mask=candidate_K, other=0)

    leaf = tl.full([], -1, tl.int64)
    accepted_K = root_K & (row_K >= 0)  # none
    for row in range(width):
        here_K = keep_K & (row_K == row) & (parent_K == leaf)
        accepted_K |= here_K
        leaf = tl.maximum(leaf, tl.max(tl.where(here_K, row_K, -1)).to(tl.int64))
    kept = tl.sum(accepted_K.to(tl.int64))
    tested_below = tl.max((candidate_K & (parent_K == leaf)).to(tl.int64))
    drafted = tl.sum(candidate_K.to(tl.int64))
    count = kept + decided.to(tl.int64)

    # A row's own token comes before what is drawn at it; the last one is drawn.
    emitted_K = root_K | accepted_K
    last = tl.load(drawn + request * stride_drawn + leaf + 1, mask=decided, other=0)
    token_K, at_K = tl.where(root_K, last, guess_K), tl.where(root_K, kept, depth_K - 1)
    source_K = tl.load(index + request * stride_index + node_K, mask=emitted_K, other=0)
    _store_numbers(verdict, count, kept, leaf, drafted, kept, kept + tested_below)
    nodes = width + 1
    _emit(verdict, tokens, known, slot, stride_s, count, emitted_K, at_K, token_K, depth_K, source_K, node_K, nodes)
    _store_path(verdict, accepted_K, depth_K, row_K, node_K, kept, width)


@index_kernel
def cut_to_confident(
    verdict,
    tokens,
    known,
    drawn,
    index,
    peaks,
    levels,
    decides,
    slots,
    stride_verdict,
    stride_s,
    stride_drawn,
    stride_index,
    stride_peaks,
    width,
):
    """Grid (R). peaks, levels: None if no request sets a confidence level."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    decided = (slot >= 0) & (tl.load(decides + request) != 0)
    verdict += request * stride_verdict
    node_K = tl.arange(0, NODES)
    exists_K = (node_K <= width) & (slot >= 0)
    source_K = tl.load(index + request * stride_index + node_K, mask=exists_K, other=-1)
    live_K = source_K >= 0
    sure_K = live_K
    if levels is not None:
        peak_K = tl.load(peaks + request * stride_peaks + node_K, mask=live_K, other=0.0)
        sure_K = live_K & (peak_K >= tl.load(levels + request))
    first_unsure = tl.min(tl.where(sure_K | (node_K == 0), NODES, node_K))
    count = tl.where(decided, first_unsure, 0).to(tl.int64)

    drafted = tl.sum((live_K & (node_K > 0)).to(tl.int64))
    accepted = tl.maximum(count - 1, 0)
    zero = accepted * 0
    _store_numbers(verdict, count, zero, zero - 1, drafted, accepted, tl.minimum(accepted + 1, drafted))
    emitted_K = node_K < count
    token_K = tl.load(drawn + request * stride_drawn + node_K, mask=emitted_K, other=0)
    _emit(
        verdict, tokens, known, slot, stride_s, count, emitted_K, node_K, token_K, node_K, source_K, node_K, width + 1
    )
    path = verdict + _NUMBERS + 2 * (width + 1)
    tl.store(path + node_K, tl.zeros_like(token_K), mask=node_K < width)


# Host code


def walk(
    draft: Draft,
    drawn_RK: torch.Tensor,
    nodes_RK: torch.Tensor,
    decides_R: torch.Tensor,
    slots_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    known_S: torch.Tensor,
) -> Verdict:
    trees = (draft.tokens, draft.parents, draft.roles, draft.depths, draft.ancestors, draft.valid.view(torch.uint8))
    return _walked(walk_trees, trees, drawn_RK, nodes_RK, decides_R, slots_R, tokens_SL, known_S)


def follow(
    draft: Draft,
    kept_RW: torch.Tensor,
    drawn_RK: torch.Tensor,
    nodes_RK: torch.Tensor,
    decides_R: torch.Tensor,
    slots_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    known_S: torch.Tensor,
) -> Verdict:
    flags = (draft.valid.view(torch.uint8), kept_RW.view(torch.uint8))
    trees = (draft.tokens, draft.parents, draft.roles, draft.depths, *flags)
    return _walked(follow_kept, trees, drawn_RK, nodes_RK, decides_R, slots_R, tokens_SL, known_S)


def _walked(
    kernel: Any,
    trees: tuple[torch.Tensor, ...],
    drawn_RK: torch.Tensor,
    nodes_RK: torch.Tensor,
    decides_R: torch.Tensor,
    slots_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    known_S: torch.Tensor,
) -> Verdict:
    """The verdict of a kernel that walks down trees. trees: [R, W] each, as the kernel takes them."""
    width = drawn_RK.shape[1] - 1
    verdict = _new_verdict(drawn_RK, width)
    rows = (verdict, tokens_SL, drawn_RK, nodes_RK, *trees)
    _check(rows, decides_R, slots_R, known_S)
    if len(drawn_RK):
        kernel[(len(drawn_RK),)](
            verdict,
            tokens_SL,
            known_S,
            drawn_RK,
            nodes_RK,
            *trees,
            decides_R.view(torch.uint8),
            slots_R,
            *(each.stride(0) for each in rows),
            width,
            num_warps=_WARPS,
        )
    return _as_verdict(verdict, width)


def cut_windows(
    drawn_RK: torch.Tensor,
    nodes_RK: torch.Tensor,
    decides_R: torch.Tensor,
    slots_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    known_S: torch.Tensor,
    sureness: Sureness | None = None,
) -> Verdict:
    width = drawn_RK.shape[1] - 1
    verdict = _new_verdict(drawn_RK, width)
    confidence_RK, levels_R = sureness or (None, None)
    rows = (verdict, tokens_SL, drawn_RK, nodes_RK)
    _check(rows, decides_R, slots_R, known_S)
    if len(drawn_RK):
        cut_to_confident[(len(drawn_RK),)](
            verdict,
            tokens_SL,
            known_S,
            drawn_RK,
            nodes_RK,
            confidence_RK,
            levels_R,
            decides_R.view(torch.uint8),
            slots_R,
            *(each.stride(0) for each in rows),
            0 if confidence_RK is None else confidence_RK.stride(0),
            width,
            num_warps=_WARPS,
        )
    return _as_verdict(verdict, width)


def _new_verdict(drawn_RK: torch.Tensor, width: int) -> torch.Tensor:
    rows, nodes = drawn_RK.shape
    assert nodes == width + 1 and width <= MAX_DRAFT_ROWS
    return torch.empty(rows, _NUMBERS.value + 2 * nodes + width, dtype=torch.int64, device=drawn_RK.device)


def _as_verdict(verdict: torch.Tensor, width: int) -> Verdict:
    counts, kept, leaf, drafted, accepted, reached = verdict[:, : _NUMBERS.value].unbind(1)
    tokens, rows, path = verdict[:, _NUMBERS.value :].split((width + 1, width + 1, width), dim=1)
    return Verdict(tokens, counts, rows, path, kept, leaf, drafted, accepted, reached)


def _check(
    rows: tuple[torch.Tensor, ...], decides_R: torch.Tensor, slots_R: torch.Tensor, known_S: torch.Tensor
) -> None:
    # An expanded skeleton has stride 0 between requests, and a draft without rows may have any stride.
    assert all(each.shape[1] < 2 or each.stride(1) == 1 for each in rows)
    assert decides_R.is_contiguous() and slots_R.is_contiguous() and known_S.is_contiguous()
