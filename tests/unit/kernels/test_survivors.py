"""Noise for the tokens that truncation left, against noise for all of them."""

from __future__ import annotations

import math

import torch

from stridelm.kernels.plain_logits import FEW, _noisy, _noisy_survivors

VOCAB = 512


def test_survivors_are_enough() -> None:
    """Rows with none, one, few and all tokens left, and rows with equal scores, in one call."""
    numbers = torch.Generator().manual_seed(0)
    counts = [0, 1, 2, VOCAB // FEW, VOCAB // FEW + 1, VOCAB, 7, 7]
    scores = torch.randn(len(counts), VOCAB, generator=numbers)
    scores[-2:] = 1.0
    for row, count in zip(scores, counts, strict=True):
        row[torch.randperm(VOCAB, generator=numbers)[count:]] = -math.inf
    keys = torch.randint(0, 2**31, (4, len(counts)), generator=numbers)
    tokens = _noisy_survivors(scores, keys)
    assert tokens.tolist() == _noisy(scores.clone(), keys).tolist()
    assert tokens[0] == 0


def test_equals_go_to_the_lowest() -> None:
    """Noise that is the same for all, as float32 may make it: scores so large that it vanishes in them."""
    scores = torch.full((1, VOCAB), -math.inf)
    scores[0, [400, 17, 300]] = 2.0**60
    assert _noisy_survivors(scores, torch.tensor([[1], [2], [3], [4]])).tolist() == [17]
