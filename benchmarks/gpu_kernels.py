"""How long the GPU kernels take, one group of kernels after another.

    python benchmarks/gpu_kernels.py [GROUP ...] --json results/gpu_kernels.jsonl

Every figure is the median over replays of a CUDA graph that holds many calls, divided by their number, so that
launches cost nothing. The calls of a graph read different pages, enough of them to exceed the L2 cache.

A group is a function from Settings to a Section. To add one, write it and name it in GROUPS.

attention, shapes of an 8B model (32 query heads, 8 KV heads of size 128, pages of 16, bfloat16):
  decode    spans of 1 to 16 rows (the last real row and a chain of draft rows) after a context, in microseconds.
            GB/s is the KV read once over the time of one row; 8:1 is the time of 8 rows over that of one.
  prefill   one span of many rows without a context, beside torch's flash attention over dense keys.

experts, shapes of Qwen3-30B-A3B (128 experts of 2,048 x 768, 8 of them chosen, bfloat16), in microseconds:
  router    scores and choice; sort; gate and up; down; sum. `all` is the five in one graph, the router's included.
  floor     the larger of two: reading the chosen experts and reading and writing rows at the given bandwidth, and the
            products at the given rate. `skewed`: half of the rows choose among an eighth of the experts.

latent, attention over rows of 512 + 64 numbers (DeepSeek's; 16, 64 and 128 query heads, pages of 16, bfloat16):
  decode    as above. GB/s is the rows of all contexts read once over the time of one query row; floor is the time to
            read them at the bandwidth that torch copies with.
  prefill   one span of many rows without a context. TFLOP/s counts the products with latents, not with expanded heads.
  absorbed  the products of a layer's heads with their matrices of 128 x 512, as in deterministic mode and by the
            library (torch.bmm), in microseconds; floor as above.

latent_shapes, the same decode steps with other block sizes and numbers of programs, as in `shapes`.

expert_tiles, the products of `experts` with other tiles (outputs, pairs, inputs, warps, stages), sorted and unsorted:
the default choice and the five best.

shapes, the launches of `attention` with other block sizes and numbers of programs: the default choice and the five
best. A choice is good if it is near the best everywhere.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from timing import graph_us
from torch.nn.attention import SDPBackend, sdpa_kernel

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP

L2_BYTES = 256 << 20
"""Minimum that the calls of a graph read in total: five times an H200's cache."""
MAX_CALLS = 64
MODES = (False, True)
"""Fast, deterministic."""


@dataclass(frozen=True)
class Settings:
    contexts: tuple[int, ...] = (512, 2048, 8192, 32768)
    batches: tuple[int, ...] = (1, 16, 64, 256)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    chunks: tuple[int, ...] = (512, 2048, 8192)
    replays: int = 5
    expert_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    bandwidth: float = 4.28
    """TB/s, for floors: an H200's copies."""
    tflops: float = 989.0
    """For floors: an H200's products in bfloat16."""


@dataclass
class Section:
    """The results of one group of kernels: tables for the terminal, rows for JSON."""

    tables: list[Table]
    rows: list[dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"which kernels (default: all): {', '.join(GROUPS)}")
    parser.add_argument("--quick", action="store_true", help="two contexts and batches")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    unknown = sorted(set(args.groups) - set(GROUPS))
    if unknown:
        parser.error(f"no such group: {', '.join(unknown)}; choose from: {', '.join(GROUPS)}")
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    if not torch.cuda.is_available():
        console.print("benchmarks/gpu_kernels.py times kernels on a GPU, and torch sees no CUDA device here")
        return 1
    settings = Settings()
    if args.quick:
        settings = replace(settings, contexts=(512, 8192), batches=(1, 64), expert_rows=(1, 16, 256, 4096))
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results: dict[str, list[dict[str, Any]]] = {}
    for name in args.groups or GROUPS:
        section = GROUPS[name](settings)
        for table in section.tables:
            console.print(table)
        results[name] = section.rows
        torch.cuda.empty_cache()
    if args.json:
        append_result(args.json, "gpu_kernels", settings, **results)
    return 0


def right_table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


# Attention


HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
"""Keys and values of one token in one layer."""
POOL_SHARE = 0.6
"""Share of the free memory for the pool. Decode steps that need more are left out."""


