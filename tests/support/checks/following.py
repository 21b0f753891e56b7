"""How heads follow random steps, and how these are committed, by any operations and with torch."""

from __future__ import annotations

import random

import torch

from stridelm.batch import Verdict
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.step_ops import StepOps

SLOTS, LENGTH = 9, 40


def check_following(seed: int, device: str, ops: StepOps) -> None:
    """Requests with and without rows that wait, some that decide nothing, and padding; heads of any width."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, width = rng.choice((torch.bfloat16, torch.float16, torch.float32, torch.float64)), rng.choice((8, 40, 1100))
    step = rng.randint(1, 6)
    chosen = rng.sample(range(step), rng.randint(1, step))
    slots = torch.tensor([-1 if rng.random() < 0.2 else slot for slot in rng.sample(range(SLOTS), len(chosen))])
    indices, rows = torch.tensor(chosen), rng.randint(1, 300)

    def numbers(*shape: int, most: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator)

    def states(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    lengths = torch.cat((numbers(SLOTS, most=30) + 9, torch.zeros(1, dtype=torch.int64)))
    waiting = torch.cat((numbers(SLOTS, most=4), torch.zeros(1, dtype=torch.int64)))
    # A verdict's numbers lie side by side.
    verdicts, reals = numbers(step, 6, most=4), numbers(step, most=3) + 1
    tokens, decides = numbers(SLOTS + 1, LENGTH, most=99), numbers(step, most=2).bool()
    spans, positions = numbers(rows, most=len(chosen)), numbers(rows, most=LENGTH - 3)
    sources, sourced = [states(20, width) for _ in range(rng.randint(1, 4))], numbers(rows, most=20)
    kept, newest, ready = states(SLOTS + 1, width), states(len(chosen), width), numbers(SLOTS + 1, most=2).bool()
    first, levels = rng.randint(-3, 1), rng.randint(0, 5)

    def results(each: StepOps, where: str) -> list[torch.Tensor]:
        def there(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone().to(where)

        table, flags, of_step = there(kept), there(ready), (there(slots), there(indices))
        behind = each.behind(*of_step, there(reals), there(verdicts)[:, 1], there(waiting), there(lengths))
        ids = each.next_tokens(there(tokens), there(slots), there(spans), there(positions), 2)
        aside = each.side_by_side([there(source) for source in sources], there(sourced))
        each.keep_newest(table, flags, there(slots), there(newest), there(decides), there(indices), behind[1], 3)
        recalled = each.recall(table, flags, there(lengths), there(slots), first, levels)
        known = slots >= 0  # what else padding gets is unspecified
        live = [part.cpu()[..., known] for part in (*behind, recalled[1], recalled[2])]
        return [
            *live,
            ids.cpu()[known[spans]],
            aside.cpu(),
            recalled[0].cpu()[known],
            table.cpu()[:-1],
            flags.cpu()[:-1],
        ]

    for wanted, got in zip(results(PlainStepOps(), "cpu"), results(ops, device), strict=True):
        assert wanted.dtype == got.dtype and torch.equal(wanted, got)


def check_commit(seed: int, device: str, ops: StepOps) -> None:
    """Of drafts from one source and from several, of plain steps, and with padding; verdicts in one tensor, as kernels
    make them, and in several."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    requests, nodes = rng.randint(1, 9), rng.choice((1, 2, 7, 65))
    slots = torch.tensor([-1 if rng.random() < 0.2 else slot for slot in rng.sample(range(SLOTS), requests)])
    numbers, tokens, rest = (
        torch.randint(0, 99, shape, generator=generator) for shape in ((requests, 6), (requests, nodes), (2, requests))
    )
    lengths = torch.cat((torch.randint(0, 99, (SLOTS,), generator=generator), torch.zeros(1, dtype=torch.int64)))
    apart, sources = rng.random() < 0.5, None if rng.random() < 0.5 else rest[1]

    def results(each: StepOps, where: str) -> tuple[torch.Tensor, torch.Tensor]:
        counts, kept, leaf, drafted, accepted, reached = numbers.to(where).unbind(1)
        if apart:
            drafted, reached = drafted.clone(), reached.clone()
        path = tokens[:, 1:].to(where)
        verdict = Verdict(tokens.to(where), counts, path, path, kept, leaf, drafted, accepted, reached)
        grown = lengths.clone().to(where)
        table = each.commit(
            grown, slots.to(where), verdict, rest[0].to(where), None if sources is None else sources.to(where)
        )
        return table.cpu(), grown.cpu()

    for wanted, got in zip(results(PlainStepOps(), "cpu"), results(ops, device), strict=True):
        assert torch.equal(wanted, got)
