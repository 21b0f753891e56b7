"""The built-in model's tokenizer, and grammars over it."""

from __future__ import annotations

import pytest

from stridelm.builtin import builtin_path
from stridelm.grammar.compiler import Grammars
from stridelm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(builtin_path())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
