"""A null is the same as nothing, whatever the field; and fields of reasoning models are accepted."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from stridelm.builtin import builtin_path
from stridelm.server.errors import ApiError
from stridelm.server.openai.conversation import conversation_text
from stridelm.server.openai.schemas import ChatRequest, StreamOptions
from stridelm.server.sglang.schemas import NativeSampling
from stridelm.text.tokenizer import Tokenizer
from support.checks.bodies import BODIES, CHAT
from support.doubles.server import Served

MODELS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    *[body for models in BODIES.values() for body in models.items()],
    (NativeSampling, {}),
    (StreamOptions, {}),
]
ELSEWHERE = ["functions", "function_call", "audio", "web_search_options", "tools", "truncate_prompt_tokens", "lora"]
"""Fields of other servers, most of them unknown here."""


@pytest.mark.parametrize(("model", "base"), MODELS)
def test_null_is_absent(model: type[BaseModel], base: dict[str, Any]) -> None:
    """Of every field of every body, and of names that are not known. An unknown name with a value is refused."""
    plain = model.model_validate(base)
    for name in [*model.model_fields, *ELSEWHERE]:
        if name not in base and (model, name) != (NativeSampling, "max_new_tokens"):  # there null is a value
            assert model.model_validate({**base, name: None}) == plain, name
    with pytest.raises((ValidationError, ApiError), match="functions"):
        model.model_validate({**base, "functions": []})


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", None])
def test_reasoning_effort_goes_to_the_template(effort: str | None) -> None:
    """As a variable, which is not defined if the request has none; given a second time it is refused."""
    tokenizer = Tokenizer.load(builtin_path())
    tokenizer.hf.chat_template = "{{ reasoning_effort if reasoning_effort is defined else 'undefined' }}"
    body = ChatRequest.model_validate({**CHAT, "reasoning_effort": effort})
    assert conversation_text(body, tokenizer) == (effort or "undefined")
    twice = body.model_copy(update={"chat_template_kwargs": {"reasoning_effort": "low"}})
    if effort is not None:
        with pytest.raises(ApiError, match="give only one"):
            conversation_text(twice, tokenizer)


def test_over_http(served: Served) -> None:
    """What clients and routers of reasoning models send changes nothing here; what OpenAI would refuse is refused."""
    body = {**CHAT, "max_tokens": 4, "temperature": 0}
    with served.http() as client:
        plain = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        asked: list[dict[str, Any]] = [{name: None} for name in ELSEWHERE]
        asked += [{"reasoning_effort": "low"}, {"include_reasoning": True}, {"include_reasoning": False}]
        for more in asked:
            answer = client.post("/v1/chat/completions", json={**body, **more})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"] == plain
        for wrong in ({"reasoning_effort": "most"}, {"include_reasoning": "yes"}, {"audio": {"voice": "alloy"}}):
            assert client.post("/v1/chat/completions", json={**body, **wrong}).status_code == 400
