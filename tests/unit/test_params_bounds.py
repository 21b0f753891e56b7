"""The size of a request's parameters is bounded, because requests in the same batch share the cost."""

from __future__ import annotations

from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.draft.options import MAX_LOOKUP
from stridelm.params import (
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_LENGTH,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_STOPS_LENGTH,
)

AT_MOST: dict[str, dict[str, Any]] = {
    "biases": {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0)},
    "stop ids": {"stop_token_ids": list(range(MAX_STOP_TOKEN_IDS))},
    "stops": {"stop": [f"{i:03}" for i in range(MAX_STOPS)]},
    "a long stop": {"stop": "x" * MAX_STOPS_LENGTH},
    "words": {"bad_words": [f"{i:04}" for i in range(MAX_BAD_WORDS)]},
    "a long word": {"bad_words": ["x" * MAX_BAD_WORDS_LENGTH]},
    "words as ids": {"bad_words_token_ids": [[i] for i in range(MAX_BAD_WORDS)]},
    "a long word as ids": {"bad_words_token_ids": [list(range(MAX_BAD_WORDS_LENGTH))]},
    "lookup": {"speculation": {"drafter": "ngram", "prompt_lookup_max": MAX_LOOKUP}},
}


def one_more(value: Any) -> Any:
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, int):
        return value + 1
    if isinstance(value, dict) and "prompt_lookup_max" in value:
        return value | {"prompt_lookup_max": one_more(value["prompt_lookup_max"])}
    if isinstance(value, dict):
        return value | {len(value): 1.0}
    if len(value) == 1:
        return [value[0] + value[0][:1]]
    return [*value, value[0] if isinstance(value[0], int) else value[0][:1] + value[0]]


@pytest.mark.parametrize("what", AT_MOST)
def test_at_the_bound_and_over_it(what: str) -> None:
    """This many are accepted; one more is refused, and the error has the bound."""
    SamplingParams(**AT_MOST[what])
    with pytest.raises(ValueError, match=r"at most \d+ are allowed: leave some out|from 0 to 64"):
        SamplingParams(**{name: one_more(value) for name, value in AT_MOST[what].items()})
