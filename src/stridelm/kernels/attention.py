"""Attention over paged KV on a GPU: softmax(q k / sqrt(D)) v for spans of any length in one launch.

The rows of a batch are stored span after span. Span r has rows firsts[r] .. firsts[r] + counts[r]: the first reals[r]
are real and the others are draft rows. Storage index s of a span is pool slot
tables[r, s // page_size] * page_size + s % page_size.

    storage     0 ............ start  base            a real row sees   [0, own index]
    of a span   [ committed   ][real ][draft rows]    a draft row sees  [0, base) and the draft rows of its bitmask

Tiles. The rows of a tile and the query heads that share a KV head form one stack of M query vectors, so that a span of
16 rows reads its keys once, like a span of one. If there are few tiles, several programs share the keys of one and
leave partial sums in a workspace, which a second kernel merges (flash decoding,
https://pytorch.org/blog/flash-decoding).

Graphs. Starts, lengths, tables and masks are read only on the device. The host decides from shapes and from the bound
`max_keys`, so a captured launch stays correct when the values change.

Latents. All query heads of a layer may share one row per token (LatentKV), whose first part, the latent, is key and
value, and whose tail is key only. The heads are cut into groups that fill a tile, so that a row is read once per group.

Tails. Keys of heads may have a tail as well, one for all heads: that is what expanded latents are.

`deterministic`: a row's bits depend only on its query, its keys and their order: not on the rows and spans beside it,
the tiles, `max_keys` or the number of programs. Keys are summed in splits of a fixed size from storage index 0 on,
splits are merged first to last, and all products have one shape, that of the matrix instruction for 64 query vectors:
the instruction for 16 adds in another order. (Over latents, all have the shape for 32 vectors.) A draft row whose
ancestors are not stored in order of depth sums them in another order than the real row that may later take its place;
for such rows pass `paths_N64`.

Legend: R spans, N rows, T tiles, P slots of the pool, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import torch

from stridelm.kernels.attention_device import attend
from stridelm.kernels.attention_plan import HeadStack, LatentStack, Shape, Stack, make_plan, padded
from stridelm.kernels.attention_splits import merge
from stridelm.kernels.dependent import dependent
from stridelm.kernels.plain_fp8 import E4M3
from stridelm.types import MAX_DRAFT_ROWS

LN_2 = 0.6931471805599453


def paged_attention(
    q_NHD: torch.Tensor,
    keys_PGD: torch.Tensor,
    values_PGD: torch.Tensor | None,
    out_NHD: torch.Tensor,
    *,
    turned_NHT: torch.Tensor | None = None,
    tails_PT: torch.Tensor | None = None,
    tables_RP: torch.Tensor,
    tile_span_T: torch.Tensor,
    tile_row_T: torch.Tensor,
    firsts_R: torch.Tensor,
    counts_R: torch.Tensor,
    starts_R: torch.Tensor,
    reals_R: torch.Tensor,
    ancestors_N: torch.Tensor,
    positions_N: torch.Tensor,
    page_size: int,
    rows_per_tile: int,
    scale: float,
    max_keys: int,
    window: int | None = None,
    soft_cap: float | None = None,
    value_scale: float = 1.0,
    deterministic: bool = False,
    paths_N64: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    filled_tiles: int | None = None,
    programs: int | None = None,
    shape: Shape | None = None,
) -> None:
    """Write the attention values of the tiles' rows into `out_NHD`; other rows are left unchanged.

    q_NHD, keys_PGD, values_PGD, out_NHD: one dtype of attention_plan.DTYPES, or keys and values in eight bits
      (entries.py); the last dimension is contiguous.
    values_PGD: None for latents: keys are then whole rows [P, 1, D + T].
    turned_NHT: the rest of the queries, which meets the keys' tails. Needed for latents.
    tails_PT: tails of heads' keys, in the queries' dtype; None for latents, whose rows contain them.
    tables_RP: int32 page ids; entries that no row needs are not read. Page 0 is the null page.
    tile_span_T, tile_row_T: int32; tile t holds rows tile_row_T[t] .. + rows_per_tile of span tile_span_T[t], as far as
      they exist. Programs start in this order, so put the tiles with the most keys first.
    firsts_R, counts_R, starts_R, reals_R: int32 or int64, see the module docstring.
    ancestors_N: int64 bitmask of each draft row: bit j is the span's draft row j, its own bit included. Bits of later
      rows must be 0. Read for draft rows only.
    positions_N: int64 position of each draft row; a real row's is its storage index. Read only with a window.
    rows_per_tile: at most the stack's `max_rows` (attention_plan.py).
    scale: positive, for instance D^-0.5, times what stored keys must be multiplied by. value_scale: the same of values.
    soft_cap: scores become cap * tanh(score / cap) (Gemma 2).
    max_keys: at least start + count of every span that will ever run in this launch.
    window: a row sees keys less than this many positions before its own, itself included.
    paths_N64: int32, each draft row's ancestors and itself in order of depth, padded with -1: key column base + n of
      the row is then draft row paths[row, n], and ancestors_N is not read. Needs rows_per_tile == 1.
    workspace: float32, at least `make_plan(...).workspace` long; None allocates one.
    filled_tiles: how many tiles have rows, about, if the others only fill a captured size.
    programs, shape: override how many programs share the keys of a tile, and the block sizes, to measure what is best.

    Raises ValueError for an unsupported dtype or number of heads.
    """
    rows, heads, dim = q_NHD.shape
    tail = 0 if turned_NHT is None else turned_NHT.shape[2]
    stack: Stack
    if values_PGD is None:
        assert turned_NHT is not None and tails_PT is None and keys_PGD.shape[1] == 1
        stack = LatentStack.of(heads, dim, q_NHD.dtype, deterministic)
        keys_PGD, tails_PGT = keys_PGD.split((dim, tail), dim=2)
        tails_PT = tails_PGT[:, 0]
    else:
        stack = HeadStack.of(heads, keys_PGD.shape[1], dim, q_NHD.dtype, deterministic, keys_PGD.dtype)
    _check(q_NHD, keys_PGD, values_PGD, out_NHD)
    _check_tails(q_NHD, keys_PGD, turned_NHT, tails_PT)
    assert paths_N64 is None or (rows_per_tile == 1 and paths_N64.shape == (rows, MAX_DRAFT_ROWS))
    assert scale > 0 and (window is None or window > 0) and (soft_cap is None or soft_cap > 0)
    tiles = len(tile_span_T)
    if tiles == 0:
        return
    plan = make_plan(stack, tiles, rows_per_tile, max_keys, window, q_NHD.device, programs, shape, filled_tiles)
    if workspace is None:
        workspace = torch.empty(plan.workspace, dtype=torch.float32, device=q_NHD.device)
    assert workspace.dtype == torch.float32 and workspace.numel() >= plan.workspace
    sums = workspace
    stats = workspace[plan.workspace // (dim + 2) * dim :] if plan.splits else workspace

    # Scores in units of ln 2, so that the kernel only needs powers of two; a capped score is factor * tanh.
    factor = (scale if soft_cap is None else soft_cap) / LN_2
    cap = 0.0 if soft_cap is None else 2 * scale / soft_cap / LN_2
    ieee = q_NHD.dtype == torch.float32
    fixed = {
        "HEADS": stack.per_group,
        "D": dim,
        "BLOCK_B": plan.shape.keys,
        "BLOCK_D": padded(dim),
        "UNIT": plan.unit,
        "WINDOWED": window is not None,
        **dependent(q_NHD.device),
    }
    attend[(tiles, stack.groups, plan.programs)](
        q_NHD,
        turned_NHT,
        keys_PGD,
        tails_PT,
        values_PGD,
        out_NHD,
        sums,
        stats,
        tables_RP,
        tile_span_T,
        tile_row_T,
        firsts_R,
        counts_R,
        starts_R,
        reals_R,
        ancestors_N,
        positions_N,
        tables_RP if paths_N64 is None else paths_N64,
        *q_NHD.stride()[:2],
        *((None, None) if turned_NHT is None else turned_NHT.stride()[:2]),
        *out_NHD.stride()[:2],
        keys_PGD.stride(0),
        0 if values_PGD is None else keys_PGD.stride(1),  # all groups of heads read the same latents
        None if tails_PT is None else tails_PT.stride(0),
        *((None, None) if values_PGD is None else values_PGD.stride()[:2]),
        tables_RP.stride(0),
        plan.splits,
        plan.least,
        plan.merging,
        window or 0,
        factor,
        cap,
        value_scale,
        rows_per_tile,
        TAIL=tail,
        PAGE=page_size,
        BLOCK_M=plan.shape.queries,
        BLOCK_T=padded(tail),
        PARTIAL=plan.splits > 0,
        CAPPED=soft_cap is not None,
        PATHS=paths_N64 is not None,
        PRECISION="ieee" if ieee else "tf32",
        num_warps=plan.shape.warps,
        num_stages=plan.shape.stages,
        **fixed,
    )
    if plan.splits:
        each = stack.merged_queries(rows_per_tile)
        runs = -(-rows_per_tile * stack.per_group // each)
        merge[(tiles, stack.groups, runs)](
            out_NHD,
            sums,
            stats,
            tile_span_T,
            tile_row_T,
            firsts_R,
            counts_R,
            starts_R,
            reals_R,
            *out_NHD.stride()[:2],
            plan.programs,
            plan.splits,
            plan.least,
            plan.merging,
            window or 0,
            value_scale,
            rows_per_tile,
            BLOCK_M=each,
            num_warps=4,
            **fixed,
        )


def _check(q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor | None, out_NHD: torch.Tensor) -> None:
    values_PGD = keys_PGD if values_PGD is None else values_PGD
    assert q_NHD.shape == out_NHD.shape and keys_PGD.shape == values_PGD.shape
    assert q_NHD.shape[1] % keys_PGD.shape[1] == 0 and q_NHD.shape[2] == keys_PGD.shape[2]
    assert q_NHD.dtype == out_NHD.dtype and keys_PGD.dtype == values_PGD.dtype in (q_NHD.dtype, E4M3)
    assert all(tensor.stride(2) == 1 for tensor in (q_NHD, keys_PGD, values_PGD, out_NHD))


def _check_tails(
    q_NHD: torch.Tensor, keys_PGD: torch.Tensor, turned_NHT: torch.Tensor | None, tails_PT: torch.Tensor | None
) -> None:
    assert (turned_NHT is None) == (tails_PT is None)
    if turned_NHT is None or tails_PT is None:
        return
    assert turned_NHT.shape == (*q_NHD.shape[:2], tails_PT.shape[1]) and turned_NHT.dtype == q_NHD.dtype
    assert tails_PT.shape[0] == keys_PGD.shape[0] and tails_PT.dtype == keys_PGD.dtype
    assert turned_NHT.stride(2) == tails_PT.stride(1) == 1
