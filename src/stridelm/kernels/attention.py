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

`deterministic`: a row's bits depend only on its query, its keys and their order: not on the rows and spans beside it,
the tiles, `max_keys` or the number of programs. Keys are summed in splits of SPLIT_KEYS counted from storage index 0,
splits are merged first to last, and all products have one shape, that of the matrix instruction for 64 query vectors:
the instruction for 16 adds in another order. (Over latents, all have the shape for 32 vectors.) A draft row whose
ancestors are not stored in order of depth sums them in another order than the real row that may later take its place;
for such rows pass `paths_N64`.

Legend: R spans, N rows, T tiles, P slots of the pool, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from stridelm.kernels.attention_device import attend, merge
from stridelm.kernels.dependent import dependent
from stridelm.kernels.processors import multiprocessors
from stridelm.types import MAX_DRAFT_ROWS

SPLIT_KEYS = 256
"""Keys of a split in deterministic mode. Shorter splits keep more processors busy at batch 1, but cost more merging."""
MIN_KEYS = 128
"""In other modes, about the fewest keys worth a program of their own while processors are idle."""
MIN_KEYS_BUSY = 1024
"""The same if one program per tile already keeps half of the processors busy: additional programs share their memory
bandwidth and must gain more than merging costs."""
SHARING = 2
"""Maximum programs per multiprocessor among which the keys of tiles are divided. All of them must run at once: one that
waits for another to end costs more than sharing gains."""
SHARED_MEMORY = 228 << 10
"""Bytes of shared memory that a multiprocessor divides among its programs, and RESERVED bytes of each program (compute
capability 9.0)."""
RESERVED = 1 << 10
MERGED_QUERIES = 4
"""Query vectors that one program merges."""
WORKSPACE_LIMIT = 1 << 28
"""Maximum floats of workspace (1 GiB). A launch that would need more uses fewer programs, down to one per tile."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LN_2 = 0.6931471805599453


@dataclass(frozen=True, slots=True)
class Shape:
    """Block sizes of a launch, and how it is pipelined."""

    queries: int
    """Query vectors of a tile's stack, padded: M."""
    keys: int
    """Keys of a block."""
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the host decides about a launch, from shapes alone."""

    shape: Shape
    programs: int
    """Programs that share a tile's keys; 1 writes the output itself."""
    splits: int
    """Maximum splits that a tile can leave in the workspace; 0: no workspace is used."""
    workspace: int
    """Floats of workspace."""
    least: int
    """About the fewest key blocks of a program, unless splits are fixed."""


