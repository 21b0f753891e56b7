"""Parameters that cannot change an answer are accepted, with any value, and have no effect; those that are not
implemented are accepted with values that ask for nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stridelm.server.errors import ApiError
from stridelm.server.large import SMALL_BODY
from stridelm.server.openai.inert import TABLE, UNSUPPORTED, InertFields
from stridelm.server.openai.schemas import ChatRequest, CompletionRequest
from support.checks.bodies import BODIES
from support.doubles.server import Served

VALUES: dict[str, list[Any]] = {
    "user": ["u-1"],
    "safety_identifier": ["u-1"],
    "metadata": [{}, {"run": "7", "team": "a"}],
    "store": [True, False],
    "service_tier": ["auto", "default", "flex", "scale", "priority", "fast"],
    "prompt_cache_key": ["k"],
    "prompt_cache_retention": ["in_memory", "in-memory", "24h"],
    "prompt_cache_options": [{}, {"mode": "implicit", "ttl": "30m"}],
    "verbosity": ["low", "medium", "high"],
    "request_id": ["r-1"],
    "session_id": ["s-1"],
    "prediction": [
        {"type": "content", "content": "return 1"},
        {"type": "content", "content": [{"type": "text", "text": "return 1"}]},
    ],
}
WRONG: dict[str, list[Any]] = {
    "user": [7],
    "safety_identifier": [["u"]],
    "metadata": [{"a": 1}, {str(i): "" for i in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}, "a"],
    "store": ["yes"],
    "service_tier": ["gold"],
    "prompt_cache_key": [1],
    "prompt_cache_retention": ["1h"],
    "prompt_cache_options": [{"mode": "none"}, "implicit"],
    "verbosity": ["loud"],
    "request_id": [1],
    "session_id": [1],
    "prediction": ["return 1", {"type": "content"}, {"type": "content", "content": [{"type": "image_url"}]}],
}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def f(x):"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def f(x):"}]},
}
NOT_THE_ANSWER = ("id", "created", "service_tier")
SAMPLES: list[Any] = [True, False, 0, 1, 2, -1, 0.5, "x", "none", [], ["x"], [1], {}, {"x": 1}]
SAMPLING: dict[str, Any] = {
    "model": None,
    "logit_bias": None,
    "n": 1,
    "seed": None,
    "stream": False,
    "stream_options": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "response_format": None,
    "cache_salt": None,
    "user": None,
    "session_id": None,
    "return_token_ids": False,
}
"""What complete requests of vLLM and SGLang both have."""
VLLM: dict[str, Any] = {
    "frequency_penalty": None,
    "presence_penalty": None,
    "use_beam_search": False,
    "watermarking": None,
    "length_penalty": 1.0,
    "include_stop_str_in_output": False,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "structured_outputs": None,
    "priority": 0,
    "request_id": "5f0c",
    "return_tokens_as_token_ids": None,
    "routed_experts_prompt_start": 0,
    "return_token_offsets": False,
    "return_mm_kwargs": True,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "vllm_xargs": None,
    "repetition_detection": None,
    "stream_interval": None,
    "thinking_token_budget": None,
}
SGLANG: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "return_hidden_states": False,
    "lora_path": None,
    "return_routed_experts": False,
    "routed_experts_start_len": 0,
    "return_cached_tokens_details": False,
    "regex": None,
    "ebnf": None,
    "stop_regex": None,
    "no_stop_trim": False,
    "session_params": None,
    "rid": None,
    "custom_params": None,
    "custom_logit_processor": None,
    "images_config": None,
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "routed_dp_rank": None,
    "disagg_prefill_dp_rank": None,
    "data_parallel_rank": None,
    "extra_key": None,
    "ngram_corpus_id": None,
    "priority": None,
}
ROUTER: dict[str, Any] = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
    "stream": False,
}
WHOLE: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/completions": {
        "vllm": {**VLLM, "echo": False, "logprobs": None, "suffix": None, "prompt_embeds": None},
        "sglang": {**SGLANG, "best_of": None, "echo": False, "logprobs": None, "suffix": None, "json_schema": None},
        "routers": ROUTER,
    },
    "/v1/chat/completions": {
        "vllm": {
            **VLLM,
            "logprobs": False,
            "top_logprobs": 0,
            "max_completion_tokens": None,
            "tools": None,
            "tool_choice": "none",
            "reasoning_effort": None,
            "include_reasoning": True,
            "echo": False,
            "parallel_tool_calls": True,
            "continue_final_message": False,
            "add_special_tokens": False,
            "add_generation_prompt": True,
            "documents": None,
            "chat_template": None,
            "chat_template_kwargs": None,
            "media_io_kwargs": None,
            "mm_processor_kwargs": None,
            "return_prompt_text": None,
        },
        "sglang": {
            **SGLANG,
            "logprobs": False,
            "top_logprobs": None,
            "max_completion_tokens": None,
            "tools": None,
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "return_prompt_token_ids": False,
            "task": None,
            "return_meta_info": False,
            "reasoning_effort": None,
            "continue_final_message": False,
            "separate_reasoning": True,
            "stream_reasoning": True,
            "chat_template_kwargs": None,
            "input_ids": None,
            "max_dynamic_patch": None,
            "min_dynamic_patch": None,
            "use_audio_in_video": False,
        },
        "openai": {
            "audio": None,
            "functions": None,
            "function_call": None,
            "web_search_options": None,
            "moderation": None,
            "modalities": None,
            "store": None,
            "verbosity": None,
            "prediction": None,
            "service_tier": None,
        },
        "routers": {
            **ROUTER,
            "logprobs": False,
            "continue_final_message": False,
            "separate_reasoning": True,
            "stream_reasoning": True,
            "include_reasoning": True,
        },
    },
}
"""Requests as libraries and routers write them, with every default."""

pytestmark = pytest.mark.parametrize("route", ROUTES)


def unsupported(route: str) -> list[str]:
    """The table's names, without those that are fields of the route."""
    [model] = BODIES[route]
    return [name for name in UNSUPPORTED if name not in model.model_fields]


