"""Options of typical acceptance (rule.py)."""

from __future__ import annotations

from dataclasses import dataclass

from stridelm.options import Options
from stridelm.values import option


@dataclass(frozen=True)
class TypicalOptions(Options):
    """The defaults are the paper's, and vLLM's."""

    posterior_threshold: float = option(0.09, "with typical: accept tokens more likely than this", low=0.0, high=1.0)
    posterior_alpha: float = option(0.3, "with typical: or than this times exp(-entropy), whichever is lower", low=0.0)
