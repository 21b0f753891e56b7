"""Every edit and every truncation, at every row with that row's own history, agrees with the slow reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sampling_oracle import History, make_case, naive_row

from stridelm.kernels.mass import FAR, UNIT, depths, masses, nucleus
from stridelm.kernels.step_ops import StepOps
from stridelm.params import SamplingParams, Speculation
from stridelm.sample.rows import Rows, check_rows
from stridelm.sample.sampler import Sampler
from stridelm.sample.table import Feature, SamplingTable
from stridelm.types import Request
from support.checks.step_ops import every_set


@pytest.mark.parametrize("step", [None, 0.5])
@pytest.mark.parametrize("seed", range(12))
@every_set
def test_processed_logits_agree_with_the_slow_way(ops: StepOps, seed: int, step: float | None) -> None:
    case = make_case(seed, step=step)
    check_rows(case.rows, case.history)
    before = case.logits.clone()
    processed = Sampler(case.table, case.history, ops).processed(case.logits, case.rows, case.row_slots).numpy()
    assert torch.equal(case.logits, before)
    for row in range(len(case.row_slots)):
        expected = naive_row(case, row)
        params = case.requests[case.row_slots[row]].params
        assert np.array_equal(np.isinf(processed[row]), np.isinf(expected)), params
        np.testing.assert_allclose(processed[row], expected, rtol=2e-6, atol=2e-6)


def test_the_cases_hold_every_feature() -> None:
    """Guards the test above: each feature occurs, in rows with and without extra tokens. Grammars, which need a
    tokenizer, have tests of their own."""
    seen = Feature(0)
    for seed in range(12):
        case = make_case(seed)
        for slot in case.row_slots:
            seen |= case.table.features(slot)
        assert {bool(extra) for extra in case.extras} == {True, False}
    assert all(feature in seen for feature in Feature if feature is not Feature.GRAMMAR)


@pytest.mark.parametrize("seed", range(4))
def test_rows_do_not_depend_on_their_neighbours(seed: int) -> None:
    case = make_case(seed, vocab=257)
    whole = Sampler(case.table, case.history).processed(case.logits, case.rows, case.row_slots)
    count = len(case.row_slots)
    for index in ([0], [count - 1], list(range(0, count, 3)), list(range(count - 1, 5, -1))):
        few = case.part(index)
        got = Sampler(case.table, case.history).processed(few.logits, few.rows, few.row_slots)
        assert torch.equal(got, whole[index])


def _world(prompt: list[int], output: list[int], vocab: int = 8, **params: Any) -> tuple[Sampler, Rows]:
    bad_words = params.pop("bad_words_token_ids", ())
    request = Request("r", prompt, SamplingParams(**params), Speculation(), output_ids=output)
    table = SamplingTable(1, vocab)
    table.set(0, request, stop_ids=[2, 5], bad_words=bad_words)
    history = History(torch.tensor([prompt + output + [0] * 4]), torch.tensor([len(prompt + output)]))
    return Sampler(table, history), Rows(torch.tensor([0]), history.known.clone())


def test_each_extra_token_counts_once_and_only_for_its_row() -> None:
    sampler, rows = _world([1], [3, 3], temperature=0.0, frequency_penalty=1.0)
    tree = Rows(
        slots=torch.tensor([0, 0, 0]),
        positions=rows.positions + torch.tensor([0, 1, 2]),
        extra=torch.tensor([[-1, -1], [3, -1], [4, 3]]),
    )
    got = sampler.processed(torch.zeros(3, 8), tree, [0, 0, 0])
    assert got[:, 3].tolist() == [-2, -3, -3]
    assert got[:, 4].tolist() == [0, 0, -1]
    assert got[:, 1].tolist() == [0, 0, 0]  # the prompt is not output
    assert got[:, 0].tolist() == [0, 0, 0]  # neither padding nor what follows the known tokens counts


def test_a_bad_word_is_matched_within_the_output_only() -> None:
    sampler, rows = _world([6, 7], [1], temperature=0.0, bad_words_token_ids=[[7, 1, 4], [1, 5], [3]])
    got = sampler.processed(torch.zeros(1, 8), rows, [0])
    assert got[0].isinf().nonzero().flatten().tolist() == [3, 5]


def test_a_bad_word_is_matched_across_known_and_extra_tokens() -> None:
    sampler, rows = _world([6], [7, 1], temperature=0.0, bad_words_token_ids=[[7, 1, 2, 4]])
    ahead = Rows(rows.slots, rows.positions + 1, torch.tensor([[2, -1, -1]]))
    assert sampler.processed(torch.zeros(1, 8), ahead, [0])[0, 4] == -math.inf
    assert not bool(sampler.processed(torch.zeros(1, 8), rows, [0]).isinf().any())


def test_stop_ids_are_forbidden_until_the_minimum_is_reached() -> None:
    sampler, rows = _world([1, 1], [3], temperature=0.0, min_tokens=3)
    extra = torch.tensor([[4, 4]])
    for ahead, forbidden in ((0, True), (1, True), (2, False)):
        at = Rows(rows.slots, rows.positions + ahead, extra.where(torch.arange(2) < ahead, -1))
        got = sampler.processed(torch.zeros(1, 8), at, [0])
        assert got[0].isinf().tolist() == [i in (2, 5) and forbidden for i in range(8)]


def test_top_k_keeps_ties_and_top_p_takes_the_lowest_ids_of_them() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]])
    sampler, rows = _world([1], [], top_k=2)
    assert sampler.processed(logits, rows, [0]).isfinite().nonzero()[:, 1].tolist() == [1, 2, 3, 4]
    sampler, rows = _world([1], [], top_k=2, top_p=0.6)  # e / (e + 3) = 0.475, then 0.175 each
    assert sampler.processed(logits, rows, [0]).isfinite().nonzero()[:, 1].tolist() == [1, 2]


def test_a_row_with_everything_forbidden_draws_token_zero() -> None:
    everything = [[token] for token in range(8)]
    full: dict[str, Any] = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1.0}
    for params in ({"temperature": 0.0}, full):
        sampler, rows = _world([1], [3], bad_words_token_ids=everything, **params)
        assert sampler.draw(torch.randn(1, 8), rows, [0]).tolist() == [0]


@pytest.mark.parametrize("vocab", [3, 1000, 40000])
def test_the_nucleus_is_what_a_stable_sort_would_keep(vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[3:] = (logits[3:] * 2).round() / 2
    top_p = torch.tensor([0.02, 0.5, 0.95, 0.02, 0.6, 0.999])
    depth, (edge, last) = depths(logits), nucleus(depths(logits), top_p)
    kept = (depth < edge[:, None]) | ((depth == edge[:, None]) & (torch.arange(vocab) <= last[:, None]))
    p = torch.softmax(logits.double(), -1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    sorted_p = p.gather(1, order)
    expected = torch.zeros_like(kept).scatter_(1, order, sorted_p.cumsum(-1) - sorted_p < top_p.double()[:, None])
    assert torch.equal(kept, expected)


def test_masses_are_exponentials_at_any_depth() -> None:
    """Also where exp would give subnormal numbers, or 0."""
    depth = torch.tensor([0.0, 1.0, 20.0, 27.5, 28.0, FAR, FAR + 1, 88.0, 104.0, math.inf])
    expected = torch.exp(-depth.double()) * UNIT
    torch.testing.assert_close(masses(depth).double(), expected, rtol=1e-6, atol=1.0)
    assert not masses(depth)[4:].any()


def test_rows_that_contradict_their_history_are_noticed() -> None:
    case = make_case(0)
    good = case.rows
    assert good.extra is not None
    off_by_one = Rows(good.slots, good.positions + 1, good.extra, good.longest)
    front_padded = Rows(good.slots, good.positions, good.extra.flip(1), good.longest)
    too_short = Rows(good.slots, good.positions, good.extra, 1)
    for bad in (off_by_one, front_padded, too_short):
        with pytest.raises(AssertionError):
            check_rows(bad, case.history)
