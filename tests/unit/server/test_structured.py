"""Structured output over HTTP, and which grammars clients may request."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from stridelm import SamplingParams
from support.doubles.server import PROMPT, Served, llm, settle

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
WAYS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, r"\{.*"),
    ({"extra_body": {"guided_json": SCHEMA}}, r"\{.*"),
    ({"extra_body": {"guided_json": json.dumps(SCHEMA)}}, r"\{.*"),
    ({"extra_body": {"guided_regex": "[ab]{3}-[0-9]+"}}, "[ab]{3}-[0-9]+"),
    ({"extra_body": {"guided_choice": ["red", "green"]}}, "red|green"),
    ({"extra_body": {"guided_grammar": 'root ::= "(" root ")" | "x"'}}, r"\(*x\)*"),
    ({"extra_body": {"structured_outputs": {"regex": "x{2}"}}}, "x{2}"),
]


@pytest.mark.parametrize("speculation", ["off", "mtp", "ngram"])
def test_chat_follows_a_schema(served: Served, speculation: str) -> None:
    """The same object with every drafter, whole or streamed."""
    settings: dict[str, Any] = {
        "model": "built-in",
        "messages": [{"role": "user", "content": "who?"}],
        "response_format": FORMAT,
        "max_tokens": 60,
        "seed": 3,
        "temperature": 0.7,
        "extra_body": {"speculation": speculation},
    }
    with served.openai() as client:
        whole = client.chat.completions.create(**settings).choices[0]
        events = list(client.chat.completions.create(**settings, stream=True))
    assert whole.finish_reason == "stop"
    person = json.loads(whole.message.content or "")
    assert set(person) == {"name", "age"} and isinstance(person["age"], int) and len(person["name"]) <= 8
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.message.content


def test_the_client_parses(served: Served) -> None:
    class Person(BaseModel):
        name: str
        age: int

    with served.openai() as client:
        answer = client.chat.completions.parse(
            model="built-in",
            messages=[{"role": "user", "content": "who?"}],
            response_format=Person,
            max_tokens=300,
            seed=2,
        )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize(("way", "pattern"), WAYS, ids=str)
def test_every_way_to_ask(served: Served, way: dict[str, Any], pattern: str) -> None:
    """Each gives what the offline API gives for it."""
    settings = {"model": "built-in", "prompt": PROMPT, "max_tokens": 40, "seed": 1, "temperature": 0.7}
    with served.openai() as client:
        if "response_format" in way:
            way = {"extra_body": way}
        choice = client.completions.create(**settings, **way).choices[0]
    assert re.fullmatch(pattern, choice.text, re.DOTALL)
    body = way["extra_body"]
    asked = {name.removeprefix("guided_"): value for name, value in body.items() if name.startswith("guided_")}
    asked = asked or body.get("structured_outputs") or {"json_object": True}
    params = SamplingParams(max_tokens=40, seed=1, temperature=0.7, structured_outputs=asked)
    assert choice.text == llm().generate(PROMPT, params)[0].outputs[0].text


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"guided_regex": "("}, "unterminated"),
        ({"guided_json": {"enum": []}}, "enum"),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
        ({"guided_grammar": "nothing"}, "list of rules"),
        ({"guided_choice": []}, "empty"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "several"),
        ({"structured_outputs": {"regexp": "a"}}, "regexp"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
    ids=str,
)
def test_refusals(served: Served, body: dict[str, Any], word: str) -> None:
    with served.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="built-in", prompt="x", extra_body=body)
    assert word in str(caught.value) and "/" not in caught.value.body["message"].replace("and/or", "")  # type: ignore[index]


def keys(count: int, each: int) -> dict[str, Any]:
    inner = {f"x{i}": {"type": "integer", "minimum": i, "maximum": 10**9} for i in range(each)}
    return {"type": "object", "properties": {f"key{i}": {"type": "object", "properties": inner} for i in range(count)}}


ENDLESS = {
    "to compile": {"guided_json": keys(400, 30)},
    "to follow": {"guided_regex": "(" + "|".join(f"[{chr(97 + i % 26)}-z]{{1,200}}" for i in range(200)) + ")*"},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_grammar_that_takes_for_ever(served: Served, name: str) -> None:
    """It is abandoned, and requests that stream meanwhile continue."""
    with served.openai() as client, served.openai() as other:
        stream = other.completions.create(
            model="built-in", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        with pytest.raises(openai.BadRequestError, match="simpler"):
            client.completions.create(model="built-in", prompt="x", extra_body=ENDLESS[name])
        assert list(stream)[-1].choices[0].finish_reason == "length"
        answer = client.completions.create(model="built-in", prompt="x", extra_body={"guided_regex": "b"})
    assert answer.choices[0].text == "b"
    settle(served)


def test_many_requests_with_the_same_new_grammar(served: Served) -> None:
    """They share one trial, so they may be more than there are places to wait. One leaves; the others are served."""
    asked = {"guided_regex": "[st]r(id|ok)e"}
    with served.openai() as client, ThreadPoolExecutor(40) as threads:

        def ask(number: int) -> str | None:
            try:
                answer = client.with_options(max_retries=0, timeout=0.001 if number == 0 else 60).completions.create(
                    model="built-in", prompt=PROMPT, extra_body=asked
                )
            except openai.APITimeoutError:
                return None
            return answer.choices[0].text

        answers = list(threads.map(ask, range(40)))
    assert answers[0] is None and all(re.fullmatch("[st]r(id|ok)e", str(answer)) for answer in answers[1:])
    settle(served)
