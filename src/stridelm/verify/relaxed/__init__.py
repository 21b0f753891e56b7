"""Relaxed acceptance (rule.py), and what requests may ask of it."""

from __future__ import annotations

from dataclasses import dataclass

from stridelm.options import Options
from stridelm.values import option


@dataclass(frozen=True)
class RelaxedOptions(Options):
    """The defaults are TensorRT-LLM's recommendation for DeepSeek-R1."""

    relaxed_topk: int = option(10, "with relaxed: take only the target's so many likeliest tokens", low=1)
    relaxed_delta: float = option(
        0.6, "with relaxed: and none that is more than this less likely than the likeliest", low=0.0, high=1.0
    )
