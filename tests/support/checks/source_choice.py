"""Random tables of what two sources of drafts proposed, chosen from and learnt from with one set of step operations and
with torch."""

from __future__ import annotations

import random
from dataclasses import fields

import torch

from stridelm.kernels.plain_sources import MOST_CHECKS, SourceTables
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.step_ops import StepOps

SLOTS, WIDTH, CLASSES, DEPTHS = 9, 5, 4, 3
CLASS_OF_LENGTH = (1, 1, 1, 2, 3)


def random_tables(rng: random.Random, wide: int = WIDTH) -> SourceTables:
    """wide: rows of a draft at most. The last slot is padding's. Some counts are about to be halved."""
    torch.manual_seed(rng.randrange(1 << 30))
    checked = torch.randint(0, 50, (CLASSES, DEPTHS)) + MOST_CHECKS * (torch.rand(CLASSES, DEPTHS) < 0.2)
    right = (checked * torch.rand(CLASSES, DEPTHS)).to(torch.int64)
    return SourceTables(
        guesses_S2W=torch.randint(0, 2, (SLOTS, 2, wide)),
        levels_S2=torch.randint(0, WIDTH + 1, (SLOTS, 2)),
        classes_S2=torch.stack((torch.zeros(SLOTS, dtype=torch.int64), torch.randint(1, CLASSES, (SLOTS,))), 1),
        luck_S22=4 * torch.rand(SLOTS, 2, 2),
        shares_S=torch.rand(SLOTS) < 0.7,
        counts_CD2=torch.stack((right, checked), 2),
        given_CD=torch.rand(CLASSES, DEPTHS),
    )


def copied(tables: SourceTables, device: str) -> SourceTables:
    return SourceTables(*(getattr(tables, own.name).clone().to(device) for own in fields(tables)))


def check_source_choice(seed: int, device: str, ops: StepOps) -> int:
    """A step's choice, and what is learnt from it. Returns how many requests were chosen to be looked up for."""
    rng = random.Random(seed)
    tables = random_tables(rng)
    ours, count, width = copied(tables, device), rng.randint(1, SLOTS - 1), rng.randint(1, WIDTH)
    slots = torch.tensor(rng.sample(range(SLOTS - 1), count))
    slots[rng.randrange(count)] = rng.choice((-1, int(slots[0]))) if count == 1 else -1
    exists = torch.arange(width) < torch.randint(0, width + 1, (count, 1))
    found = (
        slots,
        torch.randint(0, width + 1, (count,)),
        rng.randint(0, width),
        torch.randint(0, 3, (count, width)),
        exists,
        torch.randint(0, 7, (count,)),
        torch.tensor(CLASS_OF_LENGTH),
    )
    wanted = PlainStepOps().choose_sources(tables, *found)
    moved = [each.to(device) if isinstance(each, torch.Tensor) else each for each in found]
    chosen = ops.choose_sources(ours, *moved).cpu()  # type: ignore[arg-type]
    live = slots >= 0
    assert chosen.dtype == torch.bool and chosen[live].equal(wanted[live])
    _compare(ours, tables)
    guesses = rng.randint(0, WIDTH)
    for each in (tables, ours):  # as a drafter notes its guesses
        each.levels_S2[slots.to(each.levels_S2.device), 0] = guesses
    emitted, counts = torch.randint(0, 2, (count, width + 1)), torch.randint(0, width + 2, (count,))
    PlainStepOps().learn_sources(tables, slots, emitted, counts)
    ops.learn_sources(ours, slots.to(device), emitted.to(device), counts.to(device))
    _compare(ours, tables)
    return int(wanted[live].sum())


def _compare(ours: SourceTables, theirs: SourceTables) -> None:
    """All but padding's row."""
    for own in fields(SourceTables):
        mine, wanted = getattr(ours, own.name).cpu(), getattr(theirs, own.name)
        if own.name not in ("counts_CD2", "given_CD"):
            mine, wanted = mine[:-1], wanted[:-1]
        assert mine.allclose(wanted, rtol=1e-5) if wanted.is_floating_point() else mine.equal(wanted), own.name
