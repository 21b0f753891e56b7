"""A slow sampling reference, one row at a time, in Python and numpy: the tensor code must agree with it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from stridelm.params import SamplingParams, Speculation
from stridelm.sample.rows import Rows
from stridelm.sample.table import SamplingTable
from stridelm.types import Request


def philox_ints(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox-4x32-10 on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low = 2**32 - 1
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & low, (p0 >> 32) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def word(seed: int, position: int, sample: int, token: int, stream: int = 0) -> int:
    """The integer of one token's noise."""
    seed %= 2**64
    return philox_ints((token // 4, position, sample, stream), (seed % 2**32, seed >> 32))[token % 4]


@dataclass
class History:
    tokens: torch.Tensor
    known: torch.Tensor


@dataclass
class Case:
    """Running requests, and rows of them."""

    requests: list[Request]
    stop_ids: list[list[int]]
    bad_words: list[list[list[int]]]
    table: SamplingTable
    history: History
    rows: Rows
    row_slots: list[int]
    extras: list[list[int]]
    logits: torch.Tensor

    def part(self, index: list[int]) -> Case:
        """The same requests, with only some of the rows."""
        at = torch.tensor(index)
        return replace(
            self,
            rows=self.rows.select(at),
            row_slots=[self.row_slots[i] for i in index],
            extras=[self.extras[i] for i in index],
            logits=self.logits[at],
        )

    def output(self, row: int) -> list[int]:
        request = self.requests[self.row_slots[row]]
        return request.output_ids + self.extras[row]


def make_case(seed: int, vocab: int = 61, slots: int = 9, count: int = 40, step: float | None = None) -> Case:
    """Random requests with mixed features. step: round logits to multiples of it, so that many tie."""
    rng = random.Random(seed)
    requests = [_request(rng, vocab, slot) for slot in range(slots)]
    stop_ids = [rng.sample(range(vocab), rng.randrange(4)) for _ in requests]
    bad_words = [_bad_words(rng, vocab, request) for request in requests]
    table = SamplingTable(slots, vocab)
    for slot, request in enumerate(requests):
        table.set(slot, _request(rng, vocab, slot), [1, 2, 3], [[4, 5]])  # the slot's previous request
        table.set(slot, request, stop_ids[slot], bad_words[slot])
    known = [request.known for request in requests]
    # After the known tokens come leftovers of the slot's previous request.
    tokens = [r.token_ids + [rng.randrange(vocab) for _ in range(64 - r.known)] for r in requests]
    row_slots = [rng.randrange(slots) for _ in range(count)]
    extras = [[rng.randrange(vocab) for _ in range(rng.randrange(6))] for _ in row_slots]
    extra = torch.tensor([e + [-1] * (6 - len(e)) for e in extras])
    positions = torch.tensor([known[s] + len(e) for s, e in zip(row_slots, extras)])
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator) * 3
    if step:
        logits = (logits / step).round() * step
    rows = Rows(torch.tensor(row_slots), positions, extra, longest=max(known))
    history = History(torch.tensor(tokens), torch.tensor(known))
    return Case(requests, stop_ids, bad_words, table, history, rows, row_slots, extras, logits)


def _request(rng: random.Random, vocab: int, slot: int) -> Request:
    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.5 else otherwise

    params = SamplingParams(
        temperature=rng.choice([0.0, 1e-6, 0.3, 0.7, 1.0, 1.7]),
        top_k=rng.choice([0, -1, 1, 3, 17, vocab, 10 * vocab]),
        top_p=maybe(rng.choice([0.05, 0.5, 0.9, 0.999]), 1.0),
        min_p=maybe(rng.choice([0.001, 0.05, 0.5]), 0.0),
        repetition_penalty=maybe(rng.choice([0.7, 1.3]), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(rng.randrange(1, 7))}, None),
        min_tokens=maybe(rng.randrange(1, 16), 0),
        max_tokens=100,
    )
    prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 20))]
    output = [rng.randrange(vocab) for _ in range(rng.randrange(20))]
    seed = rng.randrange(-(2**63), 2**63)
    return Request(str(slot), prompt, params, Speculation(), seed=seed, sample_index=slot % 3, output_ids=output)


def _bad_words(rng: random.Random, vocab: int, request: Request) -> list[list[int]]:
    """Some match at the end of the known tokens (a few of them only across the prompt's edge), some do not."""
    words = [[rng.randrange(vocab) for _ in range(rng.randrange(1, 5))] for _ in range(rng.randrange(3))]
    if request.known > 3 and rng.random() < 0.6:
        words += [request.token_ids[-n:] + [rng.randrange(vocab)] for n in (1, 2, 3)]
    return words


def naive_row(case: Case, row: int) -> np.ndarray:
    """The processed logits [V] float32 of one row."""
    slot = case.row_slots[row]
    request, params = case.requests[slot], case.requests[slot].params
    x = case.logits[row].float().numpy().copy()
    output = case.output(row)
    for bad in case.bad_words[slot]:
        if len(bad) - 1 <= len(output) and output[len(output) - len(bad) + 1 :] == bad[:-1]:
            x[bad[-1]] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        x[case.stop_ids[slot]] = -math.inf
    for token in range(len(x)):
        if token in request.prompt_ids or token in output:
            r = np.float32(params.repetition_penalty)
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        times = output.count(token)
        x[token] -= np.float32(times) * np.float32(params.frequency_penalty)
        x[token] -= np.float32(times > 0) * np.float32(params.presence_penalty)
    return x if params.temperature < 1e-5 else _truncated(x / np.float32(params.temperature), params)


def _truncated(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    if params.min_p > 0:
        x = np.where(np.exp((x - x.max()).astype(np.float64)) < params.min_p, -np.inf, x)
    if 0 < params.top_k < len(x):
        x = np.where(x < np.sort(x)[-params.top_k], -np.inf, x)
    if params.top_p < 1:
        p = np.exp((x - x.max()).astype(np.float64))
        order = np.argsort(-x, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        dropped = order[before >= np.float32(params.top_p) * p.sum()]
        x[dropped] = -np.inf
    return x.astype(np.float32)


def naive_token(case: Case, row: int) -> int:
    """The argmax of the row's processed logits, with noise from Python integers if it is sampled."""
    x = naive_row(case, row).astype(np.float64)
    request = case.requests[case.row_slots[row]]
    if request.params.temperature >= 1e-5:
        position = request.known + len(case.extras[row])
        for token in range(len(x)):
            v = (word(request.seed, position, request.sample_index, token) + 0.5) / 2**32
            x[token] -= math.log(-math.log1p(-min(v, 1 - 2**-24)))
    return int(np.argmax(x))
