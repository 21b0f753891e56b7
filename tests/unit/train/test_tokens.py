"""The tokenizer must lose nothing and keep text apart from its special tokens; a token file must know what it
is."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from stridelm.train.corpus import Document
from stridelm.train.tokens import (
    END_OF_TEXT,
    MASK,
    SPECIAL_TOKENS,
    TokenFile,
    encode_documents,
    sample_texts,
    save_tokenizer,
    train_tokenizer,
)

VOCAB = 640
ODD = [
    "",
    " ",
    "\n",
    "\t\t\n \n\n    \n",
    "\r\n\r\n  x\r",
    "   leading and trailing   ",
    "def f(x):\n\tif x:\n\t    return  x   # tabs and spaces\n\n\n",
    "naïve = 'żółć'  # 数学 \U0001f40d e\u0301\u200b\u00a0\ufeff",
    "x=1234567890+0x1F_ff;__init__.__name__==__all__",
    "\x00\x07\x1b[0m\x85\u2028",
    "'m 's \"don't\" f'{self.x!r:>{width}}'",
    f"a {END_OF_TEXT} b {MASK}{SPECIAL_TOKENS[2]}",
]


def corpus() -> list[Document]:
    rng = random.Random(0)
    words = ["self", "value", "return", "count", "index", "name", "result", "config", "option", "model"]
    texts = []
    for number in range(60):
        lines = [f"class C{number}:", "    def __init__(self, value=None):"]
        for _ in range(30):
            a, b, c = rng.choices(words, k=3)
            lines += [f"        self.{a}_{b} = {c}[{rng.randrange(100000)}]", f"        if {a} is not {b}:"]
            lines += [f"            return {a}.{b}({c}, {a}_{c}={rng.randrange(99)})"]
        texts.append("\n".join(lines) + "\n")
    return [Document("p", f"p/{i}.py", text) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return corpus()


@pytest.fixture(scope="module")
def tokenizer(documents: list[Document]) -> Tokenizer:
    return train_tokenizer((d.text for d in documents), VOCAB)


def test_vocabulary_is_exact_and_specials_come_last(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB
    first = VOCAB - len(SPECIAL_TOKENS)
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(first, VOCAB))
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB))


def test_default_ids_are_what_the_builtin_model_expects() -> None:
    # Checkpoints store these ids; moving them would break every saved model.
    assert SPECIAL_TOKENS[:2] == (END_OF_TEXT, MASK)
    assert len(SPECIAL_TOKENS) == 8
    assert 4096 - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(MASK) == 4089


@pytest.mark.parametrize("text", ODD)
def test_roundtrip_is_lossless(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_training_is_deterministic(tokenizer: Tokenizer, documents: list[Document]) -> None:
    assert train_tokenizer([d.text for d in documents], VOCAB).to_str() == tokenizer.to_str()


def test_indentation_and_names_are_single_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("    def __init__(self):\n        return self.value 1234").tokens
    assert "Ġ__init__" in tokens
    assert "ĊĠĠĠĠĠĠĠĠ" in tokens
    assert "return" in tokens
    assert "1234" not in tokens


@pytest.mark.parametrize("text", ODD)
def test_loads_in_transformers(tokenizer: Tokenizer, tmp_path: Path, text: str) -> None:
    save_tokenizer(tokenizer, tmp_path, context=512)
    # Beside a checkpoint there is a config; it must not make transformers substitute its own
    # pre-tokenisation.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert len(loaded) == VOCAB
    assert loaded.model_max_length == 512
    assert loaded.eos_token == loaded.bos_token == loaded.pad_token == END_OF_TEXT
    assert loaded.mask_token_id == tokenizer.token_to_id(MASK)


def test_token_file_holds_every_document(tokenizer: Tokenizer, documents: list[Document], tmp_path: Path) -> None:
    info = encode_documents(tokenizer, documents, tmp_path / "train.bin", progress=False)
    save_tokenizer(tokenizer, tmp_path)
    # What was saved counts as the same tokenizer.
    file = TokenFile(tmp_path / "train.bin", Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    assert file.info == info
    assert len(file) == len(file.tokens) == info.tokens
    assert file.tokens.dtype == np.uint16
    assert not file.tokens.flags.writeable
    assert file.tokens[-1] == info.separator == tokenizer.token_to_id(END_OF_TEXT)
    ends = np.flatnonzero(file.tokens == info.separator)
    assert len(ends) == len(documents)
    starts = [0, *(ends[:-1] + 1)]
    for start, end, document in zip(starts, ends, documents, strict=True):
        assert tokenizer.decode(file.tokens[start:end].tolist()) == document.text
    assert info.bytes == sum(len(d.text.encode()) for d in documents)
    assert file.bytes_per_token == pytest.approx(info.bytes / info.tokens)


def test_text_that_spells_special_tokens_is_ordinary_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = f"x = '{MASK}'  # {END_OF_TEXT}\n"
    info = encode_documents(tokenizer, [Document("p", "p/a.py", text)], tmp_path / "a.bin", progress=False)
    tokens = TokenFile(tmp_path / "a.bin").tokens.tolist()
    first = tokenizer.token_to_id(SPECIAL_TOKENS[0])
    assert all(token < first for token in tokens[:-1])
    assert tokens[-1] == info.separator
    assert tokenizer.decode(tokens[:-1]) == text
    # The setting is the tokenizer's own; encoding a file must not leave it changed.
    assert tokenizer.token_to_id(MASK) in tokenizer.encode(MASK).ids


def test_token_file_rejects_what_does_not_belong_together(
    tokenizer: Tokenizer, documents: list[Document], tmp_path: Path
) -> None:
    path = tmp_path / "t.bin"
    with pytest.raises(ValueError, match="no such file"):
        TokenFile(path)
    encode_documents(tokenizer, documents[:3], path, progress=False)
    other = train_tokenizer((d.text for d in documents), VOCAB - 1)
    with pytest.raises(ValueError, match="another tokenizer"):
        TokenFile(path, other)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="encode it again"):
        TokenFile(path)
    path.with_suffix(".json").write_text("{}")
    with pytest.raises(ValueError, match="does not describe"):
        TokenFile(path)


def test_sample_is_bounded_and_repeatable(documents: list[Document]) -> None:
    texts = sample_texts(documents, 20_000, seed=1)
    assert 0 < sum(len(text.encode()) for text in texts) <= 20_000
    assert texts == sample_texts(documents, 20_000, seed=1) != sample_texts(documents, 20_000, seed=2)


def test_errors_name_the_remedy(tokenizer: Tokenizer, documents: list[Document], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use at least 265"):
        train_tokenizer(["x"], 256)
    with pytest.raises(ValueError, match="give more text or ask for vocab_size="):
        train_tokenizer(["too little text"], 4096)
    with pytest.raises(ValueError, match="give each once"):
        train_tokenizer(["x"], 4096, [MASK, MASK])
    with pytest.raises(ValueError, match="no documents"):
        encode_documents(tokenizer, [], tmp_path / "x.bin")
    with pytest.raises(ValueError, match="another suffix"):
        encode_documents(tokenizer, documents, tmp_path / "x.json")
    plain = train_tokenizer((d.text for d in documents), VOCAB, ["<s>"])
    with pytest.raises(ValueError, match="needs"):
        save_tokenizer(plain, tmp_path)
    with pytest.raises(ValueError, match="has no"):
        encode_documents(plain, documents, tmp_path / "x.bin")
