"""Requests that an engine serves to itself before it is ready, so that no user waits for a kernel to be compiled:
prompts of several lengths with every class of parameters, drafted as configured and not drafted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stridelm.params import SamplingParams

LENGTHS = (1, 9, 20, 40, 100, 150, 300, 700, 1500, 4000, 8000)
"""Tokens of the prompts. One arrives at each step, so that they also run beside decodes."""
OUTPUT = 4
VARIANTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {
        "temperature": 0.8,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {0: 1.0},
        "bad_words_token_ids": ((0, 1),),
        "min_tokens": 2,
    },
    {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 1},
)


def warm_up_requests(vocab_size: int, max_length: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts and parameters; the engine may have no room for the longest."""
    for variant in VARIANTS:
        for length in LENGTHS:
            for speculation in ("off", None) if length + OUTPUT <= max_length else ():
                params = SamplingParams(**variant, max_tokens=OUTPUT, ignore_eos=True, seed=0, speculation=speculation)
                yield [index * 7919 % vocab_size for index in range(length)], params