class AttentionPool:
    """A pool of random keys and values, with its pages in random order, and the launches over it."""

    def __init__(self, tokens: int) -> None:
        free, _ = torch.cuda.mem_get_info()
        tokens = min(tokens, int(free * POOL_SHARE) // TOKEN_BYTES)
        self.pages = tokens // PAGE_SIZE
        shape = (self.pages * PAGE_SIZE, KV_HEADS, DIM)
        self.keys, self.values = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
        self.order = torch.randperm(self.pages, device="cuda").int()

    def decode(
        self, batch: int, context: int, rows: int, deterministic: bool, **forced: Any
    ) -> list[Callable[[], object]]:
        """Calls over different pages: `batch` spans of one real row and `rows - 1` draft rows in a chain. Empty if
        the pool is too small for one call. forced: `shape` and `programs`, to override the default choice."""
        width = -(-(context + rows) // PAGE_SIZE)
        fit = self.pages // (batch * width)
        calls = min(fit, MAX_CALLS, max(4, -(-L2_BYTES // (batch * context * TOKEN_BYTES))))
        chain = [0, *((1 << row) - 1 for row in range(1, rows))]
        return [
            self._launch(
                tables=self.order[n * batch * width : (n + 1) * batch * width].view(batch, width),
                start=context,
                real=1,
                rows=rows,
                tiles=[(span, 0) for span in range(batch)],
                rows_per_tile=rows,
                ancestors=chain * batch,
                deterministic=deterministic,
                **forced,
            )
            for n in range(calls)
        ]

    def prefill(self, rows: int, deterministic: bool, **forced: Any) -> list[Callable[[], object]]:
        from stridelm.kernels.attention_plan import HeadStack

        width = -(-rows // PAGE_SIZE)
        height = HeadStack.of(HEADS, KV_HEADS, DIM, torch.bfloat16, deterministic).max_rows
        return [
            self._launch(
                tables=self.order[n * width : (n + 1) * width].view(1, width),
                start=0,
                real=rows,
                rows=rows,
                tiles=[(0, row) for row in range(0, rows, height)][::-1],
                rows_per_tile=height,
                ancestors=[0] * rows,
                deterministic=deterministic,
                **forced,
            )
            for n in range(4)
        ]

    def _launch(
        self,
        *,
        tables: torch.Tensor,
        start: int,
        real: int,
        rows: int,
        tiles: list[tuple[int, int]],
        rows_per_tile: int,
        ancestors: list[int],
        deterministic: bool,
        **forced: Any,
    ) -> Callable[[], object]:
        from stridelm.kernels.attention import paged_attention

        batch = tables.shape[0]
        q = torch.randn(batch * rows, HEADS, DIM, device="cuda").bfloat16()
        out = torch.empty_like(q)
        tile_span, tile_row = torch.tensor(tiles, dtype=torch.int32, device="cuda").t().contiguous()
        one_each = torch.ones(batch, dtype=torch.int32, device="cuda")
        inputs = {
            "tables_RP": tables,
            "tile_span_T": tile_span,
            "tile_row_T": tile_row,
            "firsts_R": torch.arange(batch, dtype=torch.int32, device="cuda") * rows,
            "counts_R": one_each * rows,
            "starts_R": one_each * start,
            "reals_R": one_each * real,
            "ancestors_N": torch.tensor(ancestors, device="cuda"),
            "positions_N": (torch.arange(rows, device="cuda") + start).repeat(batch),
        }
        options = {
            "page_size": PAGE_SIZE,
            "rows_per_tile": rows_per_tile,
            "scale": DIM**-0.5,
            "max_keys": start + rows,
            "deterministic": deterministic,
            **forced,
        }
        return lambda: paged_attention(q, self.keys, self.values, out, **inputs, **options)


def attention(settings: Settings) -> Section:
    pool = AttentionPool(max(settings.contexts) * max(settings.batches) * 9 // 8)
    decode = decode_rows(pool, settings)
    prefill = prefill_rows(pool, settings)
    return Section([decode_table(decode, settings), prefill_table(prefill)], [*decode, *prefill])


def decode_rows(pool: AttentionPool, settings: Settings) -> list[dict[str, Any]]:
    found = []
    for batch in settings.batches:
        for context in settings.contexts:
            for deterministic in MODES:
                times = {}
                for rows in settings.rows:
                    calls = pool.decode(batch, context, rows, deterministic)
                    if calls:
                        times[rows] = graph_us(calls, settings.replays)
                if not times:
                    continue
                bandwidth = {
                    rows: batch * (context + rows) * TOKEN_BYTES / 1000 / taken for rows, taken in times.items()
                }
                ratio = times[8] / times[1] if {1, 8} <= times.keys() else None
                found.append(
                    {
                        "kernel": "decode",
                        "batch": batch,
                        "context": context,
                        "deterministic": deterministic,
                        "us": times,
                        "gb_per_s": bandwidth,
                        "ratio_8_to_1": ratio,
                    }
                )
    return found


def decode_table(found: list[dict[str, Any]], settings: Settings) -> Table:
    columns = [f"{rows} rows us" for rows in settings.rows]
    table = right_table("attention: decode", "batch", "context", "mode", *columns, "GB/s", "8:1")
    for row in found:
        times = [f"{row['us'][rows]:.1f}" if rows in row["us"] else "-" for rows in settings.rows]
        bandwidth, ratio = row["gb_per_s"].get(1), row["ratio_8_to_1"]
        table.add_row(
            str(row["batch"]),
            str(row["context"]),
            mode_name(row["deterministic"]),
            *times,
            "-" if bandwidth is None else f"{bandwidth:.0f}",
            "-" if ratio is None else f"{ratio:.2f}x",
        )
    return table


def prefill_rows(pool: AttentionPool, settings: Settings) -> list[dict[str, Any]]:
    found = []
    for rows in settings.chunks:
        flops = 2 * HEADS * DIM * rows * (rows + 1)
        timed = {mode_name(mode): graph_us(pool.prefill(rows, mode), settings.replays) for mode in MODES}
        timed["torch flash"] = graph_us([flash(rows)] * 4, settings.replays)
        for name, taken in timed.items():
            found.append(
                {"kernel": "prefill", "rows": rows, "by": name, "us": taken, "tflop_per_s": flops / taken / 1e6}
            )
    return found


def flash(rows: int) -> Callable[[], object]:
    """torch's flash attention over dense, causal keys of the same shape."""
    q = torch.randn(1, HEADS, rows, DIM, device="cuda").bfloat16()
    k, v = torch.randn(2, 1, KV_HEADS, rows, DIM, device="cuda").bfloat16()

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call


def prefill_table(found: list[dict[str, Any]]) -> Table:
    table = right_table("attention: prefill", "rows", "by", "us", "TFLOP/s")
    for row in found:
        table.add_row(str(row["rows"]), row["by"], f"{row['us']:.1f}", f"{row['tflop_per_s']:.0f}")
    return table


# Shapes


def shapes(settings: Settings) -> Section:
    pool = AttentionPool(2048 * 64 * 9 // 8)
    found = [
        trial
        for batch, context in ((1, 2048), (16, 512), (16, 2048), (64, 512), (64, 2048), (256, 512))
        for rows in (1, 4, 8, 16)
        for trial in tried(f"{rows} rows x {batch} behind {context}", rows, partial(pool.decode, batch, context, rows))
    ]
    found += [trial for rows in (512, 2048) for trial in tried(f"prompt of {rows}", 32, partial(pool.prefill, rows))]
    return Section([shapes_table(found)], found)


def tried(launch: str, rows: int, calls: Callable[..., list[Callable[[], object]]]) -> list[dict[str, Any]]:
    """One launch, timed with the default choice and with every other plausible shape and number of programs."""
    from triton.runtime.errors import OutOfResources

    from stridelm.kernels.attention_plan import Shape

    least = max(16, 1 << (rows * HEADS // KV_HEADS - 1).bit_length())
    forms: list[dict[str, Any]] = [{}]
    for height in sorted({least, max(least, 64)}):
        warps = (4,) if height < 64 else (4, 8)
        for keys, warp, stages, programs in itertools.product((32, 64, 128), warps, (2, 3), (1, 2, 3, 4)):
            if height * keys <= 128 * 64:
                forms.append({"shape": Shape(height, keys, warp, stages), "programs": programs})
    found = []
    for form in forms:
        try:
            launches = calls(False, **form)
            us = graph_us(launches, 2) if launches else None
        except (RuntimeError, OutOfResources):  # too much shared memory, or no room for the workspace
            continue
        if us is None:  # the pool is too small
            return []
        name = "as chosen" if not form else f"{astuple(form['shape'])} x {form['programs']}"
        found.append({"launch": launch, "form": name, "us": us})
    return found


def shapes_table(found: list[dict[str, Any]]) -> Table:
    table = right_table("(vectors, keys, warps, stages) x programs", "launch", "as chosen", "best five")
    for launch in dict.fromkeys(trial["launch"] for trial in found):
        trials = sorted((t for t in found if t["launch"] == launch), key=lambda trial: trial["us"])
        chosen = next(trial["us"] for trial in trials if trial["form"] == "as chosen")
        table.add_row(launch, f"{chosen:.1f}", ", ".join(f"{t['form']}: {t['us']:.1f}" for t in trials[:5]))
    return table


# Experts


EXPERTS, EACH, WIDTH, INNER = 128, 8, 2048, 768
EXPERT_BYTES = 3 * WIDTH * INNER * 2
EXPERT_CALLS = 12
"""Calls of a graph. The weights exceed the L2 cache, and each call's rows choose other experts."""
STAGES = ("router", "sort", "gate and up", "down", "sum")


class ExpertLayer:
    """A mixture's weights, and the launches of a step over them."""

    def __init__(self) -> None:
        def draw(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0.0, shape[1] ** -0.5)

        self.gate_up, self.down = draw(EXPERTS * 2 * INNER, WIDTH), draw(EXPERTS * WIDTH, INNER)
        self.router = draw(EXPERTS, WIDTH)

    def calls(self, rows: int, skewed: bool) -> tuple[dict[str, list[Callable[[], object]]], float]:
        """Each stage's calls and those of all stages together, and the mean number of experts that a call reads."""
        made = [self._launches(rows, skewed) for _ in range(EXPERT_CALLS)]
        read = sum(experts for _, experts in made) / len(made)
        return {name: [launches[name] for launches, _ in made] for name in (*STAGES, "all")}, read

    def _launches(self, rows: int, skewed: bool) -> tuple[dict[str, Callable[[], object]], int]:
        from stridelm.kernels.experts import expert_parts, multiply, sort_pairs
        from stridelm.kernels.ops import Routing
        from stridelm.kernels.products import scores
        from stridelm.kernels.triton_router import combine, route

        routing = Routing(num_experts=EXPERTS, num_experts_per_tok=EACH, norm_topk_prob=True)
        x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
        logits = torch.randn(rows, EXPERTS, device="cuda")
        if skewed:
            logits[: rows // 2, : EXPERTS // 8] += 100
        chosen, weights = route(logits, routing)
        order = sort_pairs(chosen, EXPERTS)
        inner = x.new_empty(order.places, INNER)
        parts = x.new_empty(rows, EACH, WIDTH)
        flat = parts.view(-1, WIDTH)

        def together() -> object:
            route(scores(x, self.router, None), routing)
            return combine(expert_parts(x, chosen, self.gate_up, self.down, "silu"), weights)

        launches: dict[str, Callable[[], object]] = {
            "router": lambda: route(scores(x, self.router, None), routing),
            "sort": lambda: sort_pairs(chosen, EXPERTS),
            "gate and up": lambda: multiply(x, self.gate_up, order, EACH, inner, "silu"),
            "down": lambda: multiply(inner, self.down, order, EACH, flat, None),
            "sum": lambda: combine(parts, weights),
            "all": together,
        }
        return launches, len(chosen.unique())


def experts(settings: Settings) -> Section:
    from stridelm.kernels.experts import MAX_UNSORTED_ROWS

    layer, found = ExpertLayer(), []
    for rows in settings.expert_rows:
        for skewed in (False, True):
            calls, read = layer.calls(rows, skewed)
            pairs = rows * EACH
            # Rows are read once, each pair's gated row is written and read, and so is its part of the sum.
            moved = read * EXPERT_BYTES + 2 * (rows * WIDTH * 2 + pairs * 2 * (INNER + WIDTH))
            bytes_us = moved / settings.bandwidth / 1e6
            flops_us = 6 * pairs * WIDTH * INNER / settings.tflops / 1e6
            sorts = rows > MAX_UNSORTED_ROWS
            us = {name: graph_us(calls[name], settings.replays) for name in calls if sorts or name != "sort"}
            found.append(
                {
                    "rows": rows,
                    "skewed": skewed,
                    "experts_read": read,
                    "us": us,
                    "bytes_floor_us": bytes_us,
                    "flops_floor_us": flops_us,
                    "of_floor": max(bytes_us, flops_us) / us["all"],
                }
            )
    return Section([experts_table(found)], found)


def experts_table(found: list[dict[str, Any]]) -> Table:
    names = (*STAGES, "all")
    table = right_table(
        "experts", "rows", "routing", "read", *(f"{name} us" for name in names), "bytes", "flops", "of floor"
    )
    for row in found:
        table.add_row(
            str(row["rows"]),
            "skewed" if row["skewed"] else "uniform",
            f"{row['experts_read']:.0f}",
            *(f"{row['us'][name]:.1f}" if name in row["us"] else "-" for name in names),
            f"{row['bytes_floor_us']:.1f}",
            f"{row['flops_floor_us']:.1f}",
            f"{row['of_floor']:.0%}",
        )
    return table


def expert_tiles(settings: Settings) -> Section:
    layer = ExpertLayer()
    found = [trial for rows in settings.expert_rows for trial in tried_tiles(layer, rows)]
    return Section([expert_tiles_table(found)], found)


def tried_tiles(layer: ExpertLayer, rows: int) -> list[dict[str, Any]]:
    """Both products of one number of rows, timed with the default choice and with every other plausible tile."""
    from triton.runtime.errors import OutOfResources

    from stridelm.kernels import experts
    from stridelm.kernels.products import Tile

    mean = experts.height_of(rows * EACH, EXPERTS)
    heights = sorted({16, mean, max(16, mean // 2), min(128, mean * 2)})
    unsorted = (rows,) if rows <= 16 else ()
    found = []
    for stage in ("gate and up", "down"):
        forms: list[tuple[int, Tile | None]] = [(experts.MAX_UNSORTED_ROWS, None)]
        for limit, height in itertools.product((0, *unsorted), heights):
            for outputs, inputs, stages in itertools.product((32, 64, 128), (64, 128), (3, 4, 6)):
                warps = 8 if outputs * height >= 128 * 128 else 4
                forms.append((limit, Tile(outputs, height, inputs, warps, stages)))
        for limit, tile in forms:
            if limit and tile is not None and tile.rows > 16:
                continue  # unsorted tiles have 16 rows
            with ExitStack() as patches:
                patches.enter_context(mock.patch.object(experts, "MAX_UNSORTED_ROWS", limit))
                if tile is not None:
                    patches.enter_context(mock.patch.object(experts, "choose_tile", return_value=tile))
                    patches.enter_context(mock.patch.object(experts, "height_of", return_value=tile.rows))
                try:
                    us = graph_us(layer.calls(rows, skewed=False)[0][stage], 2)
                except (RuntimeError, OutOfResources):  # too much shared memory
                    continue
            name = "as chosen" if tile is None else f"{astuple(tile)}{' unsorted' if limit else ''}"
            found.append({"rows": rows, "stage": stage, "form": name, "us": us})
    return found


def expert_tiles_table(found: list[dict[str, Any]]) -> Table:
    table = right_table("experts: (outputs, pairs, inputs, warps, stages)", "rows", "product", "as chosen", "best five")
    for rows, stage in dict.fromkeys((trial["rows"], trial["stage"]) for trial in found):
        trials = [trial for trial in found if (trial["rows"], trial["stage"]) == (rows, stage)]
        trials.sort(key=lambda trial: trial["us"])
        chosen = next(trial["us"] for trial in trials if trial["form"] == "as chosen")
        best = ", ".join(f"{trial['form']}: {trial['us']:.1f}" for trial in trials[:5])
        table.add_row(str(rows), stage, f"{chosen:.1f}", best)
    return table


# Latent rows


RANK, ROPE_DIM = 512, 64
ROW_BYTES = (RANK + ROPE_DIM) * 2
"""A token's row in one layer."""
LATENT_HEADS = (16, 64, 128)
LATENT_ROWS = (1, 2, 4, 8)


class LatentPool:
    """A pool of random rows, with its pages in random order, and the steps over it."""

    def __init__(self, tokens: int) -> None:
        free, _ = torch.cuda.mem_get_info()
        self.pages = min(tokens, int(free * POOL_SHARE) // ROW_BYTES) // PAGE_SIZE
        shape = (self.pages * PAGE_SIZE, RANK + ROPE_DIM)
        self.latents = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.order = torch.randperm(self.pages, device="cuda").int()

    def calls(
        self, heads: int, batch: int, context: int, real: int, drafts: int, deterministic: bool, **forced: Any
    ) -> list[Callable[[], object]]:
        """Steps over different pages, of `batch` spans of real rows and a chain of draft rows after a context. Empty if
        the pool is too small for one. forced: `shape` and `programs`, to override the default choice."""
        width = -(-(context + real + drafts) // PAGE_SIZE)
        fit = self.pages // (batch * width)
        count = min(fit, MAX_CALLS, max(4, -(-L2_BYTES // (batch * width * PAGE_SIZE * ROW_BYTES))))
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
        from stridelm.attention.triton import PagedStep, TritonAttention
        from stridelm.cache.layout import FULL, LatentKV
        from stridelm.types import Geometry

        batch, rows = len(tables), real + drafts
        own = torch.arange(rows, device="cuda") - real
        draft_rows = own.clamp(min=-1).repeat(batch)
        ancestors = torch.where(own >= 0, (2 << own.clamp(min=0)) - 1, 0).repeat(batch)
        each = torch.ones(batch, dtype=torch.int32, device="cuda")
        geometry = Geometry(
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
        state = LatentKV(FULL, None, heads, RANK, ROPE_DIM, (128 + ROPE_DIM) ** -0.5)
        step = PagedStep(TritonAttention(deterministic), geometry)
        q, turned = (torch.randn(batch * rows, heads, size, device="cuda").bfloat16() for size in (RANK, ROPE_DIM))
        entries = {"keys_PGD": self.latents[:, None], "values_PGD": None, "turned_NHT": turned, **forced}
        return lambda: step.run(state, q, **entries)


def latent(settings: Settings) -> Section:
    pool = LatentPool(max(settings.contexts) * max(settings.batches) * 9 // 8)
    bandwidth = copy_bandwidth(settings)
    decode = [
        row
        for heads in LATENT_HEADS
        for batch in settings.batches
        for context in settings.contexts
        for deterministic in MODES
        if (row := latent_decode(pool, heads, batch, context, deterministic, bandwidth, settings))
    ]
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
    read = batch * (context + 1) * ROW_BYTES
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
    from triton.runtime.errors import OutOfResources

    from stridelm.kernels.attention_plan import Shape

    height = max(16, rows * min(heads, 64))
    forms: list[dict[str, Any]] = [{}]
    for keys, warps, stages, programs in itertools.product((32, 64), (4, 8), (2, 3), (1, 2, 4, 8)):
        forms.append({"shape": Shape(height, keys, warps, stages), "programs": programs})
    found = []
    for form in forms:
        try:
            us = graph_us(pool.calls(heads, batch, context, 1, rows - 1, False, **form), 2)
        except (RuntimeError, OutOfResources):  # too much shared memory, or too many registers
            continue
        name = "as chosen" if not form else f"{astuple(form['shape'])} x {form['programs']}"
        found.append({"launch": f"{heads} heads, {rows} rows x {batch} behind {context}", "form": name, "us": us})
    return found


def latent_decode_table(found: list[dict[str, Any]]) -> Table:
    columns = [f"{rows} rows us" for rows in LATENT_ROWS]
    table = right_table("latent: decode", "heads", "batch", "context", "mode", *columns, "GB/s", "floor us", "of floor")
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


def mode_name(deterministic: bool) -> str:
    return "deterministic" if deterministic else "fast"


GROUPS: dict[str, Callable[[Settings], Section]] = {
    "attention": attention,
    "experts": experts,
    "latent": latent,
    "shapes": shapes,
    "expert_tiles": expert_tiles,
    "latent_shapes": latent_shapes,
}

if __name__ == "__main__":
    sys.exit(main())
