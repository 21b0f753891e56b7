"""Text made apart from the engine is what LLM returns, whatever the engine has run beyond a stop string by then."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stridelm import LLM, SamplingParams
from stridelm.builtin import builtin_path
from stridelm.llm import CompletionOutput
from stridelm.server.chunk import Chunk
from stridelm.server.engine_process import _delta
from stridelm.server.errors import ApiError
from stridelm.server.gather import Gathered
from stridelm.server.messages import Outputs, Score, encode, from_engine
from stridelm.server.sample_text import SampleText, prompt_scores
from stridelm.text.output import bad_word_ids
from stridelm.text.tokenizer import Tokenizer
from support.doubles.server import PROMPT, Served, offline, settle, until
from support.doubles.server import llm as offline_llm

SPECULATIONS: list[Any] = [
    "off",
    "ngram",
    "suffix",
    "eagle",
    "frozen_kv",
    {"drafter": "mtp", "depth": 3},
    {"drafter": "mask", "depth": 3},
    {"drafter": "mask", "depth": 3, "acceptance": "trust"},
]
FREE = SamplingParams(temperature=0.8, seed=11, max_tokens=50, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(max_model_len=512, max_num_seqs=4)
    yield llm
    llm.check()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(builtin_path())


def apart(llm: LLM, tokenizer: Tokenizer, params: SamplingParams, late: int) -> tuple[Gathered, list[Chunk]]:
    """The sample when its text is made `late` steps after the engine's, from messages. What of it was read when."""
    engine, prompt = llm.engine, tokenizer.encode(PROMPT)
    request = engine.add("apart", prompt, params, bad_words=bad_word_ids(tokenizer, params))
    text = SampleText(tokenizer, prompt, params, engine.loaded.model.spec.hidden_size)
    sample, chunks, waiting = Gathered(), list[Chunk](), deque[bytes]()
    while engine.busy or waiting:
        if engine.busy:
            deltas = [_delta(output) for output in engine.step()]
            waiting.append(encode(Outputs(deltas)))
        if len(waiting) > late or not engine.busy:
            message = from_engine(waiting.popleft())
            assert isinstance(message, Outputs)
            for delta in message.deltas:
                ended = text.end
                chunks.append(text.read(delta))
                sample.take(chunks[-1])
                if ended is None and text.stopped_at is not None and engine.queue.get("apart") is request:
                    engine.cut(request, *text.stopped_at)
    assert request.finish_reason is not None
    return sample, chunks