def paged_attention(
    q_NHD: torch.Tensor,
    keys_PGD: torch.Tensor,
    values_PGD: torch.Tensor | None,
    out_NHD: torch.Tensor,
    *,
    turned_NHT: torch.Tensor | None = None,
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
    deterministic: bool = False,
    paths_N64: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    programs: int | None = None,
    shape: Shape | None = None,
) -> None:
    """Write the attention values of the tiles' rows into `out_NHD`; other rows are left unchanged.

    q_NHD, keys_PGD, values_PGD, out_NHD: one dtype of DTYPES; the last dimension is contiguous.
    turned_NHT: for latents, the rest of the queries. Keys are then whole rows [P, 1, D + T], and values None.
    tables_RP: int32 page ids; entries that no row needs are not read. Page 0 is the null page.
    tile_span_T, tile_row_T: int32; tile t holds rows tile_row_T[t] .. + rows_per_tile of span tile_span_T[t], as far as
      they exist. Programs start in this order, so put the tiles with the most keys first.
    firsts_R, counts_R, starts_R, reals_R: int32 or int64, see the module docstring.
    ancestors_N: int64 bitmask of each draft row: bit j is the span's draft row j, its own bit included. Bits of later
      rows must be 0. Read for draft rows only.
    positions_N: int64 position of each draft row; a real row's is its storage index. Read only with a window.
    rows_per_tile: at most `max_rows_per_tile(...)`, for latents `max_latent_rows_per_tile(...)`.
    scale: positive, for instance D^-0.5. soft_cap: scores become cap * tanh(score / cap) (Gemma 2).
    max_keys: at least start + count of every span that will ever run in this launch.
    window: a row sees keys less than this many positions before its own, itself included.
    paths_N64: int32, each draft row's ancestors and itself in order of depth, padded with -1: key column base + n of
      the row is then draft row paths[row, n], and ancestors_N is not read. Needs rows_per_tile == 1.
    workspace: float32, at least `make_plan(...).workspace` long; None allocates one.
    programs, shape: override how many programs share the keys of a tile, and the block sizes, to measure what is best.

    Raises ValueError for an unsupported dtype or number of heads.
    """
    (rows, heads, dim), groups = q_NHD.shape, keys_PGD.shape[1]
    tails_PGT, tail = None, 0
    if turned_NHT is not None:
        assert values_PGD is None and groups == 1
        tail, groups = turned_NHT.shape[2], heads // latent_group(heads, q_NHD.dtype, deterministic)
        keys_PGD, tails_PGT = keys_PGD.split((dim, tail), dim=2)
        values_PGD = keys_PGD
        assert turned_NHT.shape[:2] == (rows, heads)
        assert turned_NHT.stride(2) == 1 and turned_NHT.dtype == q_NHD.dtype
    assert values_PGD is not None
    _check(q_NHD, keys_PGD, values_PGD, out_NHD)
    assert paths_N64 is None or (rows_per_tile == 1 and paths_N64.shape == (rows, MAX_DRAFT_ROWS))
    assert scale > 0 and (window is None or window > 0) and (soft_cap is None or soft_cap > 0)
    tiles = len(tile_span_T)
    if tiles == 0:
        return
    plan = make_plan(
        tiles,
        heads,
        groups,
        dim,
        rows_per_tile,
        q_NHD.dtype,
        max_keys,
        window,
        deterministic,
        q_NHD.device,
        programs,
        shape,
        tail,
    )
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
        "HEADS": heads // groups,
        "D": dim,
        "BLOCK_B": plan.shape.keys,
        "BLOCK_D": _padded(dim),
        "UNIT": SPLIT_KEYS // plan.shape.keys if deterministic else 0,
        "WINDOWED": window is not None,
        **dependent(q_NHD.device),
    }
    attend[(tiles, groups, plan.programs)](
        q_NHD,
        turned_NHT,
        keys_PGD,
        tails_PGT,
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
        *keys_PGD.stride()[:2],
        *values_PGD.stride()[:2],
        tables_RP.stride(0),
        plan.splits,
        plan.least,
        window or 0,
        factor,
        cap,
        rows_per_tile,
        TAIL=tail,
        PAGE=page_size,
        BLOCK_M=plan.shape.queries,
        BLOCK_T=_padded(tail),
        PARTIAL=plan.splits > 0,
        CAPPED=soft_cap is not None,
        PATHS=paths_N64 is not None,
        PRECISION="ieee" if ieee else "tf32",
        num_warps=plan.shape.warps,
        num_stages=plan.shape.stages,
        **fixed,
    )
    if plan.splits:
        runs = -(-rows_per_tile * fixed["HEADS"] // MERGED_QUERIES)
        merge[(tiles, groups, runs)](
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
            window or 0,
            rows_per_tile,
            BLOCK_M=MERGED_QUERIES,
            num_warps=4,
            **fixed,
        )


@lru_cache(maxsize=1024)
def make_plan(
    tiles: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rows_per_tile: int,
    dtype: torch.dtype,
    max_keys: int,
    window: int | None,
    deterministic: bool,
    device: torch.device,
    programs: int | None = None,
    shape: Shape | None = None,
    tail: int = 0,
) -> Plan:
    """How `paged_attention` will launch with these arguments. tail: T of latents, for which kv_heads are the groups.

    Raises ValueError for an unsupported dtype or number of heads.
    """
    per_head = heads // kv_heads
    max_rows = (max_latent_rows_per_tile if tail else max_rows_per_tile)(per_head, dtype, deterministic)
    assert 1 <= rows_per_tile <= max_rows, f"{rows_per_tile} rows per tile, but at most {max_rows} are possible"
    groups, processors = tiles * kv_heads, multiprocessors(device)
    if shape is None:
        shape = _shape(per_head * rows_per_tile, per_head, dim, dtype, deterministic, tail)
        narrow = replace(shape, keys=32)
        at_once, more = (processors * _resident(form, dim, dtype, tail) for form in (shape, narrow))
        if at_once < groups <= more and shape.queries <= 64 and not deterministic:
            shape = narrow  # slower block by block, but no program waits for another to end
    # A tile's keys within its window; the window may begin anywhere in a split.
    span = max_keys if window is None else min(max_keys, window + rows_per_tile + MAX_DRAFT_ROWS)
    least = MIN_KEYS_BUSY if programs is None and 2 * groups > processors else MIN_KEYS
    shares, splits = (-(-span // keys) + (window is not None) for keys in (least, SPLIT_KEYS))
    floats = groups * rows_per_tile * per_head * (dim + 2)
    if programs is None:
        programs = max(1, processors * min(SHARING, _resident(shape, dim, dtype, tail)) // groups)
        if deterministic and splits * floats > WORKSPACE_LIMIT:
            programs = 1
    programs = min(programs, shares)
    if deterministic:
        programs = min(programs, splits)
    else:
        splits = programs
    if programs == 1:
        splits = 0
    return Plan(shape, programs, splits, splits * floats, least // shape.keys)


def forms(
    per_head: int, dim: int, dtype: torch.dtype, deterministic: bool, tail: int = 0
) -> Iterator[tuple[int, Shape, int]]:
    """(rows_per_tile, shape, programs) of a launch of every binary that chains need, whatever the step. tail: T of
    latents, for which per_head are the heads of a group."""
    most = (max_latent_rows_per_tile if tail else max_rows_per_tile)(per_head, dtype, deterministic)
    for exponent in range(most.bit_length()):
        shape = _shape(per_head << exponent, per_head, dim, dtype, deterministic, tail)
        narrows = shape.queries <= 64 and not deterministic and not tail
        shapes = [shape, replace(shape, keys=32)] if narrows else [shape]
        yield from ((1 << exponent, each, programs) for each in shapes for programs in (1, 2))


def _resident(shape: Shape, dim: int, dtype: torch.dtype, tail: int) -> int:
    """Programs of this shape that a multiprocessor runs at once, limited by its shared memory: each keeps its queries
    and the blocks being loaded there, and passes weights to the smaller matrix instructions through it."""
    if tail:  # for published sizes, registers are the limit
        return 2 if shape.queries == 16 else 1
    elements = (shape.queries + shape.stages * 2 * shape.keys) * _padded(dim)
    if shape.queries < 64:
        elements += shape.queries * shape.keys
    return max(1, SHARED_MEMORY // (elements * dtype.itemsize + RESERVED))


def max_rows_per_tile(per_head: int, dtype: torch.dtype, deterministic: bool) -> int:
    """Maximum rows of a tile. per_head: query heads per KV head.

    Raises ValueError for an unsupported dtype or number of heads.
    """
    _check_dtype(dtype)
    if per_head > 128:
        raise ValueError(f"{per_head} query heads share a KV head; the triton attention backend supports at most 128")
    return _max_queries(per_head, dtype, deterministic) // per_head


def latent_group(heads: int, dtype: torch.dtype, deterministic: bool) -> int:
    """How many of the heads that share a latent row are in one tile: they need to be equally many in all.

    Raises ValueError for an unsupported dtype.
    """
    return max(size for size in range(1, _max_latent_queries(dtype, deterministic) + 1) if heads % size == 0)


def max_latent_rows_per_tile(group: int, dtype: torch.dtype, deterministic: bool) -> int:
    """Maximum rows of a tile over latents. group: heads in a tile, of `latent_group`.

    Raises ValueError for an unsupported dtype.
    """
    return _max_latent_queries(dtype, deterministic) // group


def _max_latent_queries(dtype: torch.dtype, deterministic: bool) -> int:
    """The sum of a tile's weighted latents must fit into registers, and with fixed splits also into shared memory, on
    its way into the workspace in the midst of a program."""
    _check_dtype(dtype)
    return 16 if dtype == torch.float32 else 32 if deterministic else 64


def _max_queries(per_head: int, dtype: torch.dtype, deterministic: bool) -> int:
    # float32 is multiplied without matrix instructions, so a taller stack gains nothing.
    queries = 16 if dtype == torch.float32 else 64 if deterministic else 128
    return max(queries, _power_of_two(per_head))


@cache
def _shape(queries: int, per_head: int, dim: int, dtype: torch.dtype, deterministic: bool, tail: int) -> Shape:
    """Block sizes for `queries` vectors per tile. In deterministic mode they depend only on the model."""
    if deterministic:
        queries = _max_latent_queries(dtype, deterministic) if tail else _max_queries(per_head, dtype, deterministic)
    height = max(16, _power_of_two(queries))
    if tail:  # published rows have 576 numbers
        keys = 16 if dtype == torch.float32 else 64 if height == 16 else 32
        return Shape(height, keys, warps=8 if height > 16 else 4, stages=3 if keys == 32 else 2)
    if dtype == torch.float32:
        return Shape(height, 32, warps=4, stages=2)
    wide = _power_of_two(dim) > 128
    warps = 8 if height > 64 or (wide and height == 64) else 4
    return Shape(height, 64, warps=warps, stages=2 if wide else 3)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _padded(width: int) -> int:
    """Width of a block of heads or tails: matrix instructions need at least 16."""
    return max(16, _power_of_two(max(width, 1)))


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"the triton attention backend cannot compute in {dtype}; use reference, or another dtype")


def _check(q_NHD: torch.Tensor, keys_PGD: torch.Tensor, values_PGD: torch.Tensor, out_NHD: torch.Tensor) -> None:
    assert q_NHD.shape == out_NHD.shape and keys_PGD.shape == values_PGD.shape
    assert q_NHD.shape[1] % keys_PGD.shape[1] == 0 and q_NHD.shape[2] == keys_PGD.shape[2]
    for tensor in (q_NHD, keys_PGD, values_PGD, out_NHD):
        assert tensor.stride(2) == 1 and tensor.dtype == q_NHD.dtype
