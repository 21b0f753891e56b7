"""Accepted paths through trees of draft rows, and the two ways of moving their KV."""

from __future__ import annotations

import random

import torch

from stridelm.cache.pool import PagePool
from stridelm.kernels.triton_rows import Pools, compact
from stridelm.models.layers.decoder import LayerKV

PAGE_SIZE, LONGEST, WIDTH = 4, 20, 48
"""Of a page, of what is committed before the draft, of the draft."""
PAGES = -(-(LONGEST + WIDTH) // PAGE_SIZE)
"""That a request holds."""


def pool(layout: tuple[LayerKV, ...], requests: int, dtype: torch.dtype, device: str) -> PagePool:
    """Random keys and values."""
    pages = {layer.group: requests * PAGES for layer in layout}
    made = PagePool(layout, pages, PAGE_SIZE, dtype, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    for tensor in (*made.keys, *made.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return made


def moves(seed: int, requests: int, depth: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots from and to which paths of at most `depth` rows are moved; behind each path stand pairs of null slots."""
    rng = random.Random(seed)
    pages = rng.sample(range(1, requests * PAGES + 1), requests * PAGES)
    pairs = []
    for request in range(requests):
        table = pages[request * PAGES : (request + 1) * PAGES]
        base = rng.randrange(LONGEST)
        # Rows of a path have rising numbers. Many begin as the chain does, and overlap what is written.
        path = sorted(rng.sample(range(rng.choice((depth, depth + 3, WIDTH))), rng.randint(0, depth)))
        slots = [table[n // PAGE_SIZE] * PAGE_SIZE + n % PAGE_SIZE for n in range(base, base + WIDTH)]
        pairs += [(slots[row], slots[n]) for n, row in enumerate(path)] + [(0, 0)] * (depth - len(path))
    source, target = torch.tensor(pairs, device=device).unbind(1)
    return source, target


def check_compact(layout: tuple[LayerKV, ...], requests: int, depth: int, dtype: torch.dtype, device: str) -> None:
    """The kernel moves what the pool's own way moves, and nothing else."""
    moved, wanted = (pool(layout, requests, dtype, device) for _ in range(2))
    pools = Pools.of((*moved.keys, *moved.values))
    for seed in range(3):
        source, target = moves(seed, requests, depth, device)
        compact(pools, source, target)
        wanted.compact(layout[0].group, source, target)
        for got, expected in zip((*moved.keys, *moved.values), (*wanted.keys, *wanted.values), strict=True):
            assert torch.equal(got, expected)