def stops_of(sample: CompletionOutput) -> list[str]:
    """Stop strings that are completed early, across tokens, and with the last token."""
    text = sample.text
    return [text[9:12], text[len(text) // 2 :][:5], text[-3:]]


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("speculation", SPECULATIONS, ids=str)
def test_it_ends_where_llm_ends(llm: LLM, tokenizer: Tokenizer, speculation: Any, late: int) -> None:
    """Text, tokens, log-probabilities, hidden states and reasons are equal, with every drafter, for stop strings at
    different places, shown or not, and however late they are found; and so are the counts of each step."""
    free = replace(FREE, speculation=speculation)
    [plain] = llm.generate(PROMPT, free)[0].outputs
    for number, stop in enumerate(stops_of(plain)):
        included: dict[str, Any] = {"include_stop_str_in_output": True, "min_tokens": 4} if number % 2 else {}
        params = replace(free, stop=[stop, "never said"], logprobs=2, return_hidden_states=True, **included)
        [expected] = llm.generate(PROMPT, params)[0].outputs
        sample, chunks = apart(llm, tokenizer, params, late)
        assert (sample.text, sample.token_ids) == (expected.text, expected.token_ids)
        assert expected.logprobs is not None and expected.hidden_states is not None
        assert [list(map(_scored, entry)) for entry in sample.logprobs] == [
            [(token, one.logprob, one.rank, one.decoded_token) for token, one in entry.items()]
            for entry in expected.logprobs
        ]
        states = np.frombuffer(bytes(sample.hidden_states), np.float32)
        assert states.tobytes() == expected.hidden_states.numpy().tobytes()
        assert all(sum(tokens for tokens, _ in chunk.steps) == len(chunk.token_ids) for chunk in chunks)
        assert all(0 <= accepted <= tokens for chunk in chunks for tokens, accepted in chunk.steps)
        ended = [chunk.finish for chunk in chunks if chunk.finish is not None]
        assert expected.stop_reason == stop
        assert all((one.reason, one.stop_reason) == ("stop", stop) for one in ended)


def _scored(score: Score) -> tuple[int, float, int | None, str | None]:
    return score.token, score.logprob, score.rank, score.text


def test_an_end_that_the_engine_found_first(llm: LLM, tokenizer: Tokenizer) -> None:
    """The stop string comes with the very token at which the length ends the output, or some tokens before: the engine
    has said `length`, and the answer says `stop`."""
    [plain] = llm.generate(PROMPT, replace(FREE, max_tokens=20))[0].outputs
    for stop in (plain.text[-2:], plain.text[-9:-6]):
        params = replace(FREE, max_tokens=20, stop=[stop])
        [expected] = llm.generate(PROMPT, params)[0].outputs
        sample, _ = apart(llm, tokenizer, params, late=30)
        assert (sample.ended.reason, sample.ended.stop_reason) == ("stop", stop)
        assert (sample.text, sample.token_ids) == (expected.text, expected.token_ids)


def test_a_prompt_whose_tokens_have_no_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's own error, in the words of others."""
    packed = encode([None, [Score(300, -1.0, 1)]])
    assert prompt_scores(packed, tokenizer) == [None, [Score(300, -1.0, 1, tokenizer.token_text(300))]]

    def broken(token: int) -> str:
        raise LookupError(token)

    monkeypatch.setattr(tokenizer, "token_text", broken)
    with pytest.raises(ApiError, match="LookupError inside the engine"):
        prompt_scores(packed, tokenizer)


@pytest.mark.parametrize("speculation", ["off", "ngram", {"drafter": "mtp", "depth": 3}, "suffix", "eagle"], ids=str)
def test_over_http(served: Served, speculation: Any) -> None:
    """Two samples, each with its own end, streamed or not: what LLM returns, in every count. The engine's own counters
    include what it ran until it heard of the ends, and no more."""
    before = settle(served)
    asked: dict[str, Any] = {"temperature": 0.8, "seed": 4, "max_tokens": 60, "ignore_eos": True, "n": 2}
    [free] = offline([PROMPT], **{**asked, "n": 1}, speculation=speculation)
    stop = [free.text[20:23], free.text[40:44]]
    expected = offline_llm().generate(PROMPT, SamplingParams(**asked, stop=stop, speculation=speculation))[0].outputs
    body = {**asked, "prompt": PROMPT, "stop": stop, "speculation": speculation, "return_token_ids": True}
    with served.openai() as client:
        extra = {name: body.pop(name) for name in ("ignore_eos", "speculation", "return_token_ids")}
        whole = client.completions.create(model="built-in", **body, extra_body=extra)
        usage = {"include_usage": True}
        events = list(
            client.completions.create(model="built-in", **body, stream=True, stream_options=usage, extra_body=extra)
        )
    tokens = sum(len(sample.token_ids) for sample in expected)
    assert whole.usage.completion_tokens == events[-1].usage.completion_tokens == tokens
    for choice, sample in zip(sorted(whole.choices, key=lambda one: one.index), expected, strict=True):
        parts = [event.choices[0] for event in events[:-1] if event.choices[0].index == choice.index]
        ends = [(part.finish_reason, part.model_extra["stop_reason"]) for part in parts if part.finish_reason]
        assert ends == [(sample.finish_reason, sample.stop_reason)]
        assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ends[0]
        assert choice.text == "".join(part.text for part in parts) == sample.text
        ids = [token for part in parts for token in part.model_extra["token_ids"]]
        assert choice.model_extra["token_ids"] == ids == sample.token_ids
        counts, metrics = choice.model_extra["speculation"], sample.metrics
        assert metrics is not None and counts["steps"] >= metrics.steps and counts["accepted"] <= counts["drafted"]

    def gained(name: str) -> float:
        return settle(served)[name] - before[name]

    assert gained("stride_generation_tokens_total") == 2 * tokens
    until("the engine has reported", lambda: gained("stride_engine_emitted_tokens_total") >= 2 * tokens, 5)
    assert gained("stride_engine_emitted_tokens_total") <= 2 * tokens + 200


def test_bad_words_over_http(served: Served) -> None:
    """They are kept out with any drafter, many of them at once, and one without tokens is refused."""
    [free] = offline([PROMPT], temperature=0, max_tokens=30)
    words = [word for word in dict.fromkeys(free.text.split()) if word.isalpha()]
    many = [*words, *(f"word{number}" for number in range(200))]
    [expected] = offline([PROMPT], temperature=0, max_tokens=30, bad_words=many)
    assert words and expected.text != free.text
    with served.http() as client:
        settings = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30}
        answer = client.post("/v1/completions", json={**settings, "bad_words": many}).json()
        assert answer["choices"][0]["text"] == expected.text
        refused = client.post("/v1/completions", json={**settings, "bad_words": [" "]})
    assert refused.status_code == 400 and "has no tokens; leave it out" in refused.text
