"""Accepted paths through trees of draft rows, and both implementations that move their KV."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from stridelm.batch import Geometry
from stridelm.cache.layout import LayerStates
from stridelm.cache.pool import PagePool
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.step_ops import StepOps
from stridelm.kernels.triton_step import TritonStepOps

PAGE_SIZE, LONGEST, WIDTH = 4, 20, 48
"""Rows of a page, most rows committed before the draft, rows of the draft."""
PAGES = -(-(LONGEST + WIDTH) // PAGE_SIZE)
"""Pages that a request holds."""


def pool(layout: LayerStates, requests: int, dtype: torch.dtype, device: str, ops: StepOps | None = None) -> PagePool:
    """Random keys and values, moved by torch unless `ops` is given."""
    pages = {layer.group: requests * PAGES for layer in layout}
    made = PagePool(layout, pages, PAGE_SIZE, dtype, torch.device(device), ops or PlainStepOps())
    generator = torch.Generator().manual_seed(0)
    for tensor in made.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return made


def moves(seed: int, requests: int, depth: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and target slots of paths of at most `depth` rows; null slots pad each path to `depth`."""
    rng = random.Random(seed)
    pages = rng.sample(range(1, requests * PAGES + 1), requests * PAGES)
    pairs = []
    for request in range(requests):
        table = pages[request * PAGES : (request + 1) * PAGES]
        base = rng.randrange(LONGEST)
        # Rows of a path ascend. Many paths begin as a chain does, and overlap the rows that they are moved to.
        path = sorted(rng.sample(range(rng.choice((depth, depth + 3, WIDTH))), rng.randint(0, depth)))
        slots = [table[n // PAGE_SIZE] * PAGE_SIZE + n % PAGE_SIZE for n in range(base, base + WIDTH)]
        pairs += [(slots[row], slots[n]) for n, row in enumerate(path)] + [(0, 0)] * (depth - len(path))
    source, target = torch.tensor(pairs, device=device).unbind(1)
    return source, target


def check_compact(layout: LayerStates, requests: int, depth: int, dtype: torch.dtype, device: str) -> None:
    """Triton moves the same rows as torch, and nothing else."""
    moved, wanted = (pool(layout, requests, dtype, device, ops) for ops in (TritonStepOps(), PlainStepOps()))
    for seed in range(3):
        source, target = moves(seed, requests, depth, device)
        moved.compact(layout[0].group, source, target)
        wanted.compact(layout[0].group, source, target)
        for got, expected in zip(moved.tensors, wanted.tensors, strict=True):
            assert torch.equal(got, expected)


class Paths:
    """Verified steps of a few requests with trees of WIDTH rows: each new step reuses the same tensors."""

    def __init__(self, requests: int, groups: Sequence[str], device: str) -> None:
        self.requests = requests
        self._tables = torch.zeros(len(groups), requests, PAGES, dtype=torch.int32, device=device)
        self._starts, self._reals = torch.ones(2, requests, dtype=torch.int32, device=device)
        path = torch.zeros(requests, WIDTH, dtype=torch.int64, device=device)
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self.draft: Any = type("D", (), {"is_chain": False})
        self.verdict: Any = type("V", (), {"path": path, "kept": torch.zeros_like(path[:, 0])})
        geometry = Geometry(
            bounds=(1 + WIDTH,) * requests,
            firsts=self._starts,
            counts=self._starts,
            starts=self._starts,
            reals=self._reals,
            draft_rows=nothing,
            ancestors=nothing,
            positions=nothing,
            tables=dict(zip(groups, self._tables, strict=True)),
            page_size=PAGE_SIZE,
            max_keys=LONGEST + WIDTH,
            is_chain=False,
        )
        self.batch: Any = type("B", (), {"geometry": geometry})

    def draw(self, seed: int) -> None:
        """New page tables, committed lengths, and accepted rows."""
        rng = random.Random(seed)
        for tables in self._tables:
            pages = rng.sample(range(1, self.requests * PAGES + 1), self.requests * PAGES)
            tables.copy_(torch.tensor(pages).view(self.requests, PAGES))
        self._starts.copy_(torch.tensor([rng.randrange(LONGEST) for _ in range(self.requests)]))
        for request, path in enumerate(self.verdict.path):
            path.copy_(torch.tensor([rng.randrange(WIDTH) for _ in range(WIDTH)]))  # garbage after the kept rows
            rows = sorted(rng.sample(range(WIDTH), rng.randint(0, WIDTH)))
            self.verdict.kept[request] = len(rows)
            path[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
