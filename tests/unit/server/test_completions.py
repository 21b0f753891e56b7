"""/v1/completions through the real client, against the offline API."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from stridelm import SamplingParams
from stridelm.builtin import builtin_path
from stridelm.server.messages import Score
from stridelm.server.openai.completions import legacy_logprobs
from stridelm.text.spans import Span
from stridelm.text.tokenizer import Tokenizer
from support.doubles.server import PROMPT, Served, llm, offline

SPECULATIONS: list[Any] = [
    *("off", "ngram", "suffix", "eagle", "frozen_kv"),
    *({"drafter": "mtp", "depth": 2}, {"drafter": "mask", "depth": 1}, {"drafter": "mtp", "depth": "auto"}),
]


@pytest.fixture(scope="module")
def plain() -> tuple[str, list[int]]:
    [sample] = offline([PROMPT], temperature=0.8, seed=7, max_tokens=40, speculation="off")
    return sample.text, sample.token_ids


@pytest.mark.parametrize("speculation", SPECULATIONS, ids=str)
def test_says_what_offline_says(served: Served, plain: tuple[str, list[int]], speculation: Any) -> None:
    """With every drafter, streamed or not."""
    extra = {"speculation": speculation, "return_token_ids": True}
    settings = {"model": "built-in", "prompt": PROMPT, "temperature": 0.8, "seed": 7, "max_tokens": 40}
    with served.openai() as client:
        whole = client.completions.create(**settings, extra_body=extra)
        events = list(client.completions.create(**settings, stream=True, extra_body=extra))
    [choice] = whole.choices
    assert (choice.text, choice.model_extra["token_ids"]) == plain
    assert choice.finish_reason == "length"
    assert "".join(event.choices[0].text for event in events) == plain[0]
    assert [t for event in events for t in event.choices[0].model_extra["token_ids"]] == plain[1]
    assert [event.choices[0].finish_reason for event in events][-1] == "length"
    name = speculation if isinstance(speculation, str) else speculation["drafter"]
    told = choice.model_extra["speculation"]
    assert told["drafter"] == ("none" if name == "off" else name) and told["lossless"] is True


def test_usage(served: Served) -> None:
    count = len(Tokenizer.load(builtin_path()).encode(PROMPT))
    with served.openai() as client:
        settings = {"model": "built-in", "max_tokens": 5, "extra_body": {"ignore_eos": True}}
        usage = client.completions.create(**settings, prompt=[PROMPT, PROMPT], n=2).usage
        last = {"include_usage": True}
        events = list(client.completions.create(**settings, prompt=PROMPT, stream=True, stream_options=last))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2 * count, 20, 2 * count + 20)
    assert events[-1].choices == [] and events[-1].usage.completion_tokens == 5
    assert all(event.usage is None for event in events[:-1])


def test_prompts_of_every_kind(served: Served) -> None:
    """Text or ids, one or several: the same prompt gets the same response."""
    ids = Tokenizer.load(builtin_path()).encode(PROMPT)
    with served.openai() as client:
        texts = {
            choice.text
            for prompt in (PROMPT, ids, [PROMPT, PROMPT], [ids, ids, ids])
            for choice in client.completions.create(
                model="built-in", prompt=prompt, max_tokens=12, temperature=0
            ).choices
        }
    assert len(texts) == 1


def test_samples_differ_and_are_those_of_offline(served: Served) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10)
    expected = [one.text for one in llm().generate(PROMPT, params)[0].outputs]
    with served.openai() as client:
        got = client.completions.create(
            model="built-in", prompt=PROMPT, n=3, temperature=1.0, seed=5, max_tokens=10
        ).choices
    assert [choice.text for choice in sorted(got, key=lambda c: c.index)] == expected
    assert len(set(expected)) > 1


def test_stop(served: Served) -> None:
    with served.openai() as client:
        free = client.completions.create(model="built-in", prompt=PROMPT, temperature=0, max_tokens=30).choices[0].text
        word = free[8:11]
        cut = client.completions.create(
            model="built-in", prompt=PROMPT, temperature=0, max_tokens=30, stop=[word, "never said"]
        ).choices[0]
    assert cut.text == free[: free.index(word)] and cut.finish_reason == "stop"
    assert cut.model_extra["stop_reason"] == word


def test_logprobs(served: Served) -> None:
    """The offline API's, in the format of this API, streamed or not, with every drafter."""
    [expected] = offline([PROMPT], temperature=0, max_tokens=8, logprobs=3, speculation="off")
    settings = {"model": "built-in", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "logprobs": 3}
    with served.openai() as client:
        whole = client.completions.create(**settings).choices[0]
        events = list(client.completions.create(**settings, stream=True))
    assert expected.logprobs is not None
    chosen = [entry[token].logprob for entry, token in zip(expected.logprobs, expected.token_ids)]
    assert whole.logprobs.token_logprobs == pytest.approx(chosen, abs=1e-5)
    assert "".join(whole.logprobs.tokens) == whole.text
    assert whole.logprobs.text_offset == [len("".join(whole.logprobs.tokens[:i])) for i in range(8)]
    assert all(3 <= len(top) <= 4 for top in whole.logprobs.top_logprobs)
    streamed = [event.choices[0].logprobs for event in events]
    assert [x for one in streamed for x in one.token_logprobs] == whole.logprobs.token_logprobs
    assert [x for one in streamed for x in one.text_offset] == whole.logprobs.text_offset