def equal(value: Any, inert: Any) -> bool:
    """As JSON, where true is not 1."""
    return type(value) is type(inert) and value == inert


def ask(served: Served, route: str, **more: Any) -> dict[str, Any]:
    body = {**ROUTES[route], "temperature": 1, "seed": 3, "max_tokens": 6, **more}
    with served.http() as client:
        answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_they_change_no_answer(served: Served, route: str) -> None:
    """Each of them, with each allowed value or null, leaves every choice and the usage unchanged."""
    assert set(VALUES) == set(WRONG) == set(InertFields.model_fields)

    def told(**more: Any) -> dict[str, Any]:
        # At a fixed depth, since a chosen one depends on the time that steps take, and choices tell what was drafted.
        told = ask(served, route, speculation={"drafter": "mtp", "depth": 2}, **more)
        told["usage"].pop("prompt_tokens_details")  # the prefix is cached by now
        return {name: value for name, value in told.items() if name not in NOT_THE_ANSWER}

    plain = told()
    for name, values in VALUES.items():
        assert told(**{name: values[0]}) == plain, name
    for turn in zip(*[[*values, None, None, None, None, None][:6] for values in VALUES.values()]):
        assert told(**dict(zip(VALUES, turn))) == plain


def test_their_types_are_checked(served: Served, route: str) -> None:
    """A value that OpenAI would refuse is refused here, by name."""
    with served.http() as client:
        for name, values in WRONG.items():
            for value in values:
                answer = client.post(route, json={**ROUTES[route], name: value})
                assert answer.status_code == 400, (name, value, answer.text)
                assert answer.json()["error"]["param"].startswith(name)


def test_audio_is_refused_with_what_to_do(served: Served, route: str) -> None:
    with served.http() as client:
        answer = client.post(route, json={**ROUTES[route], "modalities": ["text", "audio"]})
    assert "leave modalities out" in answer.json()["error"]["message"]


def test_the_tier_is_told_to_those_who_ask(served: Served, route: str) -> None:
    """Whichever is requested, the response and each event of a stream name the one used: the only one."""
    assert "service_tier" not in ask(served, route)
    assert ask(served, route, service_tier="flex")["service_tier"] == "default"
    with served.http() as client:
        body = {**ROUTES[route], "max_tokens": 60, "service_tier": "auto", "stream": True}
        lines = [line for line in client.post(route, json=body).text.splitlines() if line[:6] == "data: "]
    assert len(lines) > 2 and all('"service_tier":"default"' in line for line in lines[:-1])


def test_whole_requests(served: Served, route: str) -> None:
    """What clients and routers send when nobody asked for anything is answered as if it had not been sent."""
    plain = ask(served, route)["choices"]
    for who, more in WHOLE[route].items():
        base = SAMPLING if who in ("vllm", "sglang") else {}
        assert ask(served, route, **{**base, **more, "seed": 3})["choices"] == plain, who


def test_what_asks_for_nothing_is_accepted(served: Served, route: str) -> None:
    """Every name of the table, null and with each of its inert values."""
    plain = ask(served, route, max_tokens=1)["choices"]
    for name in unsupported(route):
        for value in (None, *UNSUPPORTED[name][1:]):
            assert ask(served, route, max_tokens=1, **{name: value})["choices"] == plain, (name, value)


def test_what_asks_for_more_is_refused(served: Served, route: str) -> None:
    """Every name of the table, with any other value: 400, which names it and says what to do instead."""
    [(model, base)] = BODIES[route].items()
    with served.http() as client:
        for name in unsupported(route):
            instead, *inert = UNSUPPORTED[name]
            others = [value for value in SAMPLES if not any(equal(value, one) for one in inert)]
            for value in others:
                with pytest.raises(ApiError, match=name):
                    model.model_validate({**base, name: value})
            answer = client.post(route, json={**ROUTES[route], name: others[0]})
            assert answer.status_code == 400, (name, others[0], answer.text)
            error = answer.json()["error"]
            assert error["param"] == name and error["message"] == f"{name}: {instead}"
        body = json.dumps({**ROUTES[route], "use_beam_search": True})
        for size in (0, SMALL_BODY):  # a worker reads what is large
            headers = {"content-type": "application/json"}
            answer = client.post(route, content=body + " " * size, headers=headers)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "use_beam_search"


def test_the_table_is_read(route: str) -> None:
    """Every name is refused by one of the routes at least, and is not a name of OpenAI's that is accepted."""
    everywhere = CompletionRequest.model_fields.keys() & ChatRequest.model_fields.keys()
    assert not UNSUPPORTED.keys() & everywhere
    assert len(UNSUPPORTED) == sum(len(names.split()) for names in TABLE), "a name is in two rows"
