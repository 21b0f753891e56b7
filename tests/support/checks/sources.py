"""Random rows of a drafter's own layers, traced back to the step's rows by any operations and with torch."""

from __future__ import annotations

import random
from typing import Any

import torch

from stridelm.arena import Arena
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.step_ops import StepOps
from stridelm.run.heads import head_layout


def check_sources(seed: int, device: str, ops: StepOps) -> None:
    """Prompts and drafts, tails before the rows, paths of any length, and steps without a draft."""
    rng = random.Random(seed)
    step, width = rng.randint(1, 5), rng.choice((0, 1, 4, 9))
    chosen = sorted(rng.sample(range(step), rng.randint(1, step)))
    reals = [rng.choice((1, 2, 7)) for _ in range(step)]
    bounds = [real + width for real in reals]
    firsts = [sum(bounds[:i]) for i in range(step)]
    tailed = [rng.randint(0, 2) for _ in chosen]
    layout = head_layout(tuple(2 + bounds[i] for i in chosen), Arena(torch.device("cpu")))
    path = torch.tensor([rng.sample(range(width), width) for _ in range(step)], dtype=torch.int64).view(step, width)
    index = torch.arange(step * (width + 1)).view(step, width + 1)
    index = torch.where(torch.rand(index.shape, generator=torch.Generator().manual_seed(seed)) < 0.2, -1, index)
    decisions = torch.tensor([firsts[i] + reals[i] - 1 + node for i in range(step) for node in range(width + 1)])
    tensors = (
        torch.tensor(chosen),
        layout.span_N,
        layout.offset_N,
        torch.tensor(tailed),
        torch.tensor(firsts, dtype=torch.int32),
        torch.tensor(reals),
        path,
        index,
        decisions,
    )
    wanted = PlainStepOps().sources(*tensors, sum(bounds))
    there: list[Any] = [*(tensor.to(device) for tensor in tensors), sum(bounds)]
    got = ops.sources(*there)
    assert torch.equal(got.cpu(), wanted)