def test_echo_scores_the_prompt(served: Served) -> None:
    """What evaluation harnesses request: the prompt's log-probabilities, with no generated token or one."""
    tokens = Tokenizer.load(builtin_path()).encode(PROMPT)
    with served.openai() as client:
        none = client.completions.create(model="built-in", prompt=PROMPT, echo=True, logprobs=1, max_tokens=0)
        one = client.completions.create(
            model="built-in", prompt=PROMPT, echo=True, logprobs=1, max_tokens=1, temperature=0
        )
    scored = none.choices[0].logprobs
    assert none.choices[0].text == PROMPT and none.usage.completion_tokens == 0
    assert len(scored.token_logprobs) == len(tokens) and scored.token_logprobs[0] is None
    assert all(value <= 0 for value in scored.token_logprobs[1:])
    assert one.choices[0].logprobs.token_logprobs[: len(tokens)] == scored.token_logprobs
    assert len(one.choices[0].logprobs.tokens) == len(tokens) + 1
    expected = llm().generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert expected.prompt_logprobs is not None
    entries: list[Any] = expected.prompt_logprobs[1:]
    own = [entry[t].logprob for entry, t in zip(entries, tokens[1:])]
    assert scored.token_logprobs[1:] == pytest.approx(own, abs=1e-5)


def test_max_tokens_beyond_the_context(served: Served) -> None:
    """The context ends the output, as a length; only a prompt that fills it by itself is refused."""
    with served.http() as client:
        context = client.post("/tokenize", json={"prompt": PROMPT}).json()["max_model_len"]
        for room in (1, 3):
            body = {"prompt": [40] * (context - room), "max_tokens": 10**9, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["total_tokens"] == context
        refused = client.post("/v1/completions", json={"prompt": [40] * context, "max_tokens": 1})
    assert refused.status_code == 400 and "shorten the prompt" in refused.text


def test_likeliest_of_tokens_that_look_alike() -> None:
    """Where two tokens have one text, the most likely token's number stands by it, whichever token was said."""
    entry = [Score(7, -3.0, 2, "A", Span(0, b"A")), Score(9, -0.1, 1, "A")]
    found = legacy_logprobs([entry], 1)
    assert (found["token_logprobs"], found["top_logprobs"]) == ([-3.0], [{"A": -0.1}])


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 0}, "echo"),
        ({"top_p": 2}, "top_p"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"stop": [""]}, "stop"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**9]}, "vocabulary"),
        ({"prompt": "x " * 2000}, "context"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"speculation": {"drafter": "nobody"}}}, "nobody"),
        ({"extra_body": {"speculation": {"depths": 3}}}, "depths"),
        ({"extra_body": {"speculation": {"adaptive": True}}}, "adaptive"),
        ({"extra_body": {"speculation": {"drafter": "none", "depth": "auto"}}}, "depth auto"),
        ({"extra_body": {"min_tokens": 99}}, "min_tokens"),
        ({"extra_body": {"no_such_option": 1}}, "no_such_option"),
    ],
    ids=str,
)
def test_refusals(served: Served, settings: dict[str, object], word: str) -> None:
    """The error names what is wrong, and contains nothing of the prompt."""
    with served.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "built-in", "prompt": "secret words", **settings})
    assert caught.value.type == "invalid_request_error" and word in str(caught.value)
    assert "secret" not in str(caught.value)


def test_unknown_model(served: Served) -> None:
    with served.openai() as client, pytest.raises(openai.NotFoundError, match="built-in"):
        client.completions.create(model="gpt-5", prompt="x")


def test_models(served: Served) -> None:
    with served.openai() as client:
        assert [model.id for model in client.models.list()] == ["built-in"]
        assert client.models.retrieve("built-in").id == "built-in"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("another")
