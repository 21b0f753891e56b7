"""Drafts of several drafters are merged into one."""

from __future__ import annotations

from typing import Any

import torch

from stridelm.draft.base import Group, chain
from stridelm.draft.dispatch import _merge
from stridelm.types import CANDIDATE

CPU = torch.device("cpu")
NOTHING: Any = None


def group(places: list[int]) -> Group:
    return Group((), places, torch.tensor(places), torch.tensor(places), NOTHING)


def test_certain_rows_beside_drawn_ones() -> None:
    """If any part has the distributions of its tokens, the other parts' rows get probability 1 for theirs; if none
    has, the merged draft has none."""
    generator = torch.Generator().manual_seed(0)
    drawn, certain = torch.tensor([[1, 2], [0, 3]]), torch.tensor([[4, 3, 1]])
    probs = torch.rand(2, 2, 5, generator=generator)
    valid = torch.ones(2, 3, dtype=torch.bool)
    parts = [
        (group([3, 0]), chain(2, CANDIDATE, CPU).draft(drawn, valid[:, :2], probs)),
        (group([1]), chain(3, CANDIDATE, CPU).draft(certain, valid[:1])),
    ]
    merged = _merge(4, parts)
    assert merged.probs is not None and merged.probs.shape == (4, 3, 5)
    assert torch.equal(merged.probs[[3, 0], :2], probs)
    assert merged.probs[1].argmax(-1).tolist() == [4, 3, 1] and merged.probs[1].sum() == 3
    assert not merged.probs[2].any() and not merged.probs[:, 2][[0, 3]].any()
    assert _merge(4, parts[1:]).probs is None
