"""What no text and no stack can hold is refused at the border: every string of a body, and its nesting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from stridelm.server.body import parsed
from stridelm.server.errors import ApiError
from stridelm.server.large import SMALL_BODY
from stridelm.server.sglang.schemas import NativeSampling
from stridelm.values import MAX_NESTING
from support.checks.bodies import BODIES
from support.doubles.server import PROMPT, Served

HALF = "\ud83d"
"""Half a surrogate pair."""
DEEP = json.loads('{"a":[' * 60 + "1" + "]}" * 60)
UNFIT = [HALF, [HALF], {HALF: 1}, {"a": [{"b": HALF}]}, DEEP, [DEEP]]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1},
    "/generate": {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}},
}


def bodies(route: str) -> Iterator[dict[str, Any]]:
    """Every field of the route's body, and an unknown one, with every unfit value."""
    base = BASES.get(route, {})
    names = {name for model in BODIES[route] for name in model.model_fields}
    for value in UNFIT:
        for name in sorted(names):
            yield {**base, name: value}
        if isinstance(value, str):
            yield {**base, value: 1}
        if route == "/generate":
            for name in NativeSampling.model_fields:
                yield {**base, "sampling_params": {"max_new_tokens": 1, name: value}}


@pytest.mark.parametrize("route", BODIES)
def test_every_field(served: Served, route: str) -> None:
    """In any field, at any depth, as a value or as a key: 400, whether or not the field is read."""
    with served.http() as client:
        for body in bodies(route):
            response = client.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
            assert response.status_code == 400, (body, response.text)
            assert response.json()["error"]["message"]


@pytest.mark.parametrize("value", UNFIT, ids=lambda value: str(type(value).__name__))
@pytest.mark.parametrize("route", BASES)
def test_large_bodies_are_refused_alike(served: Served, route: str, value: Any) -> None:
    """A worker that reads a large body refuses what the event loop refuses in a small one, in the same words."""
    text = json.dumps({**BASES[route], "user" if route != "/generate" else "cache_salt": value})
    with served.http() as client:
        small, large = (
            client.post(route, content=body, headers={"content-type": "application/json"})
            for body in (text, text + " " * SMALL_BODY)
        )
    assert small.status_code == large.status_code == 400 and small.json() == large.json()


@pytest.mark.parametrize("path", ["chat_template_kwargs", "tools", "response_format", "guided_json"])
def test_nesting_up_to_the_limit(served: Served, path: str) -> None:
    """What is nested just within the limit never fails inside: it is served, or refused for another reason."""
    inner: Any = 1
    for _ in range(MAX_NESTING - 5):
        inner = {"a": inner}
    values: dict[str, Any] = {
        "chat_template_kwargs": {"x": inner},
        "tools": [inner],
        "response_format": {"type": "json_schema", "json_schema": {"schema": inner}},
        "guided_json": inner,
    }
    with served.http() as client:
        response = client.post("/v1/chat/completions", json={**BASES["/v1/chat/completions"], path: values[path]})
    assert response.status_code in (200, 400) and "nested" not in response.text


def test_the_limit() -> None:
    """A body may have values with MAX_NESTING levels, and no more, however much deeper they are."""
    for levels, fits in ((MAX_NESTING, True), (MAX_NESTING + 1, False), (100_000, False)):
        body = b'{"a":' + b"[" * levels + b"]" * levels + b"}"
        if fits:
            assert "a" in parsed(body)
            continue
        with pytest.raises(ApiError, match="nested more than"):
            parsed(body)


@pytest.mark.parametrize(
    "tree", ["-" * 30_000 + "1", "1+" * 12_000 + "1", "a." * 12_000 + "a", "not " * 7_000, "(" * 30_000]
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_token_tree_that_is_a_program(served: Served, route: str, tree: str) -> None:
    """Text that a parser could exhaust its stack on is refused."""
    with served.http() as client:
        response = client.post(route, json={**BASES[route], "speculation": {"token_tree": tree}})
    assert response.status_code == 400 and "token_tree takes paths of ranks" in response.text
