"""What latent attention makes of few rows' projections on a GPU, in one launch: entries, rotated queries, and the other
part of the queries in the space of latents.

None of them reads what another writes, and each takes less time than a launch. A program does what it would do by
itself, so the bits are those of two launches (latent_rows.py, head_products.py).

Legend: N rows, H query heads, D width of a query's part that is not rotated, R width of a latent, K of the rotated part
of queries and keys, C = R + K, P pool slots.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stridelm.kernels import head_products, latent_rows
from stridelm.kernels.dependent import dependent, give_way, wait_for_inputs
from stridelm.kernels.head_products import write_head_product
from stridelm.kernels.latent_rows import READ_BY_NUMBER, write_latents
from stridelm.kernels.ops import LatentRope


@triton.jit(do_not_specialize=["row_tiles", "n"], do_not_specialize_on_alignment=READ_BY_NUMBER)
def _queries_kernel(
    parts,
    output_tiles,
    row_tiles,
    turned,
    rows,
    positions,
    cos,
    sin,
    norm,
    eps,
    slots,
    out,
    latents,
    inverse,
    turned_stride_n,
    turned_stride_h,
    row_stride,
    H: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    queries,
    weight,
    absorbed,
    n,
    query_stride_n,
    query_stride_h,
    weight_stride_h,
    weight_stride_a,
    weight_stride_o,
    A: tl.constexpr,
    O: tl.constexpr,  # noqa: E741 (head_products.py's)
    HEADS_TOO: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (n * parts + output_tiles * row_tiles * H,): the programs of rows, then those of products."""
    give_way(n, DEPENDENT)
    program = tl.program_id(0)
    tile = program - n * parts
    if tile < 0:
        wait_for_inputs(DEPENDENT)
        write_latents(
            program // parts, program % parts,
            turned, rows, positions, cos, sin, norm, eps, slots, out, latents, inverse,
            turned_stride_n, turned_stride_h, row_stride,
            H, LATENT, ROTATED, INTERLEAVED, HEADS, BLOCK_R, BLOCK,
        )  # fmt: skip
    else:
        write_head_product(
            tile % output_tiles, tile // output_tiles % row_tiles, tile // output_tiles // row_tiles,
            queries, weight, absorbed, n, query_stride_n, query_stride_h,
            weight_stride_h, weight_stride_a, weight_stride_o,
            A, O, H, B, R, K, PRECISION, DEPENDENT,
        )  # fmt: skip


def latent_queries(
    q_NHD: torch.Tensor,
    keys_HDR: torch.Tensor,
    turned_NHK: torch.Tensor,
    rows_NC: torch.Tensor,
    rope: LatentRope,
    latents_PC: torch.Tensor,
    slots_N: torch.Tensor,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(head_products(q, keys) [N, H, R], what `Ops.rope_and_store_latent` returns of the others [N, H, K])."""
    absorbed_NHR = q_NHD.new_empty(*q_NHD.shape[:2], keys_HDR.shape[2])
    out_NHK = torch.empty_like(turned_NHK, memory_format=torch.contiguous_format)
    of_rows = latent_rows.arguments(turned_NHK, rows_NC, rope, out_NHK, latents_PC, slots_N, scale)
    of_products = head_products.arguments(q_NHD, keys_HDR, absorbed_NHR)
    parts, (output_tiles, row_tiles, heads) = latent_rows.parts_of(turned_NHK), head_products.tiles_of(absorbed_NHR)
    _queries_kernel[(len(q_NHD) * parts + output_tiles * row_tiles * heads,)](
        parts,
        output_tiles,
        row_tiles,
        *of_rows,
        *of_products,
        num_warps=head_products.WARPS,
        num_stages=head_products.STAGES,
        **dependent(q_NHD.device),
    )
    return absorbed_NHR, out_NHK


assert latent_rows.WARPS == head_products.WARPS
