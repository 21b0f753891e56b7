"""Groups of gpu_kernels.py: attention over heads, and its launches with other choices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from kernel_sections import (
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
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, DIM = 32, 8, 128


@dataclass(frozen=True)
class Heads:
    """A layer's heads."""

    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM
    window: int | None = None
    scale: float = DIM**-0.5

    @property
    def token_numbers(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.dim


class AttentionPool:
    """A pool of random keys and values, with its pages in random order, and the launches over it."""

    def __init__(self, tokens: int, dtype: torch.dtype = torch.bfloat16, layer: Heads = Heads()) -> None:
        free, _ = torch.cuda.mem_get_info()
        self.layer, self.token_bytes = layer, layer.token_numbers * dtype.itemsize
        tokens = min(tokens, int(free * POOL_SHARE) // (layer.token_numbers * torch.bfloat16.itemsize))
        self.pages = tokens // PAGE_SIZE
        shape = (self.pages * PAGE_SIZE, layer.kv_heads, layer.dim)
        drawn = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
        self.keys, self.values = (each.to(dtype) for each in drawn)
        self.order = torch.randperm(self.pages, device="cuda").int()

    def decode(
        self, batch: int, context: int, rows: int, deterministic: bool, **forced: Any
    ) -> list[Callable[[], object]]:
        """Calls over different pages: `batch` spans of one real row and `rows - 1` draft rows in a chain. Empty if
        the pool is too small for one call. forced: `shape` and `programs`, to override the default choice."""
        width = -(-(context + rows) // PAGE_SIZE)
        fit = self.pages // (batch * width)
        calls = min(fit, calls_past_cache(batch * self.seen(context) * self.token_bytes))
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

    def seen(self, context: int) -> int:
        """Tokens of a context that are read."""
        return context if self.layer.window is None else min(context, self.layer.window)

    def bytes_read(self, batch: int, context: int, rows: int) -> int:
        """Keys and values that the spans of `decode` see, each once."""
        return batch * (self.seen(context) + rows) * self.token_bytes

    def read_by(self, layer: Heads) -> AttentionPool:
        """The same entries, read with other heads or another window."""
        other = copy(self)
        other.layer = layer
        return other

    def prefill(self, rows: int, deterministic: bool, **forced: Any) -> list[Callable[[], object]]:
        from stridelm.kernels.attention_plan import HeadStack

        width = -(-rows // PAGE_SIZE)
        height = HeadStack.of(
            self.layer.heads, self.layer.kv_heads, self.layer.dim, torch.bfloat16, deterministic
        ).max_rows
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
        q = torch.randn(batch * rows, self.layer.heads, self.layer.dim, device="cuda").bfloat16()
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
            "scale": self.layer.scale,
            "window": self.layer.window,
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


def attention_eight_bits(settings: Settings) -> Section:
    pool = AttentionPool(max(settings.contexts) * max(settings.batches) * 9 // 8, torch.float8_e4m3fn)
    decode = decode_rows(pool, settings)
    return Section([decode_table(decode, settings, "attention, KV in eight bits: decode")], decode)


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
                read = {rows: pool.bytes_read(batch, context, rows) for rows in times}
                bandwidth = {rows: read[rows] / 1000 / taken for rows, taken in times.items()}
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


def decode_table(found: list[dict[str, Any]], settings: Settings, title: str = "attention: decode") -> Table:
    columns = [f"{rows} rows us" for rows in settings.rows]
    table = right_table(title, "batch", "context", "mode", *columns, "GB/s", "8:1")
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
        for batch, context in (
            *((1, 2048), (6, 2048), (10, 2048), (12, 8192), (16, 512), (16, 2048)),
            *((20, 2048), (24, 8192), (64, 512), (64, 2048), (256, 512)),
        )
        for rows in (1, 4, 8, 16)
        for trial in tried(
            f"{rows} rows x {batch} behind {context}", forms(rows), partial(pool.decode, batch, context, rows, False)
        )
    ]
    for rows in (512, 2048):
        found += tried(f"prompt of {rows}", forms(32), partial(pool.prefill, rows, False))
    return Section([shapes_table(found)], found)


def forms(rows: int) -> list[dict[str, Any]]:
    """Every plausible shape and number of programs for tiles of this many rows."""
    from stridelm.kernels.attention_plan import Shape

    least = max(16, 1 << (rows * HEADS // KV_HEADS - 1).bit_length())
    found = []
    for height in sorted({least, max(least, 64)}):
        warps = (4,) if height < 64 else (4, 8)
        for keys, warp, stages, programs in itertools.product((32, 64, 128), warps, (2, 3), (1, 2, 3, 4, 6, 8)):
            if height * keys <= 128 * 64:
                found.append({"shape": Shape(height, keys, warp, stages), "programs": programs})
    return found
