"""Groups of gpu_kernels.py: attention over latent rows, and its launches with other choices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from kernel_sections import (
    L2_BYTES,
    MAX_CALLS,
    MODES,
    PAGE_SIZE,
    POOL_SHARE,
    Section,
    Settings,
    calls_past_cache,
    mode_name,
    right_table,
    shapes_table,
    tried,
)
from rich.table import Table
from timing import graph_us

RANK, ROPE_DIM, HEAD_DIM = 512, 64, 128
WIDTH = RANK + ROPE_DIM
"""A token's row in one layer."""
LATENT_HEADS = (16, 64, 128)
LATENT_ROWS = (1, 2, 4, 8)
PROMPTS = (
    *((0, rows) for rows in (128, 256, 512, 1024, 2048, 4096, 8192)),
    *((context, rows) for context in (1024, 8192) for rows in (64, 128, 192, 256, 384, 512, 2048)),
)
"""(context, rows) of chunks that go both ways."""
FEW_HEADS = 16
"""V2-Lite's."""
FEW = (*((1, rows) for rows in LATENT_ROWS), (2, 1), (4, 1), (8, 1), (16, 1), (64, 1))
"""(requests, rows of each) of steps whose launches are shared or not."""
MAX_PROMPTS = 4
"""Chunks of a graph."""


