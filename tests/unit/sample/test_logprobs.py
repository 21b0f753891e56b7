"""Raw log-probabilities: the numbers, the ranks, the order of ties, and vLLM's format."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch

from stridelm.sample.logprobs import BLOCK, ROWS_AT_ONCE, RawLogprobs, as_dicts, raw_logprobs, top_tokens
from stridelm.types import Logprob


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_and_ranks_agree_with_the_slow_way(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(20, 1001, generator=generator) * 4).to(dtype)
    tokens = torch.randint(1001, (20,), generator=generator)
    chosen = torch.randint(1001, (20, 4), generator=generator)
    raw = raw_logprobs(logits, tokens, top=5, chosen_MK=chosen)
    expected = logits.double().log_softmax(-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    for m, token in enumerate(tokens.tolist()):
        assert float(raw.logprobs[m]) == pytest.approx(float(expected[m, token]), abs=3e-6)
        assert int(raw.ranks[m]) == 1 + order[m].tolist().index(token)
        assert raw.top_ids[m].tolist() == order[m, :5].tolist()
        torch.testing.assert_close(raw.top_logprobs[m].double(), expected[m, order[m, :5]], rtol=1e-5, atol=3e-6)
        torch.testing.assert_close(raw.chosen_logprobs[m].double(), expected[m, chosen[m]], rtol=1e-5, atol=3e-6)


def test_equals_come_lowest_id_first() -> None:
    row = torch.full((50_000,), -1.0)
    row[[49_999, 31, 7_000]] = 2.0
    row[[40, 30_000]] = 0.0
    row[12] = -0.0
    row[13] = -math.inf
    assert top_tokens(row[None], 7).tolist() == [[31, 7_000, 49_999, 12, 40, 30_000, 0]]
    assert top_tokens(torch.full((1, 5), -math.inf), 5).tolist() == [[0, 1, 2, 3, 4]]
    assert top_tokens(row[None], 0).shape == (1, 0)


@pytest.mark.parametrize("vocab", [4 * BLOCK, 20 * BLOCK, 20 * BLOCK + 1, 21 * BLOCK - 1])
def test_most_likely_of_many_equals(vocab: int) -> None:
    """As a stable sort has them, whichever blocks of the vocabulary they lie in."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 4, (6, vocab), generator=generator) / 2.0
    logits[1] = torch.randn(vocab, generator=generator)
    logits[2, : vocab - 3] = -math.inf
    logits[3] = -math.inf
    for count in (1, 2, 7, 20):
        for dtype in (torch.float32, torch.bfloat16):
            rows = logits.to(dtype)
            expected = rows.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]
            assert torch.equal(top_tokens(rows, count), expected)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    logits = torch.randn(17, 4099, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(17) * 200
    whole = raw_logprobs(logits, tokens, top=3)
    for m in (0, 5, 16):
        one = raw_logprobs(logits[m : m + 1], tokens[m : m + 1], top=3)
        assert torch.equal(one.logprobs, whole.logprobs[m : m + 1])
        assert torch.equal(one.top_logprobs, whole.top_logprobs[m : m + 1])


def test_many_rows_are_reported_in_pieces() -> None:
    """Each row as it is by itself, the last of an uneven number included."""
    rows = 2 * ROWS_AT_ONCE + 7
    logits, tokens, chosen = torch.randn(rows, 50), torch.randint(50, (rows,)), torch.randint(50, (rows, 3))
    whole = raw_logprobs(logits, tokens, 4, chosen)
    for row in (0, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, rows - 1):
        alone = raw_logprobs(logits[row : row + 1], tokens[row : row + 1], 4, chosen[row : row + 1])
        for each in fields(RawLogprobs):
            assert torch.equal(getattr(whole, each.name)[row : row + 1], getattr(alone, each.name))


def test_dictionaries_have_the_token_first_and_each_row_its_own_count() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 3)
    rows = as_dicts(raw_logprobs(logits, torch.tensor([0, 2, 1]), top=2), counts=[2, 1, 0])
    assert [list(row) for row in rows] == [[0, 1, 2], [2, 1], [1]]
    assert [entry.rank for entry in rows[0].values()] == [4, 1, 2]
    assert [entry.rank for entry in rows[1].values()] == [2, 1]
    lse = math.log(sum(math.exp(x) for x in range(4)))
    near: Any = pytest.approx(3 - lse, abs=1e-6)
    assert rows[2] == {1: Logprob(near, 1)}
    assert [list(row) for row in as_dicts(raw_logprobs(logits, torch.tensor([0, 2, 1])))] == [[0], [2], [1]]
    assert [len(row) for row in as_dicts(raw_logprobs(logits, torch.tensor([0, 2, 1]), top=9))] == [4, 4, 4]


def test_chosen_tokens_stand_last_and_have_no_rank_of_their_own() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 3)
    raw = raw_logprobs(logits, torch.tensor([0, 2, 1]), top=1, chosen_MK=torch.tensor([[3, 1], [3, 0], [0, 0]]))
    rows = as_dicts(raw, chosen=[2, 1, 0])
    assert [list(row) for row in rows] == [[0, 1, 3], [2, 1, 3], [1]]
    assert [entry.rank for entry in rows[0].values()] == [4, 1, None]
    assert rows[0][3].logprob == rows[1][3].logprob
