"""Random rows of a drafter's own layers, placed with Triton and with torch."""

from __future__ import annotations

import random

import torch

from stridelm.arena import Arena
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.triton_step import TritonStepOps
from stridelm.run.heads import head_layout

SLOTS, PAGES, PAGE_SIZE = 12, 40, 4


def check_place(seed: int, device: str) -> None:
    """Requests with rows to spare, with none, without entries, that are padding, and that begin below 0."""
    rng = random.Random(seed)
    requests = rng.randint(1, 6)
    even = rng.random() < 0.5
    bounds = (rng.randint(1, 9),) * requests if even else tuple(rng.randint(1, 1100) for _ in range(requests))
    where = torch.device(device)
    layout = head_layout(bounds, Arena(where))
    longest = PAGES * PAGE_SIZE - max(bounds) if even else 1
    pages = PAGES if even else (max(bounds) + PAGE_SIZE) // PAGE_SIZE + 1
    generator = torch.Generator().manual_seed(seed)
    tables = {
        group: torch.randint(1, 999, (SLOTS + 1, pages), generator=generator, dtype=torch.int32).to(where)
        for group in ("main", "other")[: rng.randint(1, 2)]
    }
    slots = torch.tensor([-1 if rng.random() < 0.2 else slot for slot in rng.sample(range(SLOTS), requests)]).to(where)
    starts = torch.tensor([rng.randint(-3, longest) for _ in bounds]).to(where)
    counts = torch.tensor([rng.randint(0, bound) for bound in bounds]).to(where)
    of_some = torch.tensor([[rng.random() < 0.7, False] for _ in bounds]).to(where)
    stays = of_some[:, 0] if rng.random() < 0.7 else None
    of_rows = (layout.firsts_R, layout.span_N, layout.offset_N, max(bounds), PAGE_SIZE)
    arguments = (slots, starts, counts, stays, tables, *of_rows)
    wanted, got = PlainStepOps().place(*arguments), TritonStepOps().place(*arguments)
    assert {group: found.tolist() for group, found in got[2].items()} == {
        group: found.tolist() for group, found in wanted[2].items()
    }
    for ours, theirs in zip((*got[:2], *got[3:]), (*wanted[:2], *wanted[3:])):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
