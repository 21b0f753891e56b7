"""Trees of drafts: skeletons, and the requirements on a drafter."""

from __future__ import annotations

import random

import pytest
import torch

from stridelm.batch import CANDIDATE, PROBE
from stridelm.draft import DRAFTERS
from stridelm.draft.base import Drafter, TargetInfo, TreeShape, chain
from stridelm.draft.mask.tree import verified_parents, verified_rows
from stridelm.options import known
from stridelm.params import Speculation
from stridelm.types import MAX_DRAFT_ROWS
from stridelm.verify import RULES
from support.oracles.attention import random_tree

CPU = torch.device("cpu")
TARGET = TargetInfo(100, 512, 4, (99,), None, CPU)


@pytest.mark.parametrize("width", [0, 1, 9, 63, 64])
def test_tree_shape(width: int) -> None:
    """Depths and ancestor masks follow from the parents; a tree is a chain if its candidates form one."""
    rng = random.Random(width)
    for _ in range(5):
        parents = random_tree(rng, width)
        roles = [CANDIDATE if rng.random() < 0.8 else PROBE for _ in parents]
        shape = TreeShape.of(parents, roles, CPU)
        is_chain = True
        for row in range(width):
            path, at = set(), row
            while at >= 0:
                path.add(at)
                at = parents[at]
            mask = int(shape.ancestors[row]) % 2**64
            assert {bit for bit in range(64) if mask >> bit & 1} == path
            assert int(shape.depths[row]) == len(path)
            is_chain &= roles[row] == PROBE or path == set(range(row + 1))
        assert shape.is_chain == is_chain
        assert shape.max_depth == max((int(d) for d, r in zip(shape.depths, roles) if r == CANDIDATE), default=0)


@pytest.mark.parametrize("parents", [(0,), (-1, 2, 1), (-2,), (-1,) * (MAX_DRAFT_ROWS + 1)])
def test_impossible_trees(parents: tuple[int, ...]) -> None:
    """Children come after their parents, and a bitmask has 64 bits."""
    with pytest.raises(AssertionError):
        TreeShape.of(parents, [CANDIDATE] * len(parents), CPU)


def test_chain() -> None:
    """A chain is a tree whose parents are i - 1."""
    assert chain(5, CANDIDATE, CPU).parents.tolist() == [-1, 0, 1, 2, 3]
    assert chain(64, CANDIDATE, CPU).is_chain and chain(64, PROBE, CPU).max_depth == 0


@pytest.mark.parametrize("depth", range(8))
def test_verified_tree(depth: int) -> None:
    """A chain of `depth` candidates; the last real row and each candidate carry `depth` probes in a chain."""
    parents, roles = verified_parents(depth)
    assert len(parents) == len(roles) == verified_rows(depth)
    assert roles == [CANDIDATE] * depth + [PROBE] * (depth + 1) * depth
    assert TreeShape.of(parents, roles, CPU).is_chain
    for node in range(depth + 1):
        first = depth + node * depth
        assert parents[first : first + depth] == [node - 1, *range(first, first + depth - 1)][:depth]


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_drafters_are_complete(name: str) -> None:
    """A drafter has its registered name, known rules and options, and rows by depth that start at 0 and grow."""
    kind = DRAFTERS.get(name)
    assert issubclass(kind, Drafter) and kind.name == name
    assert kind.rules and all(rule in RULES for rule in kind.rules)
    assert set(DRAFTERS.options(name).names()) <= set(known())
    if kind.why_not(TARGET):
        pytest.skip(f"{name}: {kind.why_not(TARGET)}")
    for rule in kind.rules:
        drafter = kind(TARGET, None)  # type: ignore[arg-type]  # rows_by_depth needs no sampler
        for depth in {0, 1, kind.default_depth}:
            if depth and not kind.default_depth:
                continue
            rows_by_depth = drafter.rows_by_depth(Speculation(name, depth, rule))
            assert len(rows_by_depth) == depth + 1 and rows_by_depth[0] == 0
            assert list(rows_by_depth) == sorted(rows_by_depth) and rows_by_depth[-1] <= MAX_DRAFT_ROWS
            assert depth == 0 or rows_by_depth[-1] >= 1
