"""Options of suffix decoding (drafter.py)."""

from __future__ import annotations

from dataclasses import dataclass

from stridelm.options import Options
from stridelm.values import option


@dataclass(frozen=True)
class SuffixOptions(Options):
    """The defaults are vLLM's."""

    suffix_decoding_max_spec_factor: float = option(
        1.0, "with suffix: levels of the draft per token of the match", low=0.0, open_low=True
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "with suffix: least estimated probability of a drafted row", low=0.0, high=1.0
    )
