"""The CPU's compiled look-ups in the tables of running requests give what torch gives."""

from __future__ import annotations

import random

import pytest
import torch

from stridelm.arena import Arena
from stridelm.draft.base import empty_draft
from stridelm.kernels.host.tables import HostTables
from stridelm.kernels.plain_step import PlainStepOps
from support.checks.layout_kernel import check_layout
from support.checks.lookup_kernel import check_lookup
from support.checks.place_live import check_place_live
from support.checks.set_aside import check_set_aside
from support.checks.walk_kernels import SPANS, Tables, agreeable, random_draft, random_nodes

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


def test_place_live() -> None:
    """Requests without rows, without entries, that are padding, and that begin below 0."""
    for seed in range(50):
        check_place_live(seed, OURS)


def test_set_aside() -> None:
    for seed in range(30):
        check_set_aside(seed, "cpu", OURS)
