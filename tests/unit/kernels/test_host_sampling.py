"""The CPU's sampling kernels give what torch gives, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from stridelm.kernels import mass, philox, plain_logits
from stridelm.kernels.host import philox as host_philox
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_words(dtype: torch.dtype) -> None:
    """All tokens of a vocabulary and chosen ones, for keys and counters of all magnitudes and columns of any stride."""
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF0])
    counters = torch.tensor(
        [[0, 1, 131071, 2**31, 2**32 - 1], [2**32 - 1, 0, 7, 2**31, 1], [3, 2**32 - 1, 0, 1, 2**31]]
    )
    columns = (seeds, counters[0], counters.T.contiguous()[:, 1], counters[2])
    whole, expected = torch.empty(2, 5, 4100, dtype=dtype)
    host_philox.fill(whole, columns)
    philox.fill(expected, columns)
    assert torch.equal(whole, expected)
    if dtype == torch.float32:
        ids = torch.tensor([4099, 0, 3, 1777, 2]).expand(5, 5)
        chosen = torch.empty(5, 5)
        host_philox.fill(chosen, columns, ids)
        assert torch.equal(chosen, whole.gather(1, ids))
        philox.fill(chosen.zero_(), columns, ids)
        assert torch.equal(chosen, whole.gather(1, ids))
