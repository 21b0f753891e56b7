"""Sampling parameters from their definitions, in float64: how a row's logits are edited and what is drawn from them.

The meaning is vLLM's. Nothing of the engine is used here, nor anything that the engine's own tests compare it with: an
error would have to be made twice, independently, to go unnoticed.

A comparison of real numbers has a margin. Where a truncation's threshold lies within the margin, or two tokens are
that close, the row is in doubt and proves no fault; with the margins used here that is one row in hundreds.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Params = Mapping[str, Any]
MASK32 = 0xFFFFFFFF
GREEDY_BELOW = 1e-5
"""vLLM's _SAMPLING_EPS: a lower temperature takes the argmax."""
TARGET, ACCEPTED_LENGTH = 0, 0x4C454E
"""Streams of noise: the target's own draws, and the number of tokens that a simulated step accepts."""


def philox(counter: Sequence[np.ndarray | int], seed: int) -> list[np.ndarray]:
    """Philox-4x32-10 (Salmon et al., SC 2011) of four uint64 arrays that hold 32 bits each."""
    c0, c1, c2, c3 = (np.asarray(part, dtype=np.uint64) for part in counter)
    k0, k1 = seed & MASK32, seed >> 32 & MASK32
    low, shift = np.uint64(MASK32), np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = k0 + 0x9E3779B9 & MASK32, k1 + 0xBB67AE85 & MASK32
    return [c0, c1, c2, c3]


def gumbel(seed: int, sample: int, position: int, count: int, stream: int = TARGET) -> np.ndarray:
    """[count] standard Gumbel noise: word `token % 4` of counter (token // 4, position, sample, stream)."""
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    rest = [np.full_like(blocks, value) for value in (position, sample, stream)]
    words = np.stack(philox([blocks, *rest], seed), 1).ravel()[:count]
    return -np.log(-np.log1p(-(words.astype(np.float64) + 0.5) / 2.0**32))


@dataclass
class Row:
    """The distribution from which a token is drawn."""

    scores: np.ndarray
    """[V] logits at the request's temperature, with everything but truncation applied."""
    kept: np.ndarray
    """[V] bool: the tokens that truncation keeps."""
    margin: float
    doubtful: bool
    """Whether a threshold of truncation lies within the margin."""
    sampled: bool

    @property
    def probabilities(self) -> np.ndarray:
        """[V] of the token; a greedy row gives its argmax probability 1."""
        if not self.sampled:
            return np.eye(len(self.scores))[int(self.scores.argmax())]
        return softmax(np.where(self.kept, self.scores, -np.inf))

    @property
    def log_probs(self) -> np.ndarray:
        """[V] the same, but for a greedy row those at temperature 1."""
        return softmax(np.where(self.kept, self.scores, -np.inf))


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def edited(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: Params, held_back: Sequence[int]
) -> np.ndarray:
    """[V] logits after bad words, bias, minimum tokens and penalties. held_back: every id that ends the output;
    bad_words_token_ids also holds the encodings of bad words given as texts."""
    x = np.array(logits, dtype=np.float64)
    for word in params.get("bad_words_token_ids") or ():
        before = list(word[:-1])
        if not before or list(output[-len(before) :]) == before:
            x[word[-1]] = -np.inf
    for token, bias in (params.get("logit_bias") or {}).items():
        x[token] += bias
    if len(output) < params.get("min_tokens", 0):
        x[[token for token in held_back if token < len(x)]] = -np.inf
    seen = np.zeros(len(x), dtype=bool)
    seen[[*prompt, *output]] = True
    repetition = params.get("repetition_penalty", 1.0)
    x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
    counts = np.bincount(np.asarray(output, dtype=np.int64), minlength=len(x))
    x = x - counts * params.get("frequency_penalty", 0.0)
    return x - (counts > 0) * params.get("presence_penalty", 0.0)


def row_of(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: Params,
    held_back: Sequence[int],
    margin: float,
) -> Row:
    """The row after prompt and output. margin: of the raw logits."""
    x = edited(logits, prompt, output, params, held_back)
    repetition, temperature = params.get("repetition_penalty", 1.0), params.get("temperature", 1.0)
    margin *= max(1.0, repetition, 1 / repetition)
    everything = np.ones(len(x), dtype=bool)
    if temperature < GREEDY_BELOW:
        return Row(x, everything, margin, False, False)
    x, margin = x / temperature, margin / temperature
    kept, doubtful = _truncated(x, params, margin)
    return Row(x, kept, margin, doubtful, True)


def _truncated(x: np.ndarray, params: Params, margin: float) -> tuple[np.ndarray, bool]:
    """(what is kept, whether a threshold is too close to call): min-p, then top-k, then top-p of the rest."""
    kept, doubtful = np.isfinite(x), False
    if params.get("min_p", 0.0) > 0:
        least = x.max() + np.log(params["min_p"])
        doubtful |= bool((np.abs(x[kept] - least) < 2 * margin).any())
        kept &= x >= least
    if 0 < params.get("top_k", 0) < len(x):
        best = np.sort(np.where(kept, x, -np.inf))[::-1]
        least, next_best = best[params["top_k"] - 1], best[params["top_k"]]
        doubtful |= bool(np.isfinite(next_best) and 0 < least - next_best < 2 * margin)
        kept &= x >= least
    if params.get("top_p", 1.0) < 1:
        p = softmax(np.where(kept, x, -np.inf))
        order = np.lexsort((np.arange(len(x)), -x))
        before = np.concatenate(([0.0], np.cumsum(p[order])[:-1]))
        valid = kept[order]
        doubtful |= bool((np.abs(before[valid] - params["top_p"]) < 4 * margin).any())
        # At the edge of the nucleus, the order of two equally likely tokens decides which of them is in it.
        edge = int((valid & (before < params["top_p"])).sum())
        if edge < int(valid.sum()):
            doubtful |= bool(x[order[edge - 1]] - x[order[edge]] < 2 * margin)
        kept[order] = valid & (before < params["top_p"])
    return kept, doubtful


def drawn_scores(row: Row, params: Params, sample: int, position: int) -> np.ndarray:
    """[V] whose argmax, the lowest id among ties, is the token at the position."""
    scores = np.where(row.kept, row.scores, -np.inf)
    return scores + gumbel(params["seed"], sample, position, len(scores)) if row.sampled else scores


def may_be(row: Row, scores: np.ndarray, token: int) -> bool:
    """Whether the token can be the one drawn, within the margin."""
    return row.doubtful or bool(scores[token] >= scores.max() - 2 * row.margin)


def drawn(row: Row, scores: np.ndarray) -> int | None:
    """The token drawn; None if that is too close to call."""
    best, second = np.sort(scores)[::-1][:2]
    return None if row.doubtful or best - second < 2 * row.margin else int(scores.argmax())
