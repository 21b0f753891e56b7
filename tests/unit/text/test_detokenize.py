"""The stream is the text: nothing lost, nothing doubled, nothing taken back, never half a character."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from stridelm.text.detokenize import LONGEST_WINDOW, Detokenizer
from stridelm.text.tokenizer import REPLACEMENT, Tokenizer

LAWS = settings(max_examples=150, deadline=None)
AWKWARD = "aé€😀👩‍👩‍👧 日本語\n  hello wor\ufffd"
texts = st.text(alphabet=st.one_of(st.sampled_from(AWKWARD), st.characters(codec="utf-8")), max_size=40)
cuts = st.lists(st.integers(1, 5), max_size=40)


def pieces(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` cut into pieces of these sizes, the rest into single ids."""
    out, at = [], 0
    for size in sizes + [1] * len(ids):
        out.append(ids[at : at + size])
        at += size
    return [piece for piece in out if piece]


def stream(tokenizer: Tokenizer, prompt: list[int], parts: list[list[int]], skip: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return "".join(detokenizer.push(part) for part in parts) + detokenizer.flush()


@LAWS
@given(text=texts, at=st.floats(0, 1), sizes=cuts)
@example(text="€" * 40, at=0.5, sizes=[])
@example(text="  hello  hello", at=0.0, sizes=[2])
def test_stream_is_decode_of_the_whole(tokenizer: Tokenizer, text: str, at: float, sizes: list[int]) -> None:
    """pushes + flush == decode(prompt + output) - decode(prompt), wherever a text is split."""
    ids = tokenizer.encode(text)
    cut = int(at * len(ids))
    while cut and tokenizer.decode(ids[:cut]).endswith(REPLACEMENT):
        cut -= 1
    expected = tokenizer.decode(ids).removeprefix(tokenizer.decode(ids[:cut]))
    assert stream(tokenizer, ids[:cut], pieces(ids[cut:], sizes)) == expected


@LAWS
@given(data=st.data(), skip=st.booleans(), sizes=cuts)
def test_any_ids_in_any_pieces_give_one_text(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    """Sampled tokens are not real text. However they arrive, the text is the same."""
    token = st.integers(0, tokenizer.vocab_size - 1)
    prompt = data.draw(st.lists(token, max_size=12))
    ids = data.draw(st.lists(token, max_size=60))
    whole = stream(tokenizer, prompt, [ids], skip)
    assert stream(tokenizer, prompt, pieces(ids, sizes), skip) == whole


@LAWS
@given(data=st.data(), skip=st.booleans())
def test_byte_level_is_exact_on_any_ids(byte_level: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """Byte-level tokens: even invalid bytes decode as in one call, after a prompt cut anywhere."""
    token = st.integers(0, byte_level.vocab_size - 1)
    prompt = data.draw(st.lists(token, max_size=12))
    ids = data.draw(st.lists(token, max_size=60))
    before, after = byte_level.decode(prompt, skip), byte_level.decode(prompt + ids, skip)
    shared = 0
    while shared < min(len(before), len(after)) and before[shared] == after[shared]:
        shared += 1
    # Only the prompt's last, unfinished character can change when more follows it.
    assert shared >= len(before) - 1
    assert stream(byte_level, prompt, [[i] for i in ids], skip) == after[shared:]


@LAWS
@given(data=st.data(), skip=st.booleans(), sizes=cuts)
def test_ids_without_text_change_nothing(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    """Ids that the tokenizer does not know, in runs of any length and inside characters, in the prompt and after it:
    the text is that of the ids without them."""
    known = st.integers(0, tokenizer.vocab_size - 1).map(lambda token: [token])
    split = st.sampled_from([[token] for token in tokenizer.encode("é€😀", add_special_tokens=False)])
    padding = st.integers(1, 40).map(lambda count: [tokenizer.vocab_size + 5] * count)
    runs = st.lists(st.one_of(known, split, padding), max_size=20)
    prompt, ids = ([token for run in data.draw(runs) for token in run] for _ in range(2))
    spoken = [[token for token in part if token < tokenizer.vocab_size] for part in (prompt, ids)]
    assert stream(tokenizer, prompt, pieces(ids, sizes), skip) == stream(tokenizer, spoken[0], [spoken[1]], skip)


@LAWS
@given(data=st.data())
def test_tokens_that_the_decoder_drops(byte_level: Tokenizer, data: st.DataObject) -> None:
    """Tokens of the vocabulary with no text of their own, in runs longer than the window, cut no character off."""
    rust = RustTokenizer.from_str(byte_level.hf.backend_tokenizer.to_str())
    rust.add_tokens([AddedToken("<silent>", normalized=False)])
    rust.decoder = decoders.Sequence([decoders.Replace("<silent>", ""), decoders.ByteLevel()])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))
    silent = tokenizer.hf.convert_tokens_to_ids("<silent>")
    split = st.sampled_from([[token] for token in tokenizer.encode("aé€😀")])
    quiet = st.integers(1, 60).map(lambda count: [silent] * count)
    ids = [token for run in data.draw(st.lists(st.one_of(split, quiet), max_size=20)) for token in run]
    assert stream(tokenizer, [], [[token] for token in ids]) == tokenizer.decode(ids)


@LAWS
@given(data=st.data())
def test_fallback_is_exact_on_runs_that_are_text_or_rubbish(fallback: Tokenizer, data: st.DataObject) -> None:
    """Runs of byte tokens: whole characters, or bytes that spell none. (A run that mixes both keeps its
    characters here, while the whole-run decoder throws away text that a stream has shown already.)"""
    byte_id = {byte: token for token, byte in fallback.byte_values.items()}
    spelt = st.text(min_size=1, max_size=4).map(lambda text: [byte_id[b] for b in text.encode()])
    lone = st.lists(st.sampled_from([byte_id[b] for b in (0x80, 0xBF, 0xC0, 0xFF)]), max_size=4).flatmap(
        lambda run: st.sampled_from([run, [*run, byte_id[0xE2]]])
    )
    word = st.integers(259, fallback.vocab_size - 1).map(lambda token: [token])
    parts = data.draw(st.lists(st.one_of(word, st.tuples(word, spelt, word), st.tuples(word, lone, word))))
    ids: list[int] = []
    for part in parts:
        ids += [part[0]] if isinstance(part, list) else [*part[0], *part[1], *part[2]]
    assert stream(fallback, [], [[i] for i in ids]) == fallback.decode(ids)


@LAWS
@given(text=texts)
def test_never_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    """What has been emitted is always a prefix of the whole text, so it holds no U+FFFD of its own."""
    detokenizer, shown, ids = Detokenizer(tokenizer), "", tokenizer.encode(text)
    for token in ids:
        shown += detokenizer.push([token])
        assert tokenizer.decode(ids).startswith(shown)


def test_character_split_over_tokens_comes_whole(byte_level: Tokenizer) -> None:
    ids = [byte_level.hf.convert_tokens_to_ids(c) for c in "ðŁĺĢ"]
    assert byte_level.decode(ids) == "😀"
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "😀"]


def test_character_split_over_prompt_and_output(tokenizer: Tokenizer) -> None:
    """The output shows the character if it completes it; otherwise the prompt's bytes remain the prompt's."""
    ids = tokenizer.encode("hello €")
    assert stream(tokenizer, ids[:-1], [ids[-1:]]) == "€"
    letter = tokenizer.encode("x", add_special_tokens=False)[-1:]
    assert stream(tokenizer, ids[:-1], [letter]) == "x"
    assert stream(tokenizer, ids[:-1], []) == ""


def test_unfinished_character_is_flushed(byte_level: Tokenizer, fallback: Tokenizer) -> None:
    ids = byte_level.encode("a😀", add_special_tokens=False)[:-1]
    assert stream(byte_level, [], [ids]) == byte_level.decode(ids) == "a" + REPLACEMENT
    ids = fallback.encode("a😀", add_special_tokens=False)[:-1]
    assert stream(fallback, [], [ids]) == fallback.decode(ids) == "a" + REPLACEMENT * 3


def test_spoilt_run_keeps_the_characters_beside_it(fallback: Tokenizer) -> None:
    byte_id = {byte: token for token, byte in fallback.byte_values.items()}
    ids = [byte_id[b] for b in "€".encode() + b"\xff" + "é".encode()]
    assert fallback.decode(ids) == REPLACEMENT * 6
    assert stream(fallback, [], [[i] for i in ids]) == f"€{REPLACEMENT}é"


def test_leading_space(fallback: Tokenizer) -> None:
    """A word's space is kept after a prompt, special tokens and bytes, and stripped where the text begins."""
    hello = fallback.hf.convert_tokens_to_ids("▁hello")
    euro = fallback.encode("€", add_special_tokens=False)[1:]
    assert stream(fallback, [], [[hello, hello]]) == "hello hello"
    assert stream(fallback, [hello], [[hello]]) == " hello"
    assert stream(fallback, [hello] + [2] * 30, [[hello]]) == " hello"
    assert stream(fallback, [], [euro, [hello]]) == "€ hello"
    assert stream(fallback, [1], [[hello]], skip=False) == fallback.decode([1, hello], False).removeprefix("<s>")


def test_special_tokens(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("a"), *byte_level.encode("<|im_start|><tool>"), *byte_level.encode("b")]
    assert stream(byte_level, [], [ids], skip=True) == "a<tool>b"
    assert stream(byte_level, [], [ids], skip=False) == "a<|im_start|><tool>b"


def test_decoder_that_makes_spaces(wordpiece: Tokenizer) -> None:
    ids = wordpiece.encode("hello the world") + [5, 6]
    assert stream(wordpiece, ids[:1], [[i] for i in ids[1:]]) == wordpiece.decode(ids).removeprefix("hello")


def test_special_and_unknown_ids_end_nothing(byte_level: Tokenizer) -> None:
    """A skipped token inside a character does not corrupt it, and an id without text adds none."""
    first, *rest = byte_level.encode("😀")
    eos = byte_level.eos_ids[0]
    assert stream(byte_level, [], [[first, eos, 99999, *rest]]) == "😀"


@pytest.mark.parametrize("kind", ["text", "invalid"])
def test_cost_does_not_grow(byte_level: Tokenizer, kind: str) -> None:
    """The window is bounded even if no character ever ends."""
    bad = byte_level.hf.convert_tokens_to_ids("Ģ")
    ids = byte_level.encode("def f(x): return x\n" * 500) if kind == "text" else [bad] * 5000
    detokenizer = Detokenizer(byte_level)
    start = time.perf_counter()
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
    assert len(detokenizer._window) <= LONGEST_WINDOW
    assert text == byte_level.decode(ids)
    assert time.perf_counter() - start < 500e-6 * len(ids)
