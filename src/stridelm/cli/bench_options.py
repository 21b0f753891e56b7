"""Options that all of `stride bench` shares."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from stridelm.options import known

RESERVED = (
    "model",
    "drafter",
    "depth",
    "acceptance",
    "generation_config",
    "max_num_seqs",
    "enable_prefix_caching",
    "check_drafting",
    "per_request_spec_decode_metrics",
    "strict",
    "skip_tokenizer_init",
)
"""Fields of EngineConfig that a benchmark sets itself, in addition to the options of drafters and rules."""


def reserved() -> set[str]:
    """Names of the engine's options that belong to the benchmark."""
    return {*RESERVED, *known()}


def engine_options(options: dict[str, Any], but: Collection[str] = ()) -> dict[str, Any]:
    """The options given for the engine, without names that belong to the benchmark, except those in `but`."""
    return {name: value for name, value in options.items() if name in but or name not in reserved()}


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, metavar="INT", help="CPU threads to compute with (default: torch's)")


def set_threads(threads: int | None) -> None:
    """Raises ValueError for fewer than one."""
    if threads is None:
        return
    if threads < 1:
        raise ValueError(f"threads must be at least 1; got {threads}")
    import torch

    torch.set_num_threads(threads)
