"""The paged attention kernel called directly, with garbage wherever it must not read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stridelm.attention import BACKENDS
from stridelm.attention.paged_step import paths, stack_of
from stridelm.attention.triton import TritonAttention
from stridelm.kernels.attention import paged_attention
from stridelm.kernels.attention_plan import make_plan
from support.oracles.attention import Case, geometry

GARBAGE = 1 << 28
"""A page far outside any pool: to read it is a fault on a GPU, and an IndexError or a crash in the interpreter."""


class FastTriton(TritonAttention):
    """The backend in its other mode, whatever `deterministic` is."""

    def __init__(self, deterministic: bool) -> None:
        super().__init__(deterministic=False)


MODES = {"exact-triton": TritonAttention, "fast-triton": FastTriton}


@contextmanager
def modes_registered() -> Iterator[None]:
    """The backend is registered in each of its modes while the context lasts."""
    for name, backend in MODES.items():
        BACKENDS.add(name, backend)
    try:
        yield
    finally:
        for name in MODES:
            BACKENDS.remove(name)


def launch(
    case: Case,
    *,
    rows_per_tile: int | None = None,
    deterministic: bool = False,
    programs: int | None = None,
    max_keys: int | None = None,
    soft_cap: float | None = None,
    by_paths: bool = False,
) -> torch.Tensor:
    """[N, H, D] of all rows of a step, in one launch.

    The step is padded with a span without rows, tiles without rows, rows of no span, and page tables longer than
    needed. The workspace and the output start as NaN.
    """
    shape = geometry(case)
    rows, _, dim = case.queries.shape
    device, latent = case.queries.device, case.latent
    stack = stack_of(latent or case.kv, case.dtype, deterministic)
    height = 1 if by_paths else rows_per_tile or stack.max_rows
    starts, reals = shape.starts.tolist(), shape.reals.tolist()
    counts = [*shape.bounds, 0]
    tiles = [(span, row) for span, count in enumerate(counts) for row in range(0, count + height, height)]
    columns = max(map(len, case.tables)) + 3
    keys = max_keys or max(start + count for start, count in zip(starts, shape.bounds, strict=True))

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def extended(tensor: torch.Tensor, fill: float) -> torch.Tensor:
        """With five more rows at the end, which belong to no span."""
        return torch.cat((tensor, tensor.new_full((5, *tensor.shape[1:]), fill)))

    width = case.kv.value_dim
    plan = make_plan(stack, len(tiles), height, keys, case.kv.window, device, programs)
    out = extended(torch.full_like(case.queries[..., :width], float("nan")), float("nan"))
    queries = extended(case.queries, float("nan"))
    paged_attention(
        queries[..., :width],
        case.keys,
        None if latent else case.values,
        out,
        turned_NHT=queries[..., width:] if latent else None,
        tables_RP=ints([table + [GARBAGE] * (columns - len(table)) for table in [*case.tables, []]]),
        tile_span_T=ints([span for span, _ in tiles]),
        tile_row_T=ints([row for _, row in tiles]),
        firsts_R=ints([sum(counts[:span]) for span in range(len(counts))]),
        counts_R=ints(counts),
        starts_R=ints([*starts, keys]),
        reals_R=ints([*reals, 0]),
        ancestors_N=extended(shape.ancestors, -1),
        positions_N=extended(shape.positions, -1),
        page_size=case.page_size,
        rows_per_tile=height,
        scale=dim**-0.5 * case.kv.key_scale,
        value_scale=case.kv.value_scale,
        max_keys=keys,
        window=case.kv.window,
        soft_cap=soft_cap,
        deterministic=deterministic,
        paths_N64=extended(paths(shape.ancestors), 99) if by_paths else None,
        workspace=torch.full((plan.workspace,), float("nan"), device=device),
        programs=programs,
    )
    assert bool(out[rows:].isnan().all()), "a row of no span was written"
    return out[:rows]