class LatentPool:
    """A pool of random rows, with its pages in random order, and the steps over it."""

    def __init__(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
        free, _ = torch.cuda.mem_get_info()
        self.row_bytes = WIDTH * dtype.itemsize
        self.pages = min(tokens, int(free * POOL_SHARE) // (WIDTH * torch.bfloat16.itemsize)) // PAGE_SIZE
        shape = (self.pages * PAGE_SIZE, WIDTH)
        self.latents = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().to(dtype)
        self.order = torch.randperm(self.pages, device="cuda").int()

    def calls(
        self, heads: int, batch: int, context: int, real: int, drafts: int, deterministic: bool, **forced: Any
    ) -> list[Callable[[], object]]:
        """Steps over different pages, of `batch` spans of real rows and a chain of draft rows after a context. Empty if
        the pool is too small for one. forced: `shape` and `programs`, to override the default choice."""
        width = -(-(context + real + drafts) // PAGE_SIZE)
        fit = self.pages // (batch * width)
        count = min(fit, calls_past_cache(batch * width * PAGE_SIZE * self.row_bytes))
        return [
            self._step(heads, context, real, drafts, deterministic, pages.view(batch, width), forced)
            for pages in self.order[: count * batch * width].view(count, batch * width)
        ]

    def _step(
        self,
        heads: int,
        context: int,
        real: int,
        drafts: int,
        deterministic: bool,
        tables: torch.Tensor,
        forced: dict[str, Any],
    ) -> Callable[[], object]:
        from stridelm.attention.paged_step import PagedStep
        from stridelm.attention.triton import TritonAttention

        rows = len(tables) * (real + drafts)
        step = PagedStep(TritonAttention(deterministic), geometry_of(tables, context, real, drafts))
        q, turned = (torch.randn(rows, heads, size, device="cuda").bfloat16() for size in (RANK, ROPE_DIM))
        entries = {"keys_PGD": self.latents[:, None], "values_PGD": None, "turned_NHT": turned, **forced}
        return lambda: step.run(state_of(heads), q, **entries)

    def prompts(self, heads: int, context: int, rows: int, *, expanded: bool) -> list[Callable[[], object]]:
        """Chunks of a prompt after a context, over different pages, from each head's own query to its own values."""
        width = -(-(context + rows) // PAGE_SIZE)
        count = min(self.pages // width, MAX_PROMPTS)
        expansion = expansion_of(heads)
        return [
            self._prompt(heads, context, rows, expanded, expansion, pages[None])
            for pages in self.order[: count * width].view(count, width)
        ]

    def _prompt(
        self, heads: int, context: int, rows: int, expanded: bool, expansion: Any, tables: torch.Tensor
    ) -> Callable[[], object]:
        from stridelm.attention.triton import TritonAttention
        from stridelm.attention.triton_latents import TritonLatents

        class Always(TritonLatents):
            """However few rows there are."""

            @classmethod
            def least_rows(cls, state: Any) -> int:
                return 1

        ends = (context + rows,) if expanded else ()
        mixer = Always(TritonAttention(False), replace(geometry_of(tables, context, rows, 0), ends=ends))
        q = torch.randn(rows, heads, HEAD_DIM + ROPE_DIM, device="cuda").bfloat16()
        turned = torch.randn(rows, heads, ROPE_DIM, device="cuda").bfloat16()
        return lambda: mixer.values(state_of(heads), q[..., :HEAD_DIM], turned, self.latents, expansion)

    def layers(self, batch: int, context: int, rows: int, *, shared: bool) -> list[Callable[[], object]]:
        """A layer's steps of few rows from projections to values, over different pages and matrices."""
        width = -(-(context + rows) // PAGE_SIZE)
        count = min(self.pages // (batch * width), MAX_CALLS)
        expansions = [expansion_of(FEW_HEADS) for _ in range(count)]
        for expansion in expansions if not shared else ():
            expansion.absorbs_few = lambda q_NHD: None
        pages = self.order[: count * batch * width].view(count, batch, width)
        return [self._layer(context, rows, expansion, own) for expansion, own in zip(expansions, pages, strict=True)]

    def _layer(self, context: int, rows: int, expansion: Any, tables: torch.Tensor) -> Callable[[], object]:
        from stridelm.attention.base import LatentInput
        from stridelm.attention.triton import TritonAttention
        from stridelm.attention.triton_latents import TritonLatents
        from stridelm.kernels.ops import LatentRope
        from stridelm.kernels.triton_rows import TritonOps

        step = geometry_of(tables, context, 1, rows - 1)
        mixer, state = TritonLatents(TritonAttention(False), step), state_of(FEW_HEADS)
        queries = FEW_HEADS * (HEAD_DIM + ROPE_DIM)
        made = torch.randn(len(step.positions), queries + WIDTH, device="cuda").bfloat16()
        q, own = made.split((queries, WIDTH), dim=1)
        nope, turned = q.view(len(made), FEW_HEADS, -1).split((HEAD_DIM, ROPE_DIM), dim=2)
        angles = torch.rand(context + rows, ROPE_DIM // 2, device="cuda")
        norm = torch.ones(RANK, dtype=torch.bfloat16, device="cuda")
        rope = LatentRope(step.positions, angles, angles, norm, 1e-6, interleaved=True)
        inputs = LatentInput(nope, turned, own, rope, expansion)
        page = tables.long().repeat_interleave(rows, 0).gather(1, (step.positions // PAGE_SIZE)[:, None])[:, 0]
        slots = page * PAGE_SIZE + step.positions % PAGE_SIZE
        return lambda: mixer.mix(state, inputs, {"latents": self.latents}, slots, TritonOps())


def expansion_of(heads: int) -> Any:
    """Random matrices."""
    from stridelm.models.layers.latent import LatentExpansion
    from stridelm.models.layers.slots import WHOLE

    expansion = LatentExpansion("kv_b_proj", heads, RANK, (HEAD_DIM, HEAD_DIM), WHOLE)
    expansion.to("cuda", torch.bfloat16).requires_grad_(False).weight.normal_(0, RANK**-0.5)
    return expansion


def state_of(heads: int) -> Any:
    from stridelm.cache.layout import FULL, LatentKV

    scale = (HEAD_DIM + ROPE_DIM) ** -0.5
    return LatentKV(FULL, None, heads, RANK, ROPE_DIM, scale, expands=(HEAD_DIM, HEAD_DIM))


def geometry_of(tables: torch.Tensor, context: int, real: int, drafts: int) -> Any:
    """A step of a span for each row of the tables: real rows and a chain of draft rows after a context."""
    from stridelm.batch import Geometry
    from stridelm.cache.layout import FULL

    batch, rows = len(tables), real + drafts
    own = torch.arange(rows, device="cuda") - real
    draft_rows = own.clamp(min=-1).repeat(batch)
    ancestors = torch.where(own >= 0, (2 << own.clamp(min=0)) - 1, 0).repeat(batch)
    each = torch.ones(batch, dtype=torch.int32, device="cuda")
    return Geometry(
        bounds=(rows,) * batch,
        firsts=torch.arange(batch, dtype=torch.int32, device="cuda") * rows,
        counts=each * rows,
        starts=each * context,
        reals=each * real,
        draft_rows=draft_rows,
        ancestors=ancestors,
        positions=(torch.arange(rows, device="cuda") + context).repeat(batch),
        tables={FULL: tables},
        page_size=PAGE_SIZE,
        max_keys=context + rows,
        is_chain=True,
    )


def latent(settings: Settings) -> Section:
    pool = LatentPool(max(settings.contexts) * max(settings.batches) * 9 // 8)
    bandwidth = copy_bandwidth(settings)
    decode = latent_decodes(pool, bandwidth, settings)
    prefill = [
        latent_prefill(pool, heads, rows, deterministic, settings)
        for heads in LATENT_HEADS
        for rows in settings.chunks
        for deterministic in MODES
    ]
    absorbed = [
        absorbed_products(heads, rows, bandwidth, settings)
        for heads in LATENT_HEADS
        for rows in (1, 4, 16, 64, 512, 2048)
    ]
    tables = [latent_decode_table(decode), latent_prefill_table(prefill), absorbed_table(absorbed)]
    return Section(tables, [*decode, *prefill, *absorbed])


def latent_ways(settings: Settings) -> Section:
    pool = LatentPool(64 * 2048 * 9 // 8)
    ways = [prompt_ways(pool, heads, *sizes, settings) for heads in LATENT_HEADS for sizes in PROMPTS]
    return Section([both_table("latent: chunks of prompts both ways", ("heads", "context", "rows"), ways)], ways)


def latent_eight_bits(settings: Settings) -> Section:
    pool = LatentPool(max(settings.contexts) * max(settings.batches) * 9 // 8, torch.float8_e4m3fn)
    decode = latent_decodes(pool, copy_bandwidth(settings), settings)
    return Section([latent_decode_table(decode, "latent, rows in eight bits: decode")], decode)


def latent_few(settings: Settings) -> Section:
    """A layer between its first and its last product, in launches of their own and with one that two share."""
    pool = LatentPool(64 * 2048 * 9 // 8)
    found: list[dict[str, Any]] = []
    for context, (batch, rows) in itertools.product((512, 2048), FEW):
        us = {
            name: graph_us(pool.layers(batch, context, rows, shared=name == "shared"), settings.replays)
            for name in ("alone", "shared")
        }
        found.append({"kernel": "latent few", "batch": batch, "rows": rows, "context": context, "us": us})
    title = "latent: a layer of few rows, from projections to values"
    return Section([both_table(title, ("batch", "rows", "context"), found)], found)


def latent_decodes(pool: LatentPool, bandwidth: float, settings: Settings) -> list[dict[str, Any]]:
    return [
        row
        for heads in LATENT_HEADS
        for batch in settings.batches
        for context in settings.contexts
        for deterministic in MODES
        if (row := latent_decode(pool, heads, batch, context, deterministic, bandwidth, settings))
    ]


def latent_shapes(settings: Settings) -> Section:
    pool = LatentPool(64 * 2048 * 9 // 8)
    found = [
        trial
        for heads, rows in ((16, 1), (16, 2), (16, 4), (128, 1))
        for batch, context in ((1, 8192), (16, 2048), (64, 2048))
        for trial in tried_latents(pool, heads, rows, batch, context)
    ]
    return Section([shapes_table(found)], found)


def copy_bandwidth(settings: Settings) -> float:
    """Bytes per microsecond that torch reads and writes while it copies."""
    source, target = torch.empty(2, L2_BYTES, dtype=torch.int8, device="cuda")
    return 2 * L2_BYTES / graph_us([lambda: target.copy_(source)] * 4, settings.replays)


def latent_decode(
    pool: LatentPool,
    heads: int,
    batch: int,
    context: int,
    deterministic: bool,
    bandwidth: float,
    settings: Settings,
) -> dict[str, Any] | None:
    """None if the pool is too small."""
    times = {}
    for rows in LATENT_ROWS:
        calls = pool.calls(heads, batch, context, 1, rows - 1, deterministic)
        if not calls:
            return None
        times[rows] = graph_us(calls, settings.replays)
    read = batch * (context + 1) * pool.row_bytes
    return {
        "kernel": "latent decode",
        "heads": heads,
        "batch": batch,
        "context": context,
        "deterministic": deterministic,
        "us": times,
        "gb_per_s": read / 1000 / times[1],
        "floor_us": read / bandwidth,
    }


def latent_prefill(pool: LatentPool, heads: int, rows: int, deterministic: bool, settings: Settings) -> dict[str, Any]:
    taken = graph_us(pool.calls(heads, 1, 0, rows, 0, deterministic), settings.replays)
    flops = heads * (2 * RANK + ROPE_DIM) * rows * (rows + 1)
    return {
        "kernel": "latent prefill",
        "heads": heads,
        "rows": rows,
        "deterministic": deterministic,
        "us": taken,
        "tflop_per_s": flops / taken / 1e6,
    }


def prompt_ways(pool: LatentPool, heads: int, context: int, rows: int, settings: Settings) -> dict[str, Any]:
    """A chunk of a prompt with absorbed and with expanded latents, their products included, in the fast mode."""
    us = {
        name: graph_us(pool.prompts(heads, context, rows, expanded=name == "expanded"), settings.replays)
        for name in ("absorbed", "expanded")
    }
    return {"kernel": "latent ways", "heads": heads, "context": context, "rows": rows, "us": us}


def both_table(title: str, sizes: tuple[str, ...], found: list[dict[str, Any]]) -> Table:
    """Of two ways, the first over the second."""
    first, second = found[0]["us"]
    table = right_table(title, *sizes, f"{first} us", f"{second} us", f"{first}:{second}")
    for row in found:
        slow, fast = row["us"].values()
        table.add_row(*(str(row[size]) for size in sizes), f"{slow:.1f}", f"{fast:.1f}", f"{slow / fast:.2f}")
    return table


def absorbed_products(heads: int, rows: int, bandwidth: float, settings: Settings) -> dict[str, Any]:
    """Queries times the expansion of keys, and sums times that of values."""
    from stridelm.kernels.head_products import head_products

    width = 128
    layers = max(4, -(-L2_BYTES // (heads * 2 * width * RANK * 2)))
    weights = torch.empty(layers, heads, 2 * width, RANK, dtype=torch.bfloat16, device="cuda").normal_(0, RANK**-0.5)
    query = torch.randn(rows, heads, width, device="cuda").bfloat16()
    mixed = torch.randn(rows, heads, RANK, device="cuda").bfloat16()

    def library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def both(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], own: torch.Tensor) -> object:
        return product(query, own[:, :width]), product(mixed, own[:, width:].transpose(1, 2)).flatten(1)

    us = {
        name: graph_us([partial(both, product, own) for own in weights[:MAX_CALLS]], settings.replays)
        for name, product in (("ours", head_products), ("library", library))
    }
    moved = 2 * (weights[0].numel() + 2 * rows * heads * (width + RANK))
    return {"kernel": "latent absorbed", "heads": heads, "rows": rows, "us": us, "floor_us": moved / bandwidth}


def absorbed_table(found: list[dict[str, Any]]) -> Table:
    table = right_table("latent: absorbed products", "heads", "rows", "ours us", "library us", "floor us")
    for row in found:
        times = (row["us"]["ours"], row["us"]["library"], row["floor_us"])
        table.add_row(str(row["heads"]), str(row["rows"]), *(f"{us:.1f}" for us in times))
    return table


def tried_latents(pool: LatentPool, heads: int, rows: int, batch: int, context: int) -> list[dict[str, Any]]:
    """Decode steps with the default choice and with every other plausible shape and number of programs."""
    from stridelm.kernels.attention_plan import Shape

    height = max(16, rows * min(heads, 64))
    forms = (
        {"shape": Shape(height, keys, warps, stages), "programs": programs}
        for keys, warps, stages, programs in itertools.product((32, 64), (4, 8), (2, 3), (1, 2, 4, 8))
    )
    launch = f"{heads} heads, {rows} rows x {batch} behind {context}"
    return tried(launch, forms, partial(pool.calls, heads, batch, context, 1, rows - 1, False))


def latent_decode_table(found: list[dict[str, Any]], title: str = "latent: decode") -> Table:
    columns = [f"{rows} rows us" for rows in LATENT_ROWS]
    table = right_table(title, "heads", "batch", "context", "mode", *columns, "GB/s", "floor us", "of floor")
    for row in found:
        table.add_row(
            *(str(row[name]) for name in ("heads", "batch", "context")),
            mode_name(row["deterministic"]),
            *(f"{row['us'][rows]:.1f}" for rows in LATENT_ROWS),
            f"{row['gb_per_s']:.0f}",
            f"{row['floor_us']:.1f}",
            f"{row['floor_us'] / row['us'][1]:.0%}",
        )
    return table


def latent_prefill_table(found: list[dict[str, Any]]) -> Table:
    table = right_table("latent: prefill", "heads", "rows", "mode", "us", "TFLOP/s")
    for row in found:
        mode = mode_name(row["deterministic"])
        table.add_row(str(row["heads"]), str(row["rows"]), mode, f"{row['us']:.1f}", f"{row['tflop_per_s']:.0f}")
    return table
