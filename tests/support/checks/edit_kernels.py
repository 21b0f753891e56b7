"""Requests with edited logits and rows of them, in Triton and in torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.triton_step import TritonStepOps
from stridelm.params import SamplingParams, Speculation
from stridelm.sample.rows import Rows, check_rows
from stridelm.sample.sampler import Sampler
from stridelm.sample.table import Feature, SamplingTable
from stridelm.types import Request
from support.checks.draw_kernels import History, make_logits

EDITS: dict[str, Feature] = {
    "bad_words": Feature.BAD_WORDS,
    "bias": Feature.BIAS,
    "min_tokens": Feature.MIN_TOKENS,
    "repetition": Feature.PENALTIES,
    "presence": Feature.PENALTIES,
    "frequency": Feature.PENALTIES,
}
ALL = tuple(EDITS)
KINDS: tuple[tuple[str, ...], ...] = ((), *((name,) for name in ALL), ("presence", "frequency"), ALL)
"""The edits of each slot's request: none, one, two, all of them."""
EXTRA = 5
"""Maximum number of tokens of a path through a draft."""

Asked = tuple[Request, list[int], list[list[int]]]
"""A request, its stop ids and its bad words, as SamplingTable.set takes them."""


@dataclass
class Case:
    """Running requests, one per slot, and rows of them, some of them padding; a request's rows are nodes of a draft."""

    sampler: Sampler
    """With Triton operations."""
    logits: torch.Tensor
    rows: Rows
    slots: list[int]
    requests: list[Asked]

    @property
    def table(self) -> SamplingTable:
        return self.sampler.table

    @property
    def plain(self) -> Sampler:
        """The same with torch operations."""
        return Sampler(self.table, self.sampler.history, PlainStepOps())

    @property
    def real(self) -> list[int]:
        return [row for row, slot in enumerate(self.slots) if slot >= 0]

    def part(self, index: Sequence[int]) -> Case:
        """The same requests, with only some of the rows."""
        at = torch.tensor(index, device=self.logits.device)
        return replace(self, logits=self.logits[at], rows=self.rows.select(at), slots=[self.slots[i] for i in index])

    def become(self, other: Case) -> None:
        """Copy the other case into this one's tensors, as a captured step's inputs change; lists are not reused."""
        generation = self.table.generation
        for slot, asked in enumerate(other.requests):
            self.table.set(slot, *asked)
        assert self.table.generation == generation
        ours, theirs = self.sampler.history, other.sampler.history
        ours.tokens[:, : theirs.tokens.shape[1]] = theirs.tokens
        ours.known.copy_(theirs.known)
        self.logits.copy_(other.logits)
        for name in ("slots", "positions", "extra"):
            getattr(self.rows, name).copy_(getattr(other.rows, name))
        self.slots = other.slots

    def edited(self) -> torch.Tensor:
        """Triton's edited logits, float32."""
        return self.sampler._edited(self.logits, self.rows, self.slots, self.sampler._wanted(self.slots)).float()

    def wanted(self) -> torch.Tensor:
        """torch's edited logits of the real rows."""
        case = self.part(self.real)
        return self.plain._edited(case.logits, case.rows, case.slots, self.plain._wanted(case.slots)).float()

    def check(self) -> None:
        """Edited logits equal torch's bit for bit, and padding is left alone."""
        got, real = self.edited(), self.real
        assert got.dtype == torch.float32 and got.is_contiguous()
        assert torch.equal(got[real], self.wanted())
        padding = [row for row, slot in enumerate(self.slots) if slot < 0]
        assert torch.equal(got[padding], self.logits[padding].float())

    def drawn(self, stream: int = 0) -> torch.Tensor:
        """Triton's tokens."""
        return self.sampler.draw(self.logits, self.rows, self.slots, stream)

    def twin(self, stream: int = 0) -> torch.Tensor:
        """torch's tokens of the real rows."""
        case = self.part(self.real)
        return self.plain.draw(case.logits, case.rows, case.slots, stream)


