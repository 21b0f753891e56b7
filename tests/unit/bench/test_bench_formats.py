"""Requests and answers of each API, on events as vLLM, SGLang, llama.cpp and Stride send them."""

from __future__ import annotations

from typing import Any

import pytest

from stridelm.bench.http.connection import post
from stridelm.bench.http.formats import FORMATS, Event, Wanted


def wanted(**more: Any) -> Wanted:
    messages = [("system", "Be brief."), ("user", "Why?")]
    fields = {"max_tokens": 9, "temperature": 0.0, "ignore_eos": True, "seed": 5, **more}
    return Wanted("m", messages, "Be brief. Why?", **fields)


def timed(*events: dict[str, Any]) -> list[Event]:
    return [(float(number), event) for number, event in enumerate(events)]


def completion(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": None, **more}]}


def delta(content: str | None, **more: Any) -> dict[str, Any]:
    inside = {} if content is None else {"content": content}
    return {"choices": [{"delta": {**inside, **more.pop("delta", {})}, "finish_reason": None, **more}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def test_bodies() -> None:
    """Each API's own names; a seed only where something is drawn."""
    bodies = {name: format.body(wanted(speculation="off", ids=True)) for name, format in FORMATS.items()}
    shared = {"model": "m", "max_tokens": 9, "temperature": 0.0, "ignore_eos": True, "speculation": "off"}
    shared |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    assert bodies["openai"] == {**shared, "prompt": "Be brief. Why?"}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert bodies["openai-chat"] == {**shared, "messages": messages}
    sampling = {"max_new_tokens": 9, "temperature": 0.0, "ignore_eos": True, "speculation": "off"}
    assert bodies["sglang"] == {"text": "Be brief. Why?", "sampling_params": sampling, "stream": True}


def test_servers_are_not_sent_what_only_some_know() -> None:
    for name, format in FORMATS.items():
        body = format.body(wanted(ignore_eos=False, temperature=0.5))
        sampling = body.get("sampling_params", body)
        assert not {"ignore_eos", "speculation", "return_token_ids"} & {*body, *sampling}
        assert sampling["sampling_seed" if name == "sglang" else "seed"] == 5


def test_completions() -> None:
    """A token without text counts, and a finish reason alone does not."""
    answered = FORMATS["openai"].read(
        timed(completion("a"), completion(""), completion("b"), completion("", finish_reason="stop"), USAGE)
    )
    assert answered.at == [0.0, 1.0, 2.0] and answered.text == "ab"
    assert (answered.tokens, answered.prompt_tokens, answered.finish_reason) == (3, 7, "stop")
    assert answered.token_ids is None and answered.steps is None


def test_completions_of_a_server_that_tells_more() -> None:
    """With token ids, an event has a token if it has an id, whatever its text."""
    told = {"drafter": "ngram", "steps": 2, "drafted": 4, "accepted": 1, "lossless": True}
    last = completion("", token_ids=[9], finish_reason="length", speculation=told)
    answered = FORMATS["openai"].read(
        timed(completion("ab", token_ids=[4, 5]), completion("", token_ids=[]), last, USAGE)
    )
    assert answered.at == [0.0, 2.0] and answered.token_ids == [4, 5, 9]
    assert (answered.steps, answered.drafted, answered.accepted) == (2, 4, 1)


def test_ids_that_are_not_all_there_are_none() -> None:
    answered = FORMATS["openai"].read(timed(completion("a", token_ids=[4]), completion("b"), USAGE))
    assert answered.token_ids is None


def test_chats() -> None:
    """The role is sent before any token."""
    opening = delta("", delta={"role": "assistant"})
    answered = FORMATS["openai-chat"].read(
        timed(opening, delta("a"), delta(""), delta(None, finish_reason="stop"), USAGE)
    )
    assert answered.at == [1.0, 2.0] and answered.text == "a"


def generated(text: str, ids: list[int], count: int, **more: Any) -> dict[str, Any]:
    meta = {"prompt_tokens": 7, "completion_tokens": count, "finish_reason": None, **more}
    return {"text": text, "output_ids": ids, "meta_info": meta}


def test_generate() -> None:
    """Each event repeats what came before; an event that adds nothing does not count."""
    end = {"finish_reason": {"type": "length", "length": 3}, "spec_verify_ct": 2}
    answered = FORMATS["sglang"].read(
        timed(
            generated("a", [4], 1),
            generated("abc", [4, 5, 6], 3),
            generated("abc", [4, 5, 6], 3, **end),
        )
    )
    assert answered.at == [0.0, 1.0] and answered.text == "abc" and answered.token_ids == [4, 5, 6]
    assert (answered.tokens, answered.steps, answered.finish_reason) == (3, 2, "length")


def test_generate_with_incremental_output() -> None:
    answered = FORMATS["sglang"].read(timed(generated("a", [4], 1), generated("bc", [5, 6], 3)))
    assert answered.text == "abc" and answered.token_ids == [4, 5, 6]


@pytest.mark.parametrize("name", FORMATS)
def test_errors_and_empty_streams_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="overloaded"):
        FORMATS[name].read(timed({"error": {"message": "overloaded"}}))
    with pytest.raises(ValueError, match="no tokens"):
        FORMATS[name].read([])


def test_a_stream_that_does_not_count_its_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="usage"):
        FORMATS["openai"].read(timed(completion("a")))


def test_posts() -> None:
    message = post("host:80", "/v1/completions", b"{}", {"authorization": "Bearer k"})
    head, body = message.split(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /v1/completions HTTP/1.1" and body == b"{}"
    assert {b"host: host:80", b"content-length: 2", b"authorization: Bearer k"} <= set(head.split(b"\r\n"))
