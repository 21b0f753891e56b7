"""Random rows of a drafter's own layers without padding, placed by a set of step operations and as padded ones are."""

from __future__ import annotations

import random

import torch

from stridelm.arena import Arena
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.step_ops import StepOps
from stridelm.run.heads import head_layout

SLOTS, PAGES, PAGE_SIZE = 12, 40, 4


def check_place_live(seed: int, ops: StepOps) -> None:
    """The rows that `place` lays out, less its padding; plain operations give the same."""
    rng, plain = random.Random(seed), PlainStepOps()
    bounds = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 6)))
    layout = head_layout(bounds, Arena(torch.device("cpu")))
    tables = {
        group: torch.randint(1, 999, (SLOTS + 1, PAGES), dtype=torch.int32)
        for group in ("main", "other")[: rng.randint(1, 2)]
    }
    slots = torch.tensor([-1 if rng.random() < 0.2 else slot for slot in rng.sample(range(SLOTS), len(bounds))])
    starts = torch.tensor([rng.randint(-3, PAGES * PAGE_SIZE - max(bounds)) for _ in bounds])
    counts = torch.tensor([rng.randint(0, bound) for bound in bounds])
    stays = torch.tensor([rng.random() < 0.7 for _ in bounds]) if rng.random() < 0.7 else None
    of_rows = (layout.firsts_R, layout.span_N, layout.offset_N, max(bounds), PAGE_SIZE)
    storage, own, padded, about, _ = plain.place(slots, starts, counts, stays, tables, *of_rows)
    live = own < 0
    for each in (ops, plain):
        laid, found, sizes, last = each.place_live(slots, starts, counts, stays, tables, PAGE_SIZE)
        wanted = (layout.span_N[live], layout.offset_N[live], storage[live])
        assert torch.equal(laid[:3], torch.stack(wanted))
        assert (laid[3] == -1).all() and not laid[4].any()
        assert all(torch.equal(found[group], padded[group][live]) for group in tables)
        assert sizes.dtype == torch.int32 and torch.equal(sizes[1:].flip(0), about)
        assert torch.equal(sizes[0], (counts.cumsum(0) - counts).to(torch.int32))
        assert torch.equal(last[counts > 0], (counts.cumsum(0) - 1)[counts > 0])
