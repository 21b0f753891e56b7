"""A drafter for tests: random trees that know the true continuation, and hide it among wrong guesses.

Shipped drafters make chains. This one makes everything else that a Draft may contain: siblings, side branches that are
accepted, invalid rows in the middle, probes between candidates, up to 64 rows, a new skeleton for every request and
step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from stridelm.batch import CANDIDATE, PROBE, Draft
from stridelm.draft import DRAFTERS
from stridelm.draft.base import Drafter, Group, TreeShape
from stridelm.options import Options
from stridelm.params import Speculation
from stridelm.types import MAX_DRAFT_ROWS, Request

NAME = "random_tree"
ROWS = (0, 1, 5, 17, 40, MAX_DRAFT_ROWS)
"""Rows of a tree at depth 0, 1, ...; the tree may have as many levels as rows."""


@dataclass
class Tree:
    """One request's draft while it is built."""

    parents: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    valid: list[bool] = field(default_factory=list)
    true: list[bool] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def add(self, parent: int, role: int, token: int, valid: bool, true: bool) -> None:
        self.parents.append(parent)
        self.roles.append(role)
        self.tokens.append(token)
        self.valid.append(valid and (parent < 0 or self.valid[parent]))
        self.true.append(true)
        self.depths.append(1 + (self.depths[parent] if parent >= 0 else 0))


class RandomTreeDrafter(Drafter):
    name = NAME
    default_depth = 3
    branches = True
    host_bound = True
    truth: ClassVar[dict[tuple[object, ...], list[int]]] = {}
    """(prompt, seed, sample index) -> the continuation that plain decoding gives."""

    @classmethod
    def teach(cls, prompt: list[int], seed: int | None, sample_index: int, continuation: list[int]) -> None:
        cls.truth[(tuple(prompt), seed, sample_index)] = continuation

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        depth = self.default_depth if speculation.depth is None else speculation.depth
        if depth >= len(ROWS):
            raise ValueError(f"depth {depth} is over {len(ROWS) - 1}")
        return ROWS[: depth + 1]

    def propose(self, group: Group) -> Draft:
        width = max(span.draft for span in group.spans)
        trees = [self._tree(span.request, span.draft) for span in group.spans]
        device = group.slots.device
        shapes = [_shape(tree, width, device) for tree in trees]
        tokens = torch.tensor([tree.tokens + [0] * (width - len(tree.tokens)) for tree in trees], device=device)
        valid = torch.tensor([tree.valid + [False] * (width - len(tree.valid)) for tree in trees], device=device)
        return Draft(
            tokens=tokens,
            parents=torch.stack([s.parents for s in shapes]),
            roles=torch.stack([s.roles for s in shapes]),
            depths=torch.stack([s.depths for s in shapes]),
            ancestors=torch.stack([s.ancestors for s in shapes]),
            valid=valid,
            candidates=np.stack([s.candidates for s in shapes]),
            is_chain=False,
            max_depth=max(s.max_depth for s in shapes),
        )

    def _tree(self, request: Request, rows: int) -> Tree:
        rng = random.Random(repr((request.seed, request.sample_index, request.known, request.prompt_ids[:4])))
        known_future = self.truth.get((tuple(request.prompt_ids), request.seed, request.sample_index), [])
        future = known_future[len(request.output_ids) :]
        tree = Tree()
        reach = rng.choice((0.3, 0.6, 0.9))  # how strongly the tree prefers depth over width
        while len(tree.parents) < rows:
            self._grow(tree, rng, future, reach)
        return tree

    def _grow(self, tree: Tree, rng: random.Random, future: list[int], reach: float) -> None:
        count = len(tree.parents)
        parents = [-1, *(row for row in range(count) if tree.roles[row] == CANDIDATE)]
        on_path = [p for p in parents if p < 0 or tree.true[p]]
        parent = on_path[-1] if rng.random() < reach else rng.choice(parents)
        if rng.random() < 0.1:
            tree.add(parent, PROBE, rng.randrange(self.target.vocab_size), True, False)
            return
        depth = tree.depths[parent] if parent >= 0 else 0
        siblings = {t for t, p, r in zip(tree.tokens, tree.parents, tree.roles) if p == parent and r == CANDIDATE}
        straight_on = (parent < 0 or tree.true[parent]) and depth < len(future)
        if straight_on and future[depth] not in siblings and rng.random() < 0.6:
            tree.add(parent, CANDIDATE, future[depth], rng.random() < 0.95, True)
            return
        wrong = rng.randrange(self.target.vocab_size)
        if wrong in siblings or (straight_on and wrong == future[depth]):
            return
        tree.add(parent, CANDIDATE, wrong, rng.random() < 0.9, False)


def _shape(tree: Tree, width: int, device: torch.device) -> TreeShape:
    """The skeleton padded with invalid rows. TreeShape counts depth over valid and invalid rows alike."""
    padding = width - len(tree.parents)
    return TreeShape.of(tree.parents + [-1] * padding, tree.roles + [PROBE] * padding, device)


@contextmanager
def registered(drafter: type[Drafter] = RandomTreeDrafter, options: type[Options] = Options) -> Iterator[type[Drafter]]:
    """The drafter is registered, with its options, while the context lasts."""
    DRAFTERS.add(drafter.name, drafter, options)
    try:
        yield drafter
    finally:
        DRAFTERS.remove(drafter.name)
        RandomTreeDrafter.truth.clear()
