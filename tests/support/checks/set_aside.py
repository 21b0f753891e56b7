"""Rows of random steps, set aside by an implementation and by torch."""

from __future__ import annotations

import random

import torch

from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.step_ops import StepOps

SLOTS, ROOM = 9, 6


def check_set_aside(seed: int, device: str, ops: StepOps) -> None:
    """One source to four, requests with and without rows that wait, one row and several of each, and padding."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, width = rng.choice((torch.bfloat16, torch.float16, torch.float32, torch.float64)), rng.choice((8, 40, 1100))
    count = rng.randint(1, 4)
    bounds = [rng.randint(1, 3) for _ in range(rng.randint(1, 6))]
    chosen = rng.sample(range(len(bounds)), rng.randint(1, len(bounds)))
    firsts = torch.tensor([sum(bounds[:i]) for i in range(len(bounds))], dtype=torch.int32)
    sources = [torch.randn(sum(bounds), width, generator=generator).to(dtype) for _ in range(count)]
    slots = torch.tensor([-1 if rng.random() < 0.2 else slot for slot in rng.sample(range(SLOTS), len(chosen))])
    reals = torch.tensor([rng.randint(1, bound) for bound in bounds])
    rows = torch.tensor([rng.randrange(ROOM - 2) for _ in range(SLOTS)] + [0])
    kept = torch.randn(SLOTS + 1, ROOM, count * width, generator=generator).to(dtype)
    results = []
    for each, where in ((PlainStepOps(), "cpu"), (ops, device)):
        tables = [tensor.clone().to(where) for tensor in (kept, rows, torch.ones(SLOTS + 1, dtype=torch.bool))]
        about = [tensor.to(where) for tensor in (slots, firsts, reals, torch.tensor(chosen))]
        there = [source.to(where) for source in sources]
        each.set_aside(tables[0], tables[1], tables[2], about[0], about[1], about[2], about[3], there)
        results.append([table.cpu()[:-1] for table in tables])  # of padding's slot nothing is read
        assert int(tables[1][-1]) == 0
    for wanted, got in zip(*results):
        assert torch.equal(wanted, got)
    assert not torch.equal(results[0][1], rows[:-1]) or (slots < 0).all()
