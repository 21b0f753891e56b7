"""The parts of its tokens are the text: joined, byte for byte, wherever tokens, characters and stop strings begin."""

from __future__ import annotations

import codecs
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stridelm.params import SamplingParams
from stridelm.text.output import OutputText
from stridelm.text.spans import Span, TokenPlacer
from stridelm.text.tokenizer import REPLACEMENT, Tokenizer, shown

LAWS = settings(max_examples=100, deadline=None)


def _one_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("one-each", _one_each)


def decoded(spans: list[Span], tokenizer: Tokenizer) -> str:
    """The parts as one text: byte tokens that form no character are one U+FFFD each."""
    return b"".join(span.data for span in spans).decode(errors="one-each" if tokenizer.byte_values else "replace")


def read(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int], silent: bool, params: SamplingParams
) -> tuple[str, list[Span], OutputText]:
    """The text of an output that arrives in steps of these sizes, with the spans as they became final."""
    output = OutputText(tokenizer, prompt, params, places=True)
    text, spans, at = "", list[Span](), 0
    for size in [*sizes, *[1] * len(ids)]:
        step = ids[at : at + size]
        at += size
        text += "".join(output.read(step, at >= len(ids), silent))
        spans += output.take_spans()
        if at >= len(ids) or output.stop is not None:
            break
    return text, spans, output


@LAWS
@given(data=st.data(), skip=st.booleans(), silent=st.booleans(), sizes=st.lists(st.integers(1, 4), max_size=20))
def test_the_parts_of_the_tokens_are_the_text(
    any_tokenizer: Tokenizer, data: st.DataObject, skip: bool, silent: bool, sizes: list[int]
) -> None:
    """Of any tokens after any prompt, and however they arrive: joined, the parts decode to the text; each begins where
    the parts before it end, or at the character that they leave incomplete. Only the bytes of a character that the
    prompt began are missing."""
    token = st.integers(0, any_tokenizer.vocab_size + 2)
    prompt = data.draw(st.lists(token, max_size=6))
    ids = data.draw(st.lists(token, min_size=1, max_size=30))
    if REPLACEMENT in any_tokenizer.decode(prompt, skip)[-1:]:
        prompt = []
    text, spans, _ = read(any_tokenizer, prompt, ids, sizes, silent, SamplingParams(skip_special_tokens=skip))
    assert decoded(spans, any_tokenizer) == text
    assert len(spans) == len(ids)
    if REPLACEMENT not in text:
        for number, span in enumerate(spans):
            before = b"".join(one.data for one in spans[:number])
            assert span.begin == len(before.decode(errors="ignore"))
    assert read(any_tokenizer, prompt, ids, [], silent, SamplingParams(skip_special_tokens=skip))[1] == spans


@LAWS
@given(data=st.data(), include=st.booleans(), sizes=st.lists(st.integers(1, 4), max_size=20))
def test_a_stop_string_cuts_the_parts_too(
    any_tokenizer: Tokenizer, data: st.DataObject, include: bool, sizes: list[int]
) -> None:
    """Joined, the parts are still the text, and the same however the tokens arrive. A token of which nothing is
    left is at the text's end. Not where it cuts between U+FFFDs that stand for the bytes of one character."""
    ids = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_size - 1), min_size=1, max_size=30))
    free = read(any_tokenizer, [], ids, sizes, False, SamplingParams())[0]
    at = data.draw(st.integers(0, len(free)))
    stop = [free[at : at + data.draw(st.integers(1, 4))], "never said"]
    assume(stop[0] and not (any_tokenizer.byte_values and REPLACEMENT in stop[0]))
    settings: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": include}
    text, spans, output = read(any_tokenizer, [], ids, sizes, False, SamplingParams(**settings))
    assert output.stop == stop[0] and free.startswith(text) and len(spans) == output.tokens
    assert decoded(spans, any_tokenizer) == text
    assert read(any_tokenizer, [], ids, [30], False, SamplingParams(**settings))[1] == spans
    assert all(span.begin == len(text) for span in spans if not span.data and span.begin >= len(text))
    assert max(span.begin for span in spans) <= len(text)


@LAWS
@given(data=st.data())
def test_the_parts_of_a_prompt_are_its_text(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """From its first token on, as an echo shows it."""
    text = data.draw(st.text(alphabet="hello wor,日本😀é\n", min_size=1, max_size=20))
    ids = any_tokenizer.encode(text)
    placer = TokenPlacer(any_tokenizer)
    spans = [placer.place(token).span for token in ids]
    assert decoded(spans, any_tokenizer) == any_tokenizer.decode(ids)


def test_a_character_in_three_tokens(byte_level: Tokenizer, fallback: Tokenizer) -> None:
    """Each has its own bytes, and the place of the character; what follows has the next."""
    pieces = {"æĹ¥": [b"\xe6", b"\x97", b"\xa5"]}
    for tokenizer, names in ((byte_level, "æĹ¥"), (fallback, ["<0xE6>", "<0x97>", "<0xA5>"])):
        ids = [tokenizer.hf.convert_tokens_to_ids(name) for name in (*names, "h")]
        _, spans, _ = read(tokenizer, [], ids, [], False, SamplingParams())
        assert spans == [*(Span(0, part) for part in pieces["æĹ¥"]), Span(1, b"h")]
        assert [shown(span.data) for span in spans] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5", "h"]
        assert [tokenizer.token_text(token) for token in ids] == [shown(span.data) for span in spans]
