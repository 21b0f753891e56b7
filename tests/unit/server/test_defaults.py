"""What a request leaves out is what the checkpoint's authors recommend, on every route that generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.doubles.server import Served, serving

RECOMMENDED = {"temperature": 0.9, "top_k": 6, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.4}
LIMIT = 11
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def f(x):", "return_token_ids": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def f(x):"}], "return_token_ids": True},
    "/generate": {"text": "def f(x):"},
}


@pytest.fixture(scope="module")
def recommending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("recommending")
    content = {**RECOMMENDED, "max_new_tokens": LIMIT, "eos_token_id": 4088}
    (path / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    with serving(path, "--generation-config", str(path)) as served:
        yield served
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


def ask(served: Served, route: str, **params: Any) -> tuple[list[int], str]:
    """Token ids and the finish reason. Parameters have OpenAI's names."""
    body = {**ROUTES[route]}
    if route == "/generate":
        names = {"seed": "sampling_seed", "max_tokens": "max_new_tokens"}
        body["sampling_params"] = {names.get(name, name): value for name, value in params.items()}
    else:
        body |= params
    with served.http() as client:
        answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    if route == "/generate":
        return told["output_ids"], told["meta_info"]["finish_reason"]["type"]
    return told["choices"][0]["token_ids"], told["choices"][0]["finish_reason"]


@pytest.mark.parametrize("route", ROUTES)
def test_left_out_is_recommended(recommending: Served, served: Served, route: str) -> None:
    """The response equals that of a server without recommendations to a request that spells them out; a request that
    spells out neutral values gets the same from both."""
    same = {"seed": 5, "ignore_eos": True, "max_tokens": 8}
    for given in ({}, {"temperature": 0.0}, {"top_k": 0, "repetition_penalty": 1.0}):
        wanted = ask(served, route, **{**RECOMMENDED, **given, **same})
        assert ask(recommending, route, **given, **same) == wanted
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert ask(recommending, route, **neutral, **same) == ask(served, route, **same)


@pytest.mark.parametrize("route", ROUTES)
def test_no_request_exceeds_the_operators_limit(recommending: Served, route: str) -> None:
    """Whether it requests more, no limit at all, or nothing."""
    for given in ({"max_tokens": 400}, {"max_tokens": None}, {}):
        ids, why = ask(recommending, route, ignore_eos=True, seed=1, **given)
        assert (len(ids), why) == (LIMIT, "length")
    assert len(ask(recommending, route, ignore_eos=True, max_tokens=3)[0]) == 3


def test_one_line_says_so(recommending: Served, served: Served) -> None:
    lines = [line for line in recommending.log.read_text(encoding="utf-8").splitlines() if "request omits" in line]
    assert len(lines) == 1 and "temperature 0.9" in lines[0] and f"{LIMIT} tokens" in lines[0]
    assert "request omits" not in served.log.read_text(encoding="utf-8")
