"""Random steps on bounds, laid out by a set of operations and with torch."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from stridelm.arena import Arena
from stridelm.batch import Draft
from stridelm.draft.base import empty_draft
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.step_ops import StepOps
from stridelm.run.batch import row_layout
from stridelm.run.state import TokenTable
from support.checks.walk_kernels import random_draft

SLOTS, LENGTH, PAGE_SIZE = 40, 400, 4


def check_layout(seed: int, width: int, device: str, ops: StepOps) -> None:
    """Prompts, decodes, drafts that are wider than their span's bound, and padding, in one step."""
    rng = random.Random(seed)
    draft = random_draft(rng, width)
    spans = len(draft.tokens) if width else 5
    draft = draft if width else empty_draft(spans, Arena(torch.device("cpu")))
    table = TokenTable(SLOTS, LENGTH, torch.device(device))
    generator = torch.Generator().manual_seed(seed)
    table.tokens.copy_(torch.randint(0, 1000, table.tokens.shape, generator=generator))
    known = torch.randint(1, 300, table.known.shape, generator=generator)
    computed = (known * torch.rand(known.shape, generator=generator)).long()
    known[-1], computed[-1] = 1, 0
    table.known.copy_(known)
    table.committed.copy_(computed)
    pages = torch.randint(1, 1000, (SLOTS + 1, (LENGTH + 128) // PAGE_SIZE), generator=generator, dtype=torch.int32)
    slots = [-1 if rng.random() < 0.2 else slot for slot in rng.sample(range(SLOTS), spans)]
    shape = tuple(
        (
            int(rng.choice((1, min(5, int(known[slot] - computed[slot]) + 2), int(known[slot] - computed[slot])))) or 1,
            rng.randint(0, width),
            rng.random() < 0.8,
        )
        for slot in slots
    )
    layout = row_layout(shape, width, torch.device(device))
    if rng.random() < 0.5:  # replayed with less room than it was captured with
        layout = replace(layout, reals_R=(layout.reals_R // 2).clamp(min=1), drafts_R=layout.drafts_R // 2)
    moved = _moved(draft, device)
    where = torch.tensor(slots, device=device)
    arguments = (
        where,
        table.known,
        table.committed,
        table.tokens,
        pages.to(device),
        layout.firsts_R,
        layout.reals_R,
        layout.drafts_R,
        layout.decides_R,
        layout.span_N,
        layout.offset_N,
        moved,
        max(layout.bounds),
        PAGE_SIZE,
    )
    for ours, theirs in zip(ops.lay_out(*arguments), PlainStepOps().lay_out(*arguments), strict=True):
        assert torch.equal(ours, theirs)


def _moved(draft: Draft, device: str) -> Draft:
    for name in ("tokens", "parents", "roles", "depths", "ancestors", "valid"):
        setattr(draft, name, getattr(draft, name).to(device))
    return draft
