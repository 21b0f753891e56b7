"""Options of relaxed acceptance (rule.py)."""

from __future__ import annotations

from dataclasses import dataclass

from stridelm.options import Options
from stridelm.values import option


@dataclass(frozen=True)
class RelaxedOptions(Options):
    """The defaults are TensorRT-LLM's recommendation for DeepSeek-R1."""

    relaxed_topk: int = option(10, "with relaxed: accept only the target's most likely tokens, this many", low=1)
    relaxed_delta: float = option(
        0.6, "with relaxed: how far below the highest an accepted probability may be", low=0.0, high=1.0
    )
