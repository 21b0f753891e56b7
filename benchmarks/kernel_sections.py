"""What the groups of gpu_kernels.py share: their settings, their form, and the tables of choices tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import Any

from rich.table import Table
from timing import graph_us

L2_BYTES = 256 << 20
"""Minimum that the calls of a graph read in total: five times an H200's cache."""
MAX_CALLS = 64
MODES = (False, True)
"""Fast, deterministic."""
PAGE_SIZE = 16
POOL_SHARE = 0.6
"""Share of the free memory for the pool. Decode steps that need more are left out."""


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


def calls_past_cache(nbytes: int) -> int:
    """How many calls, each of which reads so many bytes of its own, read more than the cache holds."""
    return min(MAX_CALLS, max(4, -(-L2_BYTES // nbytes)))


def right_table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def mode_name(deterministic: bool) -> str:
    return "deterministic" if deterministic else "fast"


def tried(
    launch: str, forms: Iterable[dict[str, Any]], calls: Callable[..., list[Callable[[], object]]]
) -> list[dict[str, Any]]:
    """A launch of attention, timed with the default choice and with each of these: `shape` and `programs`, as `calls`
    takes them. Empty if `calls` returns none."""
    from triton.runtime.errors import OutOfResources

    found = []
    for form in ({}, *forms):
        try:
            launches = calls(**form)
            us = graph_us(launches, 2) if launches else None
        except (RuntimeError, OutOfResources):  # too much shared memory or registers, or no room for the workspace
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
