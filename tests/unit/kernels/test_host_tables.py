"""The CPU's compiled look-ups in the tables of running requests give what torch gives."""

from __future__ import annotations

import random

import pytest
import torch

from stridelm.arena import Arena
from stridelm.draft.base import empty_draft
from stridelm.kernels.host.step import HostStepOps
from stridelm.kernels.host.tables import HostTables
from stridelm.kernels.plain_step import PlainStepOps
from support.checks.following import check_following
from support.checks.layout_kernel import check_layout
from support.checks.lookup_kernel import check_lookup
from support.checks.place_live import check_place_live
from support.checks.set_aside import check_set_aside
from support.checks.sources import check_sources
from support.checks.walk_kernels import SPANS, Tables, agreeable, check_follow, random_draft, random_nodes

OURS, PLAIN = HostTables(), PlainStepOps()


@pytest.mark.parametrize("width", [0, 1, 5, 64])
def test_layout(width: int) -> None:
    for seed in range(8):
        check_layout(seed, width, "cpu", OURS)


@pytest.mark.parametrize("longest_text", [3, 60, 900])
def test_lookup(longest_text: int) -> None:
    for seed in range(30):
        check_lookup(seed, "cpu", OURS, longest_text)


@pytest.mark.parametrize("width", [0, 1, 2, 7, 20, 63, 64])
def test_walk(width: int) -> None:
    """Down any tree, with siblings, probes and invalid rows, like the rule's own walk."""
    longest = 0
    for seed in range(3):
        rng = random.Random(100 * width + seed)
        tables = Tables(rng)
        draft = random_draft(rng, width) if width else empty_draft(SPANS, Arena(torch.device("cpu")))
        drawn, nodes = agreeable(rng, draft), random_nodes(rng, width)
        verdict = OURS.walk(draft, drawn, nodes, *tables.arguments())
        tables.check(verdict, PLAIN.walk(draft, drawn, nodes, *tables.twins()))
        longest = max(longest, int(verdict.kept.max()))
    assert longest >= min(width, 3)


@pytest.mark.parametrize("width", [1, 2, 7, 20, 64])
def test_follow(width: int) -> None:
    check_follow(width, "cpu", OURS, 5)


def test_place_live() -> None:
    """Requests without rows, without entries, that are padding, and that begin below 0."""
    for seed in range(50):
        check_place_live(seed, OURS)


def test_sources() -> None:
    for seed in range(50):
        check_sources(seed, "cpu", OURS)


def test_following() -> None:
    for seed in range(30):
        check_following(seed, "cpu", HostStepOps())


def test_set_aside() -> None:
    for seed in range(30):
        check_set_aside(seed, "cpu", OURS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_keep_leaves(dtype: torch.dtype) -> None:
    """Of drafts and of plain steps, with requests that decide nothing and padding."""
    for seed in range(30):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        step, nodes, width = rng.randint(1, 6), rng.randint(1, 5), 24
        chosen = torch.tensor(rng.sample(range(step), rng.randint(1, step)))
        slots = torch.tensor([-1 if rng.random() < 0.2 else slot for slot in rng.sample(range(9), len(chosen))])
        leaf = torch.tensor([rng.randrange(-1, nodes - 1) for _ in range(step)])
        decides = torch.rand(step, 1, generator=generator) < 0.8
        index = torch.where(decides, torch.arange(step * nodes).view(step, nodes), -1)
        decisions = torch.randint(0, 40, (step * nodes,), generator=generator)
        source = torch.randn(40, width, generator=generator).to(dtype)
        results = []
        for ops in (OURS, PLAIN):
            kept, ready = torch.zeros(10, width, dtype=dtype), torch.zeros(10, dtype=torch.bool)
            ops.keep_leaves(kept, ready, slots, chosen, leaf, index, decisions, source)
            results.append((kept[:-1], ready[:-1]))  # of padding's slot nothing is read
        assert all(map(torch.equal, *results))
        assert results[0][1].sum() == (slots >= 0).sum()
