"""Random texts, looked up with one set of step operations and with torch."""

from __future__ import annotations

import random

import torch

from stridelm.draft.base import Group
from stridelm.draft.lookup import lookup
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.step_ops import StepOps
from stridelm.params import SamplingParams, Speculation
from stridelm.run.state import TokenTable
from stridelm.types import Request, Span


def check_lookup(seed: int, device: str, ops: StepOps, longest_text: int = 60) -> None:
    """Short and long texts over few tokens, one of them padding; several suffix lengths and draft widths."""
    rng = random.Random(seed)
    requests = rng.randint(1, 6)
    table = TokenTable(requests + 2, longest_text, torch.device("cpu"), PlainStepOps())
    spans, lengths = [], []
    for slot in rng.sample(range(requests + 2), requests):
        text = [rng.randrange(3) for _ in range(rng.randint(1, longest_text))]
        request = Request(str(slot), text, SamplingParams(), Speculation(), slot=slot)
        table.admit(slot, text)
        shortest = rng.randint(1, 4)
        lengths.append((shortest, rng.randint(shortest, 9)))
        spans.append(Span(request, 0, len(text), 8, rng.randint(1, 8)))
    width = max(span.draft for span in spans)
    slots = torch.tensor([span.request.slot for span in spans])
    group = Group(tuple(spans), list(range(requests)), torch.arange(requests), slots, table)
    wanted, there, lengths_R = lookup(group, lengths, width)

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    nobody = requests > 1 and rng.random() < 0.5
    asked = [-1 if nobody and i == 0 else span.request.slot for i, span in enumerate(spans)]
    shortest_G, longest_G = (ints(column) for column in zip(*lengths, strict=True))
    guesses, valid, matched = ops.followers(
        ints(asked),
        table.known.to(device),
        table.tokens.to(device),
        shortest_G,
        longest_G,
        ints([span.draft for span in spans]),
        max(span.start + span.real for span in spans),
        width,
    )
    if nobody:
        there[0] = False
        matched[0] = lengths_R[0]
    assert matched.cpu().equal(lengths_R)
    assert valid.dtype == torch.bool and valid.cpu().equal(there)
    assert torch.where(there, guesses.cpu(), 0).equal(torch.where(there, wanted, 0))
