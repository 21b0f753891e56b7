"""The CPU's sampling kernels give what torch gives, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from stridelm.kernels import mass, plain_logits
from stridelm.kernels.host import truncate
from stridelm.kernels.step_ops import Cut
from stridelm.sample.rows import Rows
from stridelm.sample.sampler import Sampler
from support.checks.draw_kernels import TRUNCATED, History, make_logits, sampler_of, table_of

TOP_P = torch.tensor([1e-6, 0.05, 0.5, 0.9, 0.999, 1 - 2.0**-24])


def logits_of(vocab: int, spread: float, step: float) -> torch.Tensor:
    """Random rows, one for each TOP_P, with a tenth of their tokens at -inf."""
    logits = make_logits(len(TOP_P), vocab, torch.float32, seed=vocab, step=step) * spread
    return logits.masked_fill_(make_logits(len(TOP_P), vocab, torch.float32, seed=1) < -4, -math.inf)


@pytest.mark.parametrize("step", [0.0, 0.5, 100.0], ids=["distinct", "ties", "equal"])
@pytest.mark.parametrize("spread", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("vocab", [1, 7, 1000, 50257])
def test_nucleus_and_cut(vocab: int, spread: float, step: float) -> None:
    logits = logits_of(vocab, spread, step)
    logits[:, 0] = 0.0  # no row of nothing but -inf
    depths = mass.depths(logits)
    bounds = mass.nucleus(depths, TOP_P)
    assert all(map(torch.equal, truncate.nucleus(depths, TOP_P), bounds))
    low = torch.full_like(TOP_P, -math.inf)
    low[::2] = -1.0 * spread
    cut, ours, theirs = Cut(logits.amax(-1), low, *bounds), logits.clone(), logits.clone()
    assert all(map(torch.equal, truncate.keep(ours, cut), plain_logits.keep(theirs, cut)))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fault", [-math.inf, math.inf, math.nan, -math.nan])
def test_rows_that_no_model_should_give(fault: float) -> None:
    """Rows of nothing but -inf, and rows with infinite or undefined logits, draw what they draw in torch, and change
    nothing for the rows beside them."""
    table = table_of(TRUNCATED, 512)
    slots = list(range(len(TRUNCATED))) * 3
    rows = Rows(torch.tensor(slots), torch.arange(len(slots)))
    logits = make_logits(len(slots), 512, torch.float32)
    logits[: len(TRUNCATED)] = fault
    logits[len(TRUNCATED) : 2 * len(TRUNCATED), 100:103] = fault
    plain = sampler_of(table)
    host = Sampler(table, History(plain.history.tokens, plain.history.known))
    assert host.draw(logits, rows, slots).tolist() == plain.draw(logits, rows, slots).tolist()
