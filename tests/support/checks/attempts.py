"""Runs rules that weigh drafts, with given probabilities and uniform numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stridelm import SamplingParams
from stridelm.batch import CANDIDATE, Draft
from stridelm.draft.base import TreeShape
from stridelm.kernels.step_ops import StepOps
from stridelm.params import Speculation
from stridelm.run.state import TokenTable
from stridelm.sample.length import log_odds
from stridelm.sample.sampler import Sampler
from stridelm.sample.table import SamplingTable
from stridelm.types import Request, Span
from stridelm.verify import RULES, block, lenient, rejection
from stridelm.verify.rule import VerifyInput

CPU = torch.device("cpu")
BISECTIONS = 30
P = Callable[[tuple[int, ...]], torch.Tensor]
"""The target's distribution after these tokens: [V] probabilities."""


def inputs(
    draft: Draft,
    speculations: Sequence[Speculation],
    decides: torch.Tensor | None = None,
    vocab: int = 100,
    ops: StepOps | None = None,
) -> VerifyInput:
    """Spans of requests with distinct seeds, which use the speculations in turn. There are no logits."""
    count = len(draft.tokens)
    table, sampling = TokenTable(count, 100, CPU), SamplingTable(count, vocab)
    slots = torch.arange(count + 1)
    table.known.copy_(slots % 7 + 1)
    sampling.seed.copy_(7919 * slots)
    sampling.sample_index.copy_(slots % 3)
    requests = [Request("any", [0], SamplingParams(), kind) for kind in speculations]
    for slot in range(count):
        kind = speculations[slot % len(speculations)]
        if kind.acceptance_length is not None:
            odds = log_odds(kind.acceptance_length, kind.depth or 0)
            sampling.length_odds[slot] = torch.tensor(odds, dtype=torch.float32)
    spans = [
        Span(requests[i % len(speculations)], 0, 1, speculations[i % len(speculations)].depth or 0, draft.width)
        for i in range(count)
    ]
    all_decide = torch.ones(count, dtype=torch.bool)
    batch: Any = SimpleNamespace(spans=tuple(spans))
    return VerifyInput(
        tuple(spans),
        list(range(count)),
        slots[:-1],
        draft,
        torch.arange(count * (draft.width + 1)).view(count, -1),
        all_decide if decides is None else decides,
        batch,
        torch.empty(0),
        Sampler(sampling, table, ops),
        table,
    )


def give(monkeypatch: pytest.MonkeyPatch, p_RKV: torch.Tensor, chance_RK: torch.Tensor | None = None) -> None:
    """Replace the target's probabilities at each node, and each node's uniform number."""
    for module in (rejection, block, lenient):
        monkeypatch.setattr(module, "target_at", lambda inputs, row, **kind: p_RKV[:, row + 1])
    for module in (rejection, block):
        monkeypatch.setattr(module, "chances", lambda inputs: chance_RK)


def weigh(
    rule: str, draft: Draft, p_RKV: torch.Tensor, chance_RK: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """([R] the accepted leaf, [R, V] the weights by which the next token is drawn)."""
    with monkeypatch.context() as patch:
        give(patch, p_RKV, chance_RK)
        for module in (rejection, block):
            patch.setattr(module, "end_at", lambda inputs, leaf, weights: (leaf, weights))
        chosen: Any = RULES.get(rule)()
        return chosen.decide(inputs(draft, [Speculation("any", 1, rule)]))


# Every draft, every decision


def every_output(
    rule: str, parents: Sequence[int], p: P, q: P | None, length: int, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """[D, V, ...] float64: the probability of each output of `length` tokens; after the emitted ones the target draws.

    With q the draft is drawn from it, siblings without replacement, and D is 1. Without q the draft is fixed: one row
    for each of the D possible drafts.
    """
    vocab = len(p(()))
    tokens = [row for row in itertools.product(range(vocab), repeat=len(parents)) if _distinct(row, parents)]
    paths = [[_path(row, parents, node) for node in range(-1, len(parents))] for row in tokens]
    shape = TreeShape.of(parents, [CANDIDATE] * len(parents), CPU)
    chance, probs = torch.ones(len(tokens), dtype=torch.float64), None
    if q is not None:
        probs = torch.stack([torch.stack([q(row[parent + 1]) for parent in parents]) for row in paths])
        for d, row in enumerate(tokens):
            for j, parent in enumerate(parents):
                before = [row[k] for k in range(j) if parents[k] == parent]
                chance[d] *= float(probs[d, j, row[j]] / (1 - probs[d, j, before].sum()))
        probs = probs.float()
    probabilities = torch.stack([torch.stack([p(path) for path in row]) for row in paths]).float()
    outputs = torch.zeros(len(tokens), *(vocab,) * length, dtype=torch.float64)
    for decisions in itertools.product((0, 1), repeat=len(parents)):
        draft = shape.draft(torch.tensor(tokens), torch.ones(len(tokens), len(parents), dtype=torch.bool), probs)
        odds, leaf, weights = _decided(rule, draft, probabilities, torch.tensor(decisions), monkeypatch)
        for d in torch.nonzero(odds * chance).flatten().tolist():
            path = paths[d][int(leaf[d]) + 1]
            _add(outputs[d], path, float(odds[d] * chance[d]), weights[d].double() / weights[d].sum(), p)
    return outputs if q is None else outputs.sum(0, keepdim=True)


def plainly(p: P, length: int) -> torch.Tensor:
    """[V, ...] float64: the probability of each output in plain decoding."""
    outputs = torch.zeros((len(p(())),) * length, dtype=torch.float64)
    _add(outputs, (), 1.0, p(()), p)
    return outputs


def _decided(
    rule: str, draft: Draft, p: torch.Tensor, decisions: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The probability that each row is accepted or rejected as in `decisions`, and the outcome in that case. A row's
    probability of acceptance, given the decisions on the rows before it, is found by bisection."""
    count, width = draft.tokens.shape
    never = torch.where(decisions == 1, 0.0, torch.inf)
    extremes = torch.cat((torch.zeros(1), never)).double().expand(count, -1)
    odds = torch.ones(count, dtype=torch.float64)
    for row in range(width):
        low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
        for _ in range(BISECTIONS):
            tried = extremes.clone()
            tried[:, row + 1], tried[:, row + 2 :] = (low + high) / 2, torch.inf
            leaf, _ = weigh(rule, draft, p, tried, monkeypatch)
            accepted = leaf == row
            low, high = torch.where(accepted, tried[:, row + 1], low), torch.where(accepted, high, tried[:, row + 1])
        odds *= low if decisions[row] else 1 - high
    odds[odds < 1e-7] = 0.0  # bisection leaves a residue where the probability is 0
    return odds, *weigh(rule, draft, p, extremes, monkeypatch)


def _add(outputs: torch.Tensor, said: tuple[int, ...], odds: float, next_V: torch.Tensor, p: P) -> None:
    """Add to `outputs` the odds of all that begin with `said`, then a token from next_V, then the target's own."""
    if len(said) == outputs.dim():
        outputs[said] += odds
    elif len(said) > outputs.dim():
        outputs[said[: outputs.dim()]] += odds
    else:
        for token, chance in enumerate(next_V.tolist()):
            if chance:
                _add(outputs, (*said, token), odds * chance, p((*said, token)), p)


def _path(row: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    return () if node < 0 else (*_path(row, parents, parents[node]), row[node])


def _distinct(row: Sequence[int], parents: Sequence[int]) -> bool:
    """Siblings hold different tokens."""
    return len(set(zip(parents, row))) == len(row)
