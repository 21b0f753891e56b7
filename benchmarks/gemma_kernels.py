"""Group of gpu_kernels.py: attention of Gemma 4's two kinds of layers, and of an assistant that reads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from attention_kernels import AttentionPool, Heads
from gemma_shapes import E4B, assistant_of
from kernel_sections import MODES, Section, Settings, mode_name, right_table
from timing import graph_us

ROWS = (1, 4)
"""Rows of the target's spans: plain decoding, and the last real row with a chain of the default depth."""


def gemma(settings: Settings) -> Section:
    tokens = max(settings.contexts) * max(settings.batches) * 9 // 8
    layers, reading = layers_of(E4B), layers_of(E4B, assistant_of(E4B)["text_config"])
    full = AttentionPool(tokens, layer=layers[1])  # first, since it is the larger one
    target = (AttentionPool(tokens, layer=layers[0]), full)
    assistant = tuple(pool.read_by(layer) for pool, layer in zip(target, reading, strict=True))
    columns = ("layers", "rows", "batch", "context", "mode", "us", "floor us", "TB/s")
    table, found = right_table("attention of gemma4-e4b", *columns), []
    for batch, context, deterministic in itertools.product(settings.batches, settings.contexts, MODES):
        for name, pools, rows in (*(("target", target, rows) for rows in ROWS), ("assistant", assistant, 1)):
            calls = [pool.decode(batch, context, rows, deterministic) for pool in pools]
            if not all(calls):
                continue
            us = graph_us([both(*pair) for pair in zip(*calls, strict=False)], settings.replays)
            moved = sum(pool.bytes_read(batch, context, rows) for pool in pools)
            floor = moved / settings.bandwidth / 1e6
            shape = {"kernel": name, "rows": rows, "batch": batch, "context": context}
            found.append({**shape, "deterministic": deterministic, "us": us, "floor_us": floor})
            figures = (f"{us:.1f}", f"{floor:.1f}", f"{moved / us / 1e6:.2f}")
            table.add_row(name, str(rows), str(batch), str(context), mode_name(deterministic), *figures)
    return Section([table], found)


def layers_of(target: dict[str, Any], reading: dict[str, Any] | None = None) -> tuple[Heads, Heads]:
    """A sliding and a full layer: of the target, or of an assistant, which reads them with heads of its own."""
    heads, kv_heads = (reading or target)["num_attention_heads"], target["num_key_value_heads"]
    window = target["sliding_window"] - (0 if reading is None else 1)  # an assistant's row has no entry of its own
    return Heads(heads, kv_heads, target["head_dim"], window, 1.0), Heads(
        heads, kv_heads, target["global_head_dim"], None, 1.0
    )


def both(*launches: Callable[[], object]) -> Callable[[], object]:
    """One call of all, as a step has them: one kind of layer after the other."""
    return lambda: [launch() for launch in launches]
