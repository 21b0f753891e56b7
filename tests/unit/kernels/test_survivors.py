"""Noise for the tokens that truncation left, against noise for all of them."""

from __future__ import annotations

import math

import pytest
import torch

from stridelm.kernels import plain_logits
from stridelm.kernels.host import truncate
from stridelm.kernels.plain_logits import FEW, Keep, _noisy, _noisy_survivors
from stridelm.kernels.step_ops import Cut

VOCAB = 512

every_keep = pytest.mark.parametrize("keep", [plain_logits.keep, truncate.keep], ids=["plain", "host"])


def nothing_cut(rows: int) -> Cut:
    free, last = torch.full((rows,), math.inf), torch.full((rows,), VOCAB - 1)
    return Cut(torch.zeros(rows), -free, free, last)


@every_keep
def test_survivors_are_enough(keep: Keep) -> None:
    """Rows with none, one, few and all tokens left, and rows with equal scores, in one call."""
    numbers = torch.Generator().manual_seed(0)
    counts = [0, 1, 2, VOCAB // FEW, VOCAB // FEW + 1, VOCAB, 7, 7]
    scores = torch.randn(len(counts), VOCAB, generator=numbers)
    scores[-2:] = 1.0
    for row, count in zip(scores, counts, strict=True):
        row[torch.randperm(VOCAB, generator=numbers)[count:]] = -math.inf
    keys = torch.randint(0, 2**31, (4, len(counts)), generator=numbers)
    left, ids = keep(scores, nothing_cut(len(counts)))
    assert left.tolist() == counts
    tokens = _noisy_survivors(scores, left, ids, keys)
    assert tokens.tolist() == _noisy(scores.clone(), keys).tolist()
    assert tokens[0] == 0


@every_keep
def test_equals_go_to_the_lowest(keep: Keep) -> None:
    """Noise that is the same for all, as float32 may make it: scores so large that it vanishes in them."""
    scores = torch.full((1, VOCAB), -math.inf)
    scores[0, [400, 17, 300]] = 2.0**60
    keys = torch.tensor([[1], [2], [3], [4]])
    assert _noisy_survivors(scores, *keep(scores, nothing_cut(1)), keys).tolist() == [17]
