"""Rows of latent attention on a GPU: each row's latent and shared key are written to the pool, and its queries rotated.

A program makes a row's entry, or rotates some heads of its queries. Its order of adding is the same wherever this is
done, beside other work (latent_queries.py) or not.

Legend: N rows, H query heads, R width of a latent, K of the rotated part of queries and keys, C = R + K, P pool slots;
in kernels B pairs of dimensions that are rotated.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from stridelm.kernels.dependent import dependent, give_way, wait_for_inputs
from stridelm.kernels.ops import LatentRope
from stridelm.kernels.plain_fp8 import LARGEST
from stridelm.kernels.triton_norms import is_whole, rms_scale, whole

HEADS = 8
"""Heads of a row that a program rotates."""
WARPS = 4
"""Of a program, the same everywhere: a latent's squares are added in an order that depends on them."""
READ_BY_NUMBER = ["positions", "slots"]
"""Parameters that are read one by one and are often views into a larger buffer, at any offset."""
_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def as_stored(x, inverse, pool):
    """What is written to a pool for a number: itself, or in eight bits (entries.py). inverse: of the entries' scale."""
    if pool.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) * inverse, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        x = x.to(tl.float8e4nv)
    return x


@triton.jit
def _turned(at, cos_B, sin_B, exists, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both halves of rotated vectors. at: pointers to the first number of each pair."""
    STEP: tl.constexpr = 1 if INTERLEAVED else HALF
    low = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    high = tl.load(at + STEP, mask=exists, other=0.0).to(tl.float32)
    return low * cos_B - high * sin_B, high * cos_B + low * sin_B


@triton.jit
def write_latents(
    row,
    part,
    queries,
    rows,
    positions,
    cos,
    sin,
    weight,
    eps,
    slots,
    out,
    latents,
    inverse,
    query_stride_n,
    query_stride_h,
    row_stride,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Part 0 of a row makes its entry, and part n rotates the n-th HEADS of its query heads. BLOCK: of pairs."""
    HALF: tl.constexpr = K // 2
    row = row.to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    pair_B = tl.arange(0, BLOCK)
    real_B = pair_B < HALF
    cos_B = tl.load(cos + position * HALF + pair_B, mask=real_B, other=0.0)
    sin_B = tl.load(sin + position * HALF + pair_B, mask=real_B, other=0.0)
    first_B = pair_B * 2 if INTERLEAVED else pair_B
    if part == 0:
        entry = latents + tl.load(slots + row).to(tl.int64) * (R + K)
        dim_R = tl.arange(0, BLOCK_R)
        exists_R = dim_R < R
        x_R = tl.load(rows + row * row_stride + dim_R, mask=exists_R, other=0.0).to(tl.float32)
        weight_R = tl.load(weight + dim_R, mask=exists_R, other=0.0).to(tl.float32)
        normed_R = x_R * rms_scale(tl.sum(x_R * x_R, 0), R, eps) * weight_R
        tl.store(entry + dim_R, as_stored(normed_R, inverse, latents), mask=exists_R)
        low_B, high_B = _turned(rows + row * row_stride + R + first_B, cos_B, sin_B, real_B, HALF, INTERLEAVED)
        tl.store(entry + R + pair_B, as_stored(low_B, inverse, latents), mask=real_B)
        tl.store(entry + R + HALF + pair_B, as_stored(high_B, inverse, latents), mask=real_B)
    else:
        head_K = (part - 1) * HEADS + tl.arange(0, HEADS)
        exists_KB = (head_K < H)[:, None] & real_B[None, :]
        at_KB = queries + row * query_stride_n + head_K[:, None] * query_stride_h + first_B[None, :]
        low_KB, high_KB = _turned(at_KB, cos_B[None, :], sin_B[None, :], exists_KB, HALF, INTERLEAVED)
        at_KB = out + (row * H + head_K)[:, None] * K + pair_B[None, :]
        tl.store(at_KB, low_KB, mask=exists_KB)
        tl.store(at_KB + HALF, high_KB, mask=exists_KB)


@triton.jit(do_not_specialize_on_alignment=READ_BY_NUMBER)
def _latent_kernel(
    queries,
    rows,
    positions,
    cos,
    sin,
    weight,
    eps,
    slots,
    out,
    latents,
    inverse,
    query_stride_n,
    query_stride_h,
    row_stride,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (N, parts)."""
    give_way(tl.num_programs(0), DEPENDENT)
    wait_for_inputs(DEPENDENT)
    write_latents(
        tl.program_id(0), tl.program_id(1),
        queries, rows, positions, cos, sin, weight, eps, slots, out, latents, inverse,
        query_stride_n, query_stride_h, row_stride,
        H, R, K, INTERLEAVED, HEADS, BLOCK_R, BLOCK,
    )  # fmt: skip


def rope_and_store_latent(
    q_NHK: torch.Tensor,
    rows_NC: torch.Tensor,
    rope: LatentRope,
    latents_PC: torch.Tensor,
    slots_N: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """`Ops.rope_and_store_latent`."""
    out_NHK = torch.empty_like(q_NHK, memory_format=torch.contiguous_format)
    given = arguments(q_NHK, rows_NC, rope, out_NHK, latents_PC, slots_N, scale)
    _latent_kernel[len(q_NHK), parts_of(q_NHK)](*given, num_warps=WARPS, **dependent(q_NHK.device))
    return out_NHK


def parts_of(q_NHK: torch.Tensor) -> int:
    """Programs of a row."""
    return 1 + triton.cdiv(q_NHK.shape[1], HEADS)


def arguments(
    q_NHK: torch.Tensor,
    rows_NC: torch.Tensor,
    rope: LatentRope,
    out_NHK: torch.Tensor,
    latents_PC: torch.Tensor,
    slots_N: torch.Tensor,
    scale: float,
) -> tuple[Any, ...]:
    """What `write_latents` takes after row and part."""
    _, heads, width = q_NHK.shape
    rank = rows_NC.shape[1] - width
    assert width % 2 == 0 and q_NHK.stride(2) == rows_NC.stride(1) == 1 and is_whole(latents_PC)
    return (
        q_NHK,
        rows_NC,
        rope.positions.contiguous(),
        whole(rope.cos_LF),
        whole(rope.sin_LF),
        whole(rope.norm_R),
        rope.eps,
        slots_N.contiguous(),
        out_NHK,
        latents_PC,
        1 / scale,
        *q_NHK.stride()[:2],
        rows_NC.stride(0),
        heads,
        rank,
        width,
        rope.interleaved,
        HEADS,
        triton.next_power_of_2(rank),
        triton.next_power_of_2(width // 2),
    )
