"""Lossy rules step by step: what a rule must have emitted, given a step's draft and the oracle's logits.

The definitions are from the rules' papers: typical acceptance (arXiv 2401.10774), TensorRT-LLM's relaxed acceptance,
trusted mask-token decoding (arXiv 2602.06019), and simulated lengths. The token after the accepted ones is drawn as in
plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fuzz.cases import Ask
from fuzz.definitions import ACCEPTED_LENGTH, Params, Row, drawn, drawn_scores, gumbel, may_be, softmax
from fuzz.oracle import Oracle
from fuzz.play import Look

MAX_DRAFTED = 64
DEFAULTS = {"posterior_threshold": 0.09, "posterior_alpha": 0.3, "relaxed_topk": 10, "relaxed_delta": 0.6}
"""The papers' defaults."""


def misjudged(oracle: Oracle, ask: Ask, look: Look, dtype: str, depth: int) -> str | None:
    """A message on what the step should have emitted; None if it is right or too close to call. depth: the request's,
    or the drafter's own."""
    params = oracle.settled(ask.params)
    judge = {"trust": _trusted, "synthetic-trust": _trusted}.get(ask.rule, _checked)
    wanted = judge(oracle, ask, look, params, dtype, depth)
    if isinstance(wanted, str):
        return wanted
    if wanted is None or wanted == look.tokens:
        return None
    return f"{ask.rule} emitted {look.tokens} after {look.known}, should be {wanted}; draft {look.candidates}"


def _checked(oracle: Oracle, ask: Ask, look: Look, params: Params, dtype: str, depth: int) -> list[int] | None:
    """The tokens that a rule emits by checking candidates."""
    paths: dict[int, list[int]] = {-1: []}
    for row, (token, parent) in look.candidates.items():
        paths[row] = [*paths[parent], token]
    prompt = ask.prompt
    output = list(look.known[len(prompt) :])
    logits = oracle.last_logits([[*look.known, *path] for path in paths.values()])
    rows = {node: oracle.row(x, prompt, output + path, params, dtype) for (node, path), x in zip(paths.items(), logits)}
    if ask.rule == "synthetic":
        leaf = _simulated_leaf(ask, look, depth)
    else:
        leaf = _lenient_leaf(ask, look, paths, rows)
    if leaf is None:
        return None
    position = len(look.known) + len(paths[leaf])
    last = drawn(rows[leaf], drawn_scores(rows[leaf], params, ask.sample, position))
    return None if last is None else [*paths[leaf], last]


def _lenient_leaf(ask: Ask, look: Look, paths: dict[int, list[int]], rows: dict[int, Row]) -> int | None:
    """The end of the longest accepted path, the first of several; None: too close to call."""
    kept = {-1}
    for row, (token, parent) in look.candidates.items():
        if parent not in kept:
            continue
        accepted = (_typical if ask.rule == "typical" else _relaxed)(ask, rows[parent], token)
        if accepted is None:
            return None
        if accepted:
            kept.add(row)
    return max(kept, key=lambda row: (len(paths[row]), -row))


def _option(ask: Ask, name: str) -> float:
    return float(ask.speculation.get(name, DEFAULTS[name]))


def _typical(ask: Ask, row: Row, token: int) -> bool | None:
    best = np.sort(row.scores)[::-1]
    if row.doubtful or (not row.sampled and best[0] - best[1] < 2 * row.margin):
        return None
    p = row.probabilities
    entropy = -float((p[p > 0] * np.log(p[p > 0])).sum())
    threshold = min(_option(ask, "posterior_threshold"), _option(ask, "posterior_alpha") * math.exp(-entropy))
    if threshold > 0 and abs(math.log(max(p[token], 1e-30) / threshold)) < 8 * row.margin + 1e-5 * (1 + entropy):
        return None
    if threshold == 0 and 0 < p[token] < 1e-30:  # near the smallest value that float32 holds
        return None
    return bool(p[token] > threshold)


