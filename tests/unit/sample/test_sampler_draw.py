"""A row's token depends on that row alone, and sampled tokens have the requested distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampling_oracle import History, make_case, naive_token

from stridelm.kernels.plain_logits import confidence
from stridelm.kernels.step_ops import StepOps
from stridelm.params import SamplingParams, Speculation
from stridelm.sample.rows import Rows
from stridelm.sample.sampler import Sampler
from stridelm.sample.table import SamplingTable
from stridelm.types import Request
from support.checks.step_ops import every_set


@pytest.mark.parametrize("step", [None, 0.5])
@pytest.mark.parametrize("seed", range(6))
@every_set
def test_tokens_agree_with_the_slow_way(ops: StepOps, seed: int, step: float | None) -> None:
    case = make_case(100 + seed, step=step)
    tokens = Sampler(case.table, case.history, ops).draw(case.logits, case.rows, case.row_slots)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [naive_token(case, row) for row in range(len(case.row_slots))]


@pytest.mark.parametrize("vocab", [61, 257, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_do_not_depend_on_neighbours(vocab: int, dtype: torch.dtype) -> None:
    case = make_case(7, vocab=vocab)
    logits = case.logits.to(dtype)
    sampler = Sampler(case.table, case.history)
    whole = sampler.draw(logits, case.rows, case.row_slots)
    for row in range(len(case.row_slots)):
        one = case.part([row])
        assert torch.equal(sampler.draw(logits[row : row + 1], one.rows, one.row_slots), whole[row : row + 1])
    index = list(range(1, len(case.row_slots), 2))
    some = case.part(index)
    assert torch.equal(sampler.draw(logits[index], some.rows, some.row_slots), whole[index])


def test_streams_are_the_rows_own() -> None:
    """A row draws with its own stream what it draws alone; rows without noise ignore it."""
    case = make_case(8, vocab=61)
    sampler, streams = Sampler(case.table, case.history), 2**31 + torch.arange(len(case.row_slots))
    whole = sampler.draw(case.logits, case.rows, case.row_slots, streams)
    for row in range(len(case.row_slots)):
        one = case.part([row])
        alone = sampler.draw(one.logits, one.rows, one.row_slots, int(streams[row]))
        assert torch.equal(alone, whole[row : row + 1])
    plain = sampler.draw(case.logits, case.rows, case.row_slots)
    changed = plain != whole
    sampled = case.table.sampled[case.rows.slots]
    assert bool(changed.any()) and not bool((changed & ~sampled).any())


@pytest.mark.parametrize("seed", range(3))
def test_probabilities(seed: int) -> None:
    """For a sampled row the softmax of its processed logits; for a greedy row probability 1 for its token."""
    case = make_case(50 + seed)
    sampler = Sampler(case.table, case.history)
    p = sampler.probabilities(case.logits, case.rows, case.row_slots)
    sampled = case.table.sampled[case.rows.slots]
    assert 0 < int(sampled.sum()) < len(sampled)
    processed = sampler.processed(case.logits, case.rows, case.row_slots)
    assert torch.equal(p[sampled], processed.softmax(-1)[sampled])
    tokens = sampler.draw(case.logits, case.rows, case.row_slots)
    certain = torch.nn.functional.one_hot(tokens, case.logits.shape[1]).float()
    assert torch.equal(p[~sampled], certain[~sampled])
    greedy = [row for row in range(len(sampled)) if not sampled[row]]
    alone = case.part(greedy)
    assert torch.equal(sampler.probabilities(alone.logits, alone.rows, alone.row_slots), p[greedy])


def _sampler(vocab: int, **params: Any) -> Sampler:
    table = SamplingTable(1, vocab)
    table.set(0, Request("r", [0], SamplingParams(**params), Speculation(), seed=-77))
    return Sampler(table, History(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([1])))


@pytest.mark.parametrize(
    ("count", "params"),
    [
        (200_000, {"temperature": 1.0}),
        (200_000, {"temperature": 0.6}),
        (200_000, {"temperature": 1.4, "top_k": 7, "min_p": 0.05}),
        (8_000, {"temperature": 1.4, "top_k": 7, "top_p": 0.9}),
    ],
)
def test_gumbel_max_draws_from_the_softmax(count: int, params: dict[str, Any]) -> None:
    """Chi-square over the positions of one request."""
    vocab = 13
    sampler = _sampler(vocab, **params)
    logits_V = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    call = 2_000
    logits, slots = logits_V.expand(call, vocab), torch.zeros(call, dtype=torch.int64)
    calls = [Rows(slots, first + torch.arange(call)) for first in range(0, count, call)]
    tokens = torch.cat([sampler.draw(logits, rows, [0] * call) for rows in calls])
    one = Rows(slots[:1], slots[:1])
    p = sampler.processed(logits[:1], one, [0])[0].double().softmax(-1)
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert bool((counts[p == 0] == 0).all())
    alive = p > 0
    chi2 = float(((counts - count * p) ** 2 / (count * p))[alive].sum())
    freedom = int(alive.sum()) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_plain_greedy_is_one_argmax_with_ties_to_the_lowest_id() -> None:
    sampler = _sampler(5000, temperature=0.0)
    logits = torch.zeros(3, 5000, dtype=torch.bfloat16)
    logits[0, [4999, 17, 3000]] = 1.0
    logits[1, [4998, 4999]] = 0.5
    rows = Rows(torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    assert sampler.draw(logits, rows, [0, 0, 0]).tolist() == [17, 4998, 0]


def test_seed_sample_index_position_and_stream_each_change_the_draw() -> None:
    vocab, count = 50, 64
    logits = torch.zeros(count, vocab)
    rows = Rows(torch.zeros(count, dtype=torch.int64), torch.arange(count))

    def drawn(seed: int = 1, sample: int = 0, shift: int = 0, stream: int = 0) -> torch.Tensor:
        table = SamplingTable(1, vocab)
        table.set(0, Request("r", [0], SamplingParams(), Speculation(), seed=seed, sample_index=sample))
        sampler = Sampler(table, History(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([1])))
        at = Rows(rows.slots, rows.positions + shift)
        return sampler.draw(logits, at, [0] * count, stream=stream)

    base = drawn()
    assert torch.equal(base, drawn())
    assert torch.equal(base[5:], drawn(shift=5)[:-5])
    others = [drawn(seed=2), drawn(seed=1 + 2**40), drawn(sample=1), drawn(shift=1), drawn(stream=1)]
    assert all(int((base == other).sum()) < 10 for other in others)


def test_a_rewritten_slot_is_noticed() -> None:
    sampler = _sampler(50, temperature=0.0)
    rows, logits = Rows(torch.tensor([0]), torch.tensor([1])), torch.zeros(1, 50)
    assert sampler.draw(logits, rows, [0]).tolist() == [0]
    request = Request("r", [0], SamplingParams(temperature=0.0, logit_bias={9: 1.0}), Speculation())
    sampler.table.set(0, request)
    assert sampler.draw(logits, rows, [0]).tolist() == [9]


def test_confidence_is_the_largest_probability_whatever_the_batch() -> None:
    logits = torch.randn(33, 4099, generator=torch.Generator().manual_seed(1)) * 4
    whole = confidence(logits)
    torch.testing.assert_close(whole, logits.softmax(-1).amax(-1), rtol=1e-5, atol=0)
    for m in (0, 7, 32):
        assert torch.equal(confidence(logits[m : m + 1]), whole[m : m + 1])
    assert confidence(torch.tensor([[5.0]])).tolist() == [1.0]
