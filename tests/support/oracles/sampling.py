"""Sampling from its definition, one row at a time in float64, sharing no code with the package.

Order and meaning are vLLM's: bad words, logit bias, minimum tokens, penalties, temperature, min-p, top-k, top-p.
The noise is Philox-4x32-10 on Python integers, keyed as documented: key = the seed's two halves, counter = (token // 4,
position, sample index, stream), word = token % 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stridelm import SamplingParams

MASK32 = 2**32 - 1


def processed(
    logits_V: torch.Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    stop_ids: Sequence[int] = (),
) -> torch.Tensor:
    """[V] float64: the logits from whose softmax the next token is drawn (greedy: whose argmax it is)."""
    x = logits_V.double().clone()
    for word in params.bad_words_token_ids or ():
        before = list(word[:-1])
        if list(output[len(output) - len(before) :]) == before and len(before) <= len(output):
            x[word[-1]] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(output) < params.min_tokens:
        for token in stop_ids:
            x[token] = -math.inf
    for token in {*prompt, *output}:
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if params.temperature == 0:
        return x
    return _truncated(x / params.temperature, params)


def _truncated(x: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if params.min_p > 0:
        x = x.masked_fill(x.softmax(0) < params.min_p * x.softmax(0).max(), -math.inf)
    if params.top_k > 0:
        least = sorted(x.tolist(), reverse=True)[min(params.top_k, len(x)) - 1]
        x = x.masked_fill(x < least, -math.inf)
    if params.top_p < 1:
        p = x.softmax(0).tolist()
        held = 0.0
        for token in sorted(range(len(p)), key=lambda t: (-p[t], t)):
            if held >= params.top_p:
                x[token] = -math.inf
            held += p[token]
    return x


def probabilities(
    logits_V: torch.Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    stop_ids: Sequence[int] = (),
) -> torch.Tensor:
    """[V] float64."""
    return processed(logits_V, prompt, output, params, stop_ids).softmax(0)


def draw(
    logits_V: torch.Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    stop_ids: Sequence[int] = (),
    sample_index: int = 0,
) -> tuple[int, float]:
    """(the token at position len(prompt) + len(output), its lead over the runner-up)."""
    x = processed(logits_V, prompt, output, params, stop_ids)
    if params.temperature > 0:
        assert params.seed is not None
        position = len(prompt) + len(output)
        noise = [gumbel(params.seed, sample_index, position, token) for token in range(len(x))]
        x = x + torch.tensor(noise, dtype=torch.float64)
    best = x.topk(2).values
    return int(x.argmax()), float(best[0] - best[1])


def gumbel(seed: int, sample_index: int, position: int, token: int, stream: int = 0) -> float:
    """Standard Gumbel noise: -log(-log(1 - v)), v the word's position in (0, 1)."""
    key = (seed & MASK32, seed >> 32 & MASK32)
    word = philox((token // 4, position, sample_index, stream), key)[token % 4]
    return -math.log(-math.log1p(-(word + 0.5) / 2**32))


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10 (Salmon et al., SC 2011, section 3.3)."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k, right & MASK32, (left >> 32) ^ d ^ m, left & MASK32
        k, m = k + 0x9E3779B9 & MASK32, m + 0xBB67AE85 & MASK32
    return a, b, c, d
