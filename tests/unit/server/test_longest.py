"""The maximum number of bytes that one token can stand for: a bound that holds for every text, or none at all."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stridelm.builtin import builtin_path
from stridelm.server.longest import longest_token_bytes
from stridelm.text.tokenizer import Tokenizer

BUILT_IN = Tokenizer.load(builtin_path())
FORM = json.loads(BUILT_IN.hf.backend_tokenizer.to_str())
LSTRIP = [{**FORM["added_tokens"][0], "lstrip": True}]


@given(st.lists(st.one_of(st.text(), st.sampled_from(["    ", "\n\n", "<|endoftext|>", "return self.", "=" * 40]))))
def test_no_text_has_fewer_tokens(parts: list[str]) -> None:
    text = "".join(parts)
    most = longest_token_bytes(BUILT_IN)
    assert most is not None and len(text.encode()) <= most * len(BUILT_IN.encode(text))


@pytest.mark.parametrize(
    ("changed", "factor"),
    [
        ({}, 1),
        ({"normalizer": {"type": "NFC"}}, 4),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, 1),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}}, None),
        ({"normalizer": {"type": "Strip"}}, None),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, None),
        ({"pre_tokenizer": None}, None),
        ({"model": {"type": "WordPiece"}}, None),
        ({"added_tokens": LSTRIP}, None),
    ],
    ids=str,
)
def test_tokenizers_that_may_drop_text(changed: dict[str, Any], factor: int | None) -> None:
    rust = SimpleNamespace(to_str=lambda: json.dumps({**FORM, **changed}))
    hf = SimpleNamespace(backend_tokenizer=rust, get_vocab=BUILT_IN.hf.get_vocab)
    tokenizer: Any = SimpleNamespace(hf=hf)
    base = longest_token_bytes(BUILT_IN)
    assert base is not None
    assert longest_token_bytes(tokenizer) == (None if factor is None else factor * base)
