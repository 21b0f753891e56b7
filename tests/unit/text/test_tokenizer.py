"""The engine follows the tokenizer files, and errors name what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stridelm.text.tokenizer import READ_BY, VOCABULARY_FILES, Tokenizer, checkpoint_eos_ids

TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools {% endif %}"
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|im_start|>{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


@pytest.fixture
def checkpoint(tmp_path: Path, byte_level: Tokenizer) -> Path:
    byte_level.hf.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 9}))
    return tmp_path


def test_round_trip(checkpoint: Path, byte_level: Tokenizer) -> None:
    """A saved tokenizer loads and gives the same ids and text."""
    loaded = Tokenizer.load(checkpoint)
    text = "naïve café 😀\n\tdef f():  pass ."
    assert loaded.encode(text) == byte_level.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.vocab_size == len(byte_level.hf)
    assert loaded.bos_id is None


def test_where_eos_ids_come_from(checkpoint: Path) -> None:
    """The tokenizer's first, then generation_config's list; config's only where there is no generation_config."""
    assert Tokenizer.load(checkpoint).eos_ids == (0, 7)
    assert checkpoint_eos_ids(checkpoint) == (7, 0)
    (checkpoint / "generation_config.json").unlink()
    assert Tokenizer.load(checkpoint).eos_ids == (0, 9)
    assert checkpoint_eos_ids(checkpoint) == (9,)


def test_eos_ids_of_a_nested_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [3, 4]}}))
    assert checkpoint_eos_ids(tmp_path) == (3, 4)
    assert checkpoint_eos_ids(tmp_path / "nowhere") == ()


def test_special_tokens_are_added_by_the_tokenizers_own_default(fallback: Tokenizer) -> None:
    assert fallback.encode("hello")[0] == fallback.bos_id == 1
    assert fallback.encode("hello", add_special_tokens=False)[0] != 1
    assert fallback.special_ids == {0, 1, 2}


def test_token_text(byte_level: Tokenizer, fallback: Tokenizer, wordpiece: Tokenizer) -> None:
    """What a token adds inside a text: its space is kept, special tokens are shown, half a character is its bytes."""
    token = fallback.hf.convert_tokens_to_ids
    assert fallback.token_text(token("▁hello")) == " hello"
    assert fallback.token_text(token("hello")) == "hello"
    assert fallback.token_text(token("</s>")) == "</s>"
    assert fallback.token_text(token("<0xE2>")) == "bytes:\\xe2"
    assert byte_level.token_text(byte_level.hf.convert_tokens_to_ids("Ġ")) == " "
    assert byte_level.token_text(byte_level.hf.convert_tokens_to_ids("Ł")) == "bytes:\\x9f"
    assert byte_level.token_text(99999) == ""
    assert wordpiece.token_text(3) == " hello"


def test_byte_values(byte_level: Tokenizer, fallback: Tokenizer) -> None:
    assert fallback.byte_values[fallback.hf.convert_tokens_to_ids("<0xE2>")] == 0xE2
    assert sorted(fallback.byte_values.values()) == list(range(256))
    assert not byte_level.byte_values


def test_chat_template(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    tokenizer.hf.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user:hi\n<|im_start|>assistant:"
    assert tokenizer.render_chat(messages) == text
    ids = tokenizer.apply_chat_template(messages)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<|im_start|>user:hi\n"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert tokenizer.render_chat(messages, tools=[tool]).startswith("1 tools ")
    with pytest.raises(ValueError, match=r"refuses these messages .*no robots"):
        tokenizer.render_chat([{"role": "robot", "content": ""}])
    with pytest.raises(ValueError, match="tokenize is not a variable"):
        tokenizer.render_chat(messages, variables={"tokenize": True})


def test_no_chat_template(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"no chat template: put a chat_template\.jinja"):
        byte_level.apply_chat_template([{"role": "user", "content": "hi"}])


def test_missing_and_broken_files(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="no model at"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no tokenizer in .*tokenizer\.json.*skip_tokenizer_init"):
        Tokenizer.load(tmp_path / "empty")
    (checkpoint / "tokenizer.json").write_text("{ not json")
    with pytest.raises(ValueError, match="cannot be read"):
        Tokenizer.load(checkpoint)


def test_broken_generation_config(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be read"):
        Tokenizer.load(checkpoint)


def test_tokenizer_json_alone_is_enough(tmp_path: Path, byte_level: Tokenizer) -> None:
    byte_level.hf.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("hello") == byte_level.encode("hello")


@pytest.mark.parametrize(
    ("levels", "template", "word"),
    [
        (300, "{{ messages[0].x | tojson }}", "messages is nested more than"),
        (1, "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "the model's chat template refuses"),
    ],
)
def test_a_chat_that_exhausts_the_stack(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch, levels: int, template: str, word: str
) -> None:
    """Values beyond the limit and templates that recurse without end are refused, as is half a surrogate pair."""
    monkeypatch.setattr(byte_level.hf, "chat_template", template)
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    with pytest.raises(ValueError, match=word):
        byte_level.render_chat([{"role": "user", "content": "x", "x": value}])
    for unfit in ({"content": "\ud800"}, {"content": "x", "\ud800": 1}, {"content": "x", "x": ["\ud800"]}):
        with pytest.raises(ValueError, match="messages is not valid Unicode"):
            byte_level.render_chat([{"role": "user", **unfit}])


@pytest.mark.parametrize("name", VOCABULARY_FILES)
def test_git_lfs_pointers(tmp_path: Path, name: str) -> None:
    """The error says what the file is and what fetches it."""
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 11421896\n")
    with pytest.raises(ValueError, match=rf"{name} is a Git LFS pointer .*run `git lfs pull` in {tmp_path}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", READ_BY)
def test_forms_that_need_another_package(tmp_path: Path, name: str) -> None:
    """A file that cannot be read without the model's tokenizer.json: the error names both, and the package."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / name).write_bytes(b"not a vocabulary")
    with pytest.raises(ValueError, match=r"copy the model's tokenizer\.json there, or make one") as told:
        Tokenizer.load(tmp_path)
    assert READ_BY[name] in str(told.value) and name in str(told.value)


def test_a_vocabulary_with_merges(tmp_path: Path) -> None:
    """vocab.json and merges.txt are read; the former alone is refused by the name of the latter."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokens = ("<|endoftext|>", "h", "e", "l", "o", "he", "ll", "hell", "hello")
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    with pytest.raises(ValueError, match=r"says nothing without merges\.txt"):
        Tokenizer.load(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\nhell o\n")
    assert Tokenizer.load(tmp_path).encode("hello") == [8]
