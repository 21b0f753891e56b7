"""Logits of the tokens of a row's best centroids, from their definition in float64, for the tests of every kernel
set."""

from __future__ import annotations

import torch

from stridelm.kernels.ops import Ops
from support.checks.linear import check_row_bits
from support.checks.row_ops import CLOSE, noise

SIZES = [(16, 48, 12, 3), (64, 640, 10, 10), (300, 370, 37, 1), (24, 4224, 32, 5)]
"""(hidden width, tokens, centroids, how many are chosen): all of them, one, widths of several blocks, and logits that
several programs fill."""


def check_part_logits(ops: Ops, rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    """sizes: as in SIZES. Few different scores, so that most rows choose among equal ones."""
    width, vocab_size, count, best = sizes
    x = noise(1, rows, width, dtype=dtype, device=device)
    weight = noise(2, vocab_size, width, dtype=dtype, device=device)
    numbers = torch.Generator().manual_seed(3)
    scores = (torch.randint(-2, 3, (rows, count), generator=numbers).double() / 2).to(dtype).to(device)
    scores[0] *= -0.0  # zeros of both signs are equal
    scores[1, count // 2] = float("nan")
    scores[2] = float("-inf")
    ids = torch.randperm(vocab_size, generator=numbers).view(count, -1).to(device)
    got = ops.part_logits(x, scores, weight, ids, best)
    assert got.dtype == dtype and got.shape == (rows, vocab_size)
    for row in range(rows):
        order = sorted(range(count), key=lambda c: (not scores[row, c].isnan(), -float(scores[row, c]), c))
        chosen = ids[order[:best]].flatten()
        others = torch.ones(vocab_size, dtype=torch.bool, device=device).index_fill(0, chosen, False)
        assert bool((got[row, others] == float("-inf")).all())
        wanted = weight[chosen].double() @ x[row].double()
        close = CLOSE[dtype] * max(1.0, float(wanted.abs().max()) / 4)
        assert float((got[row, chosen].double() - wanted).abs().max()) <= close
    together = torch.cat((x, scores), dim=1)
    check_row_bits(
        lambda part: ops.part_logits(part[:, :width], part[:, width:], weight, ids, best), together, counts=(1, 2, rows)
    )
    assert ops.part_logits(x[:0], scores[:0], weight, ids, best).shape == (0, vocab_size)
