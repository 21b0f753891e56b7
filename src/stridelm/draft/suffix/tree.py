"""A draft tree grown best first from the states where a text's end has occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import torch

from stridelm.batch import CANDIDATE, Draft
from stridelm.draft.suffix.automaton import END
from stridelm.draft.suffix.texts import Place
from stridelm.upload import upload


@dataclass(slots=True)
class Tree:
    """One request's draft: rows in the order in which they were chosen, so children after their parents."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ancestors: list[int] = field(default_factory=list)
    """Bitmasks as signed 64-bit numbers."""
    score: float = 0.0
    """Expected number of accepted rows: the sum of the rows' estimates."""

    def add(self, token: int, parent: int) -> int:
        row = len(self.tokens)
        own = 1 << row if row < 63 else -1 << 63
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 + (self.depths[parent] if parent >= 0 else 0))
        self.ancestors.append(own | (self.ancestors[parent] if parent >= 0 else 0))
        return row


def grow(places: list[Place], rows: int, depth: int, least: float) -> Tree:
    """The most likely continuations of `places`, best first.

    A row's estimate is the share of the occurrences, among those followed by any token, that continued with the row's
    path: the product of the shares along it. Of equally likely rows the one found first comes first. The tree has at
    most `rows` rows and `depth` levels, and ends where the estimate falls below `least`.
    """
    tree = Tree()
    frontier: list[tuple[int, int, int, int, list[Place]]] = []
    order = 0

    def expand(parent: int, places: list[Place]) -> int:
        """Add the continuations of `places` to the frontier, and return how often there was any."""
        nonlocal order
        followed = 0
        for token, next_places in _followers(places).items():
            count = sum(automaton.count[state] for automaton, state in next_places)
            heappush(frontier, (-count, order, token, parent, next_places))
            order += 1
            followed += count
        return followed

    total = expand(-1, places)
    while frontier and len(tree.tokens) < rows:
        count, _, token, parent, next_places = heappop(frontier)
        if -count < least * total:
            break
        row = tree.add(token, parent)
        tree.score -= count / total
        if tree.depths[row] < depth:
            expand(row, next_places)
    return tree


def _followers(places: list[Place]) -> dict[int, list[Place]]:
    """Token -> the places after it."""
    followers: dict[int, list[Place]] = {}
    for automaton, state in places:
        for token, child in automaton.next[state].items():
            if token != END:
                followers.setdefault(token, []).append((automaton, child))
    return followers


def as_draft(trees: Sequence[Tree], width: int, device: torch.device) -> Draft:
    """The trees as one Draft, sent to the device in one copy. Rows after a tree's end are not valid."""
    rows = np.zeros((5, len(trees), width), dtype=np.int64)
    rows[1], rows[2] = -1, 1
    for i, tree in enumerate(trees):
        size = len(tree.tokens)
        rows[:4, i, :size] = tree.tokens, tree.parents, tree.depths, tree.ancestors
        rows[4, i, :size] = 1
    tokens, parents, depths, ancestors, valid = upload(rows, device).unbind(0)
    return Draft(
        tokens=tokens,
        parents=parents,
        roles=torch.full_like(tokens, CANDIDATE),
        depths=depths,
        ancestors=ancestors,
        valid=valid.bool(),
        candidates=rows[4].astype(bool),
        is_chain=all(tree.parents == list(range(-1, len(tree.tokens) - 1)) for tree in trees),
        max_depth=max((depth for tree in trees for depth in tree.depths), default=0),
    )
