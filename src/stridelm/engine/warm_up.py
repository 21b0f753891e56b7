"""Requests that an engine serves to itself before it is ready, so that no user waits for a kernel to be compiled:
prompts of several lengths with every class of parameters, drafted as configured and not drafted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stridelm.params import SamplingParams
from stridelm.schedule import Budget

LENGTHS = (1, 9, 20, 40, 100, 150, 300, 700, 1500, 4000, 8000)
"""Tokens of the prompts. A wave arrives at each step, so that prompts also run beside the decodes of earlier ones."""
OUTPUT = 4
SIZES = (1, 4, 16, 64, 256)
"""Requests that decode together, to be measured: steps tell of others with up to twice or half as many."""
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


GRAMMAR: dict[str, Any] = {"temperature": 0.0, "structured_outputs": {"regex": "[a-z ]*"}, "ignore_eos": False}


Wave = list[tuple[list[int], SamplingParams]]
"""Prompts and parameters of requests that arrive together."""


def warm_up_requests(vocab_size: int, max_length: int, budget: Budget, *, grammars: bool) -> Iterator[Wave]:
    """One wave per step; the engine may have no room for all of a wave. The last waves fill a step with prompts, since
    kernels are launched in another form where there is work for every processor. grammars: whether the engine has
    them."""

    def wave(variant: dict[str, Any], length: int, count: int) -> Wave:
        prompt = _prompt(length, vocab_size)
        params = SamplingParams(**{"ignore_eos": True, **variant}, max_tokens=OUTPUT, seed=0)
        return [(prompt, replace(params, speculation=which)) for which in ("off", None) for _ in range(count)]

    lengths = [length for length in LENGTHS if length + OUTPUT <= max_length]
    for variant in (*VARIANTS, *([GRAMMAR] if grammars else ())):
        for length in lengths:
            yield wave(variant, length, 1)
    for length in lengths:
        yield wave(VARIANTS[0], length, min(budget.requests // 2, budget.tokens // (2 * length)))


def prompts_to_measure(vocab_size: int, max_length: int, budget: Budget) -> Iterator[Wave]:
    """Waves that each make one step of prompts, to learn what prompt rows cost: several sizes, each twice."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for share in (16, 4, 1) * 2:
        rows = min(budget.tokens // share, max_length - 1)
        if rows:
            yield [(_prompt(rows, vocab_size), params)]


def decodes_to_measure(depth: int, budget: Budget) -> Iterator[Wave]:
    """Waves of requests that decode together, few and many, long enough for each depth to be tried twice, to learn
    what steps with drafts cost. depth: of the deepest draft."""
    params = SamplingParams(temperature=0.0, max_tokens=2 * (depth + 1) * (depth + 2), ignore_eos=True)
    sizes = [size for size in SIZES if size < budget.requests]
    for count in (*sizes, budget.requests):
        yield [([0], params)] * count


def _prompt(length: int, vocab_size: int) -> list[int]:
    return [index * 7919 % vocab_size for index in range(length)]
