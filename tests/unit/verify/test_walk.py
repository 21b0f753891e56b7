"""The exact rule's walk, and the history of its rows, against a plain loop over a plain tree."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from stridelm.batch import CANDIDATE, PROBE, Draft
from stridelm.draft.base import TreeShape
from stridelm.kernels.plain_step import walk_down
from stridelm.verify.paths import candidate_history
from support.oracles.attention import random_tree

VOCAB = 6
CPU = torch.device("cpu")


def random_draft(seed: int, spans: int, width: int) -> Draft:
    """Trees over a small vocabulary, with probes and invalid rows; siblings hold different tokens."""
    rng = random.Random(seed)
    tokens, valid, shapes = [], [], []
    for _ in range(spans):
        parents = list(random_tree(rng, width))
        roles: list[int] = []
        alive: list[bool] = []
        row_tokens: list[int] = []
        for row in range(width):
            probe = parents[row] >= 0 and roles[parents[row]] == PROBE
            roles.append(PROBE if probe or rng.random() < 0.15 else CANDIDATE)
            taken = {row_tokens[other] for other in range(row) if parents[other] == parents[row]}
            free = [token for token in range(VOCAB) if token not in taken]
            row_tokens.append(rng.choice(free or [0]))
            parent_lives = parents[row] < 0 or alive[parents[row]]
            alive.append(bool(free) and parent_lives and rng.random() < 0.9)
        tokens.append(row_tokens)
        valid.append(alive)
        shapes.append(TreeShape.of(parents, roles, CPU))
    draft = shapes[0].draft(torch.tensor(tokens), torch.tensor(valid))
    for name in ("parents", "roles", "depths", "ancestors"):
        setattr(draft, name, torch.stack([getattr(shape, name) for shape in shapes]))
    draft.candidates = np.stack([shape.candidates for shape in shapes])
    draft.is_chain = all(shape.is_chain for shape in shapes)
    draft.max_depth = max(shape.max_depth for shape in shapes)
    return draft


def plain_walk(draft: Draft, span: int, drawn: list[int]) -> tuple[list[int], list[int], int]:
    """(tokens, accepted rows, positions tested) of one span; drawn: token at the root, then at each row."""
    at, tokens, reached = -1, [drawn[0]], 0
    path: list[int] = []
    while True:
        children = [
            row
            for row in range(draft.width)
            if draft.valid[span, row] and draft.roles[span, row] == CANDIDATE and draft.parents[span, row] == at
        ]
        reached += bool(children)
        match = [row for row in children if draft.tokens[span, row] == tokens[-1]]
        if not match:
            return tokens, path, reached
        (at,) = match
        path.append(at)
        tokens.append(drawn[at + 1])


@pytest.mark.parametrize("width", [1, 4, 20, 64])
@pytest.mark.parametrize("seed", range(5))
def test_walk(seed: int, width: int) -> None:
    """Down the tree from the last real row, as long as a child holds the token that was drawn."""
    spans = 40
    draft = random_draft(seed, spans, width)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, VOCAB, (spans, width + 1), generator=generator)
    for span, row in zip(*torch.nonzero(torch.rand(spans, width, generator=generator) < 0.5, as_tuple=True)):
        drawn[span, draft.parents[span, row] + 1] = draft.tokens[span, row]
    nodes = torch.randint(0, 1000, (spans, width + 1), generator=generator)
    decides = torch.rand(spans, generator=generator) < 0.9
    verdict = walk_down(draft, drawn, nodes, decides)
    longest = 0
    for span in range(spans):
        if not decides[span]:
            assert verdict.counts[span] == verdict.kept[span] == verdict.drafted[span] == 0
            continue
        tokens, path, reached = plain_walk(draft, span, drawn[span].tolist())
        count = int(verdict.counts[span])
        assert verdict.tokens[span, :count].tolist() == tokens
        assert verdict.path[span, : verdict.kept[span]].tolist() == path
        assert verdict.rows[span, :count].tolist() == [int(nodes[span, row + 1]) for row in (-1, *path)]
        assert int(verdict.leaf[span]) == (path[-1] if path else -1)
        assert (int(verdict.accepted[span]), int(verdict.reached[span])) == (len(path), reached)
        assert int(verdict.drafted[span]) == int((draft.valid[span] & (draft.roles[span] == CANDIDATE)).sum())
        longest = max(longest, len(path))
    assert longest > 1 or width == 1


@pytest.mark.parametrize("width", [1, 7, 64])
def test_candidate_history(width: int) -> None:
    """A row's history is its candidate ancestors and itself, in order, without siblings and probes."""
    draft = random_draft(width, 10, width)
    places = [
        (span, row) for span in range(10) for row in range(-1, width) if row < 0 or draft.roles[span, row] == CANDIDATE
    ]
    spans, rows = (torch.tensor(column) for column in zip(*places))
    history = candidate_history(draft, spans, rows)
    for (span, row), got in zip(places, history.tolist()):
        path = []
        while row >= 0:
            path.append(int(draft.tokens[span, row]))
            row = int(draft.parents[span, row])
        assert got == path[::-1] + [-1] * (draft.max_depth - len(path))
