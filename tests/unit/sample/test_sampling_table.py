"""The table holds each request's parameters, and the host knows which operations they need."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stridelm.params import SamplingParams, Speculation
from stridelm.sample.table import Feature, SamplingTable, check_token_ids
from stridelm.types import Request


def _request(prompt: int = 3, seed: int = 0, **params: Any) -> Request:
    return Request("r", list(range(prompt)), SamplingParams(**params), Speculation(), seed=seed)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.0}, Feature(0)),
        ({"temperature": 9e-6, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, Feature(0)),
        ({"temperature": 1e-5}, Feature.SAMPLED),
        ({"top_k": -1}, Feature.SAMPLED),
        ({"top_k": 100}, Feature.SAMPLED),
        ({"top_k": 99}, Feature.SAMPLED | Feature.TOP_K),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, Feature.SAMPLED | Feature.TRUNCATED),
        ({"temperature": 0.0, "frequency_penalty": -0.1}, Feature.PENALTIES),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, Feature.BIAS),
        ({"temperature": 0.0, "min_tokens": 2}, Feature.MIN_TOKENS),
    ],
)
def test_features_name_the_work_and_nothing_else(params: dict[str, Any], expected: Feature) -> None:
    table = SamplingTable(2, 100)
    table.set(1, _request(**params), stop_ids=[7])
    assert table.features(1) == expected
    assert table.features(0) == Feature(0)


def test_minimum_tokens_without_a_stop_id_is_no_work() -> None:
    table = SamplingTable(1, 100)
    table.set(0, _request(temperature=0.0, min_tokens=2))
    assert table.features(0) == Feature(0)


def test_a_slot_forgets_its_last_request() -> None:
    table = SamplingTable(1, 100)
    table.set(0, _request(top_k=3, min_tokens=2, logit_bias={1: 1.0}), [7], [[1, 2]])
    table.set(0, _request(temperature=0.0))
    assert table.features(0) == Feature(0)


def test_lists_grow_and_keep_what_they_hold() -> None:
    table = SamplingTable(3, 100)
    table.set(0, _request(min_tokens=1, logit_bias={4: -1.0}), [9], [[5]])
    table.set(
        2,
        _request(min_tokens=1, logit_bias={i: float(i) for i in range(5)}),
        [1, 2, 3, 400],
        [[6], [1, 2, 3, 4], [8, 9]],
    )
    assert [i for i in table.stop_ids[0].tolist() if i >= 0] == [9]
    assert [i for i in table.stop_ids[2].tolist() if i >= 0] == [1, 2, 3]  # 400 can never be drawn
    assert float(table.bias[0][table.bias_ids[0] == 4].sum()) == -1.0
    assert float(table.bias[0].sum()) == -1.0
    assert table.bias[2].sum() == 10.0
    assert table.bad_tokens[0].tolist()[:2] == [5, 0] and table.bad_ends[0].tolist()[:2] == [1, 0]
    assert table.bad_tokens[2].tolist()[:7] == [6, 1, 2, 3, 4, 8, 9]
    assert table.bad_ends[2].tolist()[:4] == [1, 5, 7, 0]


def test_a_long_bad_word_costs_its_own_length() -> None:
    """The memory for a slot's words is that of their tokens, not the number of words times the longest."""
    table = SamplingTable(4, 100)
    table.set(1, _request(), (), [[3]] * 2000 + [[5] * 2000])
    assert table.bad_tokens.numel() + table.bad_ends.numel() < 5 * 2 * 4096


def test_a_list_that_grows_is_counted() -> None:
    """The generation tells holders of a list that it was reallocated; while there is room it stays the same tensor."""
    table = SamplingTable(2, 100)

    def lists() -> tuple[torch.Tensor, ...]:
        return table.stop_ids, table.bias_ids, table.bias, table.bad_tokens, table.bad_ends

    rng = random.Random(0)
    grown = 0
    for turn in range(60):
        most = 1 + turn // 3
        bias = dict.fromkeys(range(rng.randrange(most)), 1.0)
        words = [[1] * rng.randint(1, most) for _ in range(rng.randrange(most))]
        held, counted = lists(), table.generation
        table.set(turn % 2, _request(min_tokens=1, logit_bias=bias), list(range(rng.randrange(most))), words)
        same = all(ours is theirs for ours, theirs in zip(lists(), held))
        assert same == (table.generation == counted)
        grown += not same
    assert 2 < grown < 15


def test_the_device_knows_the_features() -> None:
    """Of the slot's own request, and nothing of its previous one or of no request."""
    table = SamplingTable(2, 100)
    table.set(1, _request(min_tokens=1, logit_bias={4: 1.0}, presence_penalty=0.1), [9], [[5]])
    with table.assuming(Feature.ALL):
        assert table.features(-1) == Feature.ALL
        assert table.needs.tolist() == [0, Feature.LISTED | Feature.PENALTIES | Feature.SAMPLED, 0]
    assert not table.features(-1)
    table.set(1, _request(temperature=0.0))
    assert table.needs.tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_a_seed_keeps_its_64_bits(seed: int) -> None:
    table = SamplingTable(1, 10)
    table.set(0, _request(seed=seed))
    assert int(table.seed[0]) % 2**64 == seed % 2**64


def test_ids_outside_the_vocabulary_are_refused_with_a_remedy() -> None:
    check_token_ids(SamplingParams(logit_bias={9: 1.0}), 10, [[9]])
    with pytest.raises(ValueError, match=r"logit_bias names ids \[10\].*remove"):
        check_token_ids(SamplingParams(logit_bias={10: 1.0}), 10)
    with pytest.raises(ValueError, match="bad_words"):
        check_token_ids(SamplingParams(), 10, [[3, -1]])