def _relaxed(ask: Ask, row: Row, token: int) -> bool | None:
    p = row.log_probs
    order = np.sort(p)[::-1]
    threshold = max(order[min(int(_option(ask, "relaxed_topk")), len(p)) - 1], order[0] - _option(ask, "relaxed_delta"))
    if row.doubtful or 0 < p[token] < 1e-30:
        return None
    nearly = abs(p[token] - threshold) < 4 * row.margin + 1e-6
    at_rank = p[token] == order[min(int(_option(ask, "relaxed_topk")), len(p)) - 1]
    if nearly and not (at_rank and p[token] >= order[0] - _option(ask, "relaxed_delta") + 1e-3):
        return None
    if at_rank and np.sort(np.abs(order - p[token]))[1] < 4 * row.margin * p[token] + 1e-7:
        return None  # another token is about as likely, so which of them has the rank is undecidable
    return bool(p[token] >= threshold and p[token] > 0)


def _simulated_leaf(ask: Ask, look: Look, depth: int) -> int | None:
    """Follows the first valid child of each node, to the drawn depth."""
    levels = drawn_length(ask, len(look.known), depth)
    if levels is None:
        return None
    leaf = -1
    for _ in range(levels):
        children = [row for row, (_, parent) in look.candidates.items() if parent == leaf]
        if not children:
            break
        leaf = min(children)
    return leaf


def drawn_length(ask: Ask, known: int, depth: int) -> int | None:
    """The number of drafted tokens that a simulated step accepts; None: too close to call."""
    mean = float(ask.speculation.get("acceptance_length") or ask.speculation["acceptance"].partition(":")[2])
    chances = np.array([*_length_chances(mean, depth), *[0.0] * (MAX_DRAFTED - depth)])
    with np.errstate(divide="ignore"):
        scores = np.log(chances) + gumbel(ask.params["seed"], ask.sample, known, len(chances), ACCEPTED_LENGTH)
    best = np.sort(scores)[::-1]
    return None if best[0] - best[1] < 1e-5 else int(scores.argmax())


@lru_cache
def _length_chances(mean: float, depth: int) -> tuple[float, ...]:
    """P(0), P(1), .. P(depth) accepted: geometric, truncated, where 1 + accepted has the given mean."""
    low, high = 0.0, 1.0
    for _ in range(80):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**n for n in range(depth + 1)) < mean else (low, p)
    return (*(high**n * (1 - high) for n in range(depth)), high**depth)


def _trusted(oracle: Oracle, ask: Ask, look: Look, params: Params, dtype: str, depth: int) -> list[int] | str | None:
    """A window: each row draws after the tokens drawn before it, and a prefix of them is emitted."""
    prompt, known = ask.prompt, list(look.known)
    logits = oracle.logits([*known, *look.probes])[len(known) - 1 :]
    if ask.rule == "trust":
        most = _confident(logits, ask.speculation.get("confidence"))
    else:
        levels = drawn_length(ask, len(known), depth)
        most = None if levels is None else min(levels, len(look.probes)) + 1
    if most is not None and most != len(look.tokens):
        return f"{ask.rule} emitted {len(look.tokens)} tokens of a window after {look.known}, should be {most}"
    output = known[len(prompt) :]
    for place, token in enumerate(look.tokens):
        row = oracle.row(logits[place], prompt, output + look.tokens[:place], params, dtype)
        if not may_be(row, drawn_scores(row, params, ask.sample, len(known) + place), token):
            return f"{ask.rule} emitted {look.tokens} after {look.known}: token {place} is not the one drawn there"
    return None


def _confident(logits: np.ndarray, confidence: float | None) -> int | None:
    """Number of rows of the window that are emitted; None: too close to call."""
    if confidence is None:
        return len(logits)
    count = 1
    for x in logits[1:]:
        top = float(softmax(x).max())
        if abs(top - confidence) < 1e-3 * confidence:
            return None
        if top < confidence:
            break
        count += 1
    return count


def possible(oracle: Oracle, prompt: Sequence[int], output: Sequence[int], settled: Params, dtype: str) -> str | None:
    """A message on a token that a lossless rule cannot have emitted, since its target probability is 0; else None."""
    logits = oracle.logits([*prompt, *output])
    for index, token in enumerate(output):
        row = oracle.row(logits[len(prompt) + index - 1], prompt, output[:index], settled, dtype)
        scores = row.scores
        if row.doubtful or (row.kept[token] and (row.sampled or scores[token] >= scores.max() - 2 * row.margin)):
            continue
        return f"token {index} is {token}, which can never be drawn there"
    return None