def make_case(
    seed: int,
    vocab: int,
    *,
    kinds: Sequence[Sequence[str]] = KINDS,
    others: Sequence[dict[str, Any]] = ({"temperature": 0.0},),
    dtype: torch.dtype = torch.float32,
    rows_each: int = 4,
    longest: int = 40,
    listed: int = 6,
    drafted: bool = True,
    padding: int = 3,
    device: str = "cpu",
) -> Case:
    """kinds: the edits of each slot. others: the slots' other parameters, in turn. listed: entries per list."""
    rng = random.Random(seed)
    hot = [rng.randrange(vocab) for _ in range(8)]

    def text(length: int) -> list[int]:
        return [rng.choice(hot) if rng.random() < 0.7 else rng.randrange(vocab) for _ in range(length)]

    lengths = [longest if slot == 0 else rng.randint(2, longest) for slot in range(len(kinds))]
    known = [text(length) for length in lengths]
    where = [(slot, text(rng.randrange(EXTRA + 1) if drafted else 0)) for slot in [*range(len(kinds))] * rows_each]
    rng.shuffle(where)
    table = SamplingTable(len(kinds), vocab, device)
    requests: list[Asked] = []
    for slot, names in enumerate(kinds):
        paths = [extra for of, extra in where if of == slot]
        table.set(slot, *request(rng, vocab, known[slot], paths, ALL, {}, 2))  # the slot's previous request
        requests.append(request(rng, vocab, known[slot], paths, names, others[slot % len(others)], listed))
        table.set(slot, *requests[slot])
    ghosts = [tokens + text(longest + 3 - len(tokens)) for tokens in known]
    history = History(torch.tensor([*ghosts, ghosts[0]], device=device), torch.tensor([*lengths, 7], device=device))
    for _ in range(padding):
        where.insert(rng.randrange(len(where) + 1), (-1, text(2)))
    slots = [slot for slot, _ in where]
    extra = torch.tensor([own + [-1] * (EXTRA - len(own)) for _, own in where], device=device)
    slots_M = torch.tensor(slots, device=device)
    rows = Rows(slots_M, history.known[slots_M] + (extra >= 0).sum(1), extra if drafted else None, longest)
    logits = make_logits(len(slots), vocab, dtype, device, seed)
    case = Case(Sampler(table, history, TritonStepOps()), logits, rows, slots, requests)
    check_rows(case.part(case.real).rows, history)
    return case


def request(
    rng: random.Random,
    vocab: int,
    known: list[int],
    paths: list[list[int]],
    names: Sequence[str],
    others: dict[str, Any],
    listed: int,
) -> Asked:
    """A request with the named edits, chosen so that they change the logits. Its output is short or long."""
    prompt = max(1, len(known) - rng.choice((rng.randint(1, 6), rng.randint(1, len(known)))))
    params = dict(others)
    if "bias" in names:
        ids = {0, *(rng.randrange(vocab) for _ in range(listed))}
        params["logit_bias"] = {token: rng.choice([0.0, rng.uniform(-9, 9)]) for token in ids} | {0: 2.5}
    if "min_tokens" in names:
        params["min_tokens"] = len(known) - prompt + rng.randint(1, EXTRA)
    if "repetition" in names:
        params["repetition_penalty"] = rng.choice([0.7, 1.3])
    if "presence" in names:
        params["presence_penalty"] = rng.uniform(-2, 2)
    if "frequency" in names:
        params["frequency_penalty"] = rng.uniform(-2, 2)
    stops = rng.sample(range(vocab), min(listed, vocab))
    words = [[rng.randrange(vocab) for _ in range(rng.randint(1, 4))] for _ in range(listed)]
    for path in paths:
        before = known + path
        # One ends in the output, one spans output and draft, one reaches into the prompt, where it must not match.
        words += [
            before[-n:] + [rng.randrange(vocab)] for n in (1, 2, len(path) + 1, min(len(before) - prompt + 1, 12))
        ]
    seed = rng.randrange(-(2**63), 2**63)
    made = Request("r", known[:prompt], SamplingParams(**params, max_tokens=10**6), Speculation(), seed=seed)
    return made, stops if "min_tokens" in names else [], words if "bad_words" in names else []
