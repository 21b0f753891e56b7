"""Stride: inference for language models in which multi-token prediction is the normal case."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stridelm.primitives import settle_primitives
from stridelm.threads import settle_waiting

if TYPE_CHECKING:
    from stridelm.llm import LLM, RequestOutput
    from stridelm.params import SamplingParams, Speculation

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "Speculation"]

settle_waiting()  # before anything imports torch
settle_primitives()

_HOMES = {
    "LLM": "stridelm.llm",
    "RequestOutput": "stridelm.llm",
    "SamplingParams": "stridelm.params",
    "Speculation": "stridelm.params",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `stride --help` does not wait for torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
