"""`--per-request-spec-decode-metrics`: what answers say of their drafts is what the offline API says, at every door,
and only there where vLLM says it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from stridelm import LLM, SamplingParams
from stridelm.server.chunk import VERIFIED, Chunk
from stridelm.server.messages import Delta, Finish
from support.doubles.server import PROMPT, Served, gauges, serving, settle

Answer = dict[str, Any]
DOORS: dict[str, Answer] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}
SAME: Answer = {"temperature": 0.8, "seed": 7, "max_tokens": 40, "ignore_eos": True}
MTP = {"drafter": "mtp", "depth": 3}
PER_STEP = {"per_step_accepted", "per_step_drafted"}
OPTION = "--per-request-spec-decode-metrics"


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With two front-ends."""
    with serving(tmp_path_factory.mktemp("summary"), OPTION, "summary", "--api-server-count", "2") as served:
        yield served
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


@cache
def llm() -> LLM:
    return LLM(max_model_len=512, depth=3, per_request_spec_decode_metrics="detailed")


def offline(prompt: str | list[int], speculation: Any = MTP, **params: Any) -> Answer:
    """What the offline API says, as JSON."""
    [output] = llm().generate([prompt], SamplingParams(**{**SAME, **params}, speculation=speculation))
    assert output.metrics is not None and output.metrics.speculative_decoding is not None
    said: Answer = json.loads(json.dumps(output.metrics.speculative_decoding.as_json()))
    return said


def whole(served: Served, door: str, speculation: Any = MTP, **params: Any) -> Answer:
    with served.http() as client:
        answer = client.post(door, json={**DOORS[door], **SAME, "speculation": speculation, **params})
    said: Answer = answer.raise_for_status().json()
    return said


def stream(served: Served, door: str, *, speculation: Any = MTP, **params: Any) -> list[Answer]:
    body = {**DOORS[door], **SAME, "speculation": speculation, "stream": True, **params}
    with served.http() as client:
        text = client.post(door, json=body).raise_for_status().text
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize("speculation", [MTP, {"drafter": "mask", "depth": 2}, "ngram"], ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_answers_say_what_offline_says(detailed: Served, door: str, speculation: Any) -> None:
    """Whole, and in a stream in its last event, which has the usage."""
    answer = whole(detailed, door, speculation, return_token_ids=True)
    expected = offline(answer["choices"][0]["prompt_token_ids"], speculation)
    assert answer["metrics"] == {"speculative_decoding": expected}
    assert set(expected) >= PER_STEP and sum(expected["per_step_accepted"]) > 0
    events = stream(detailed, door, speculation=speculation, stream_options={"include_usage": True})
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 40
    assert events[-1]["metrics"] == {"speculative_decoding": expected}
    assert not any("metrics" in event for event in events[:-1])


@pytest.mark.parametrize("door", DOORS)
def test_a_stream_without_usage_has_none(detailed: Served, door: str) -> None:
    assert not any("metrics" in event for event in stream(detailed, door))


@pytest.mark.parametrize("door", DOORS)
def test_with_usage_in_every_event_only_the_last_has_them(detailed: Served, door: str) -> None:
    expected = whole(detailed, door)["metrics"]
    for at_end in (False, True):
        options = {"continuous_usage_stats": True, "include_usage": at_end}
        events = stream(detailed, door, stream_options=options)
        told = [event.get("metrics") for event in events if "usage" in event]
        assert len(told) > 2 and told == [None] * (len(told) - 1) + [expected]
        assert (events[-1]["choices"] == []) == at_end


@pytest.mark.parametrize("door", DOORS)
def test_only_of_a_single_sample_that_drafts(detailed: Served, door: str) -> None:
    cases: list[Answer] = [{"n": 2}, {"speculation": "off"}]
    if door == "/v1/completions":
        cases.append({"prompt": [PROMPT, PROMPT]})
    for case in cases:
        asked = {"max_tokens": 4, **case}
        assert "metrics" not in whole(detailed, door, **asked)
        for options in ({"include_usage": True}, {"continuous_usage_stats": True}):
            events = stream(detailed, door, **asked, stream_options=options)
            assert "usage" in events[-1] and not any("metrics" in event for event in events)


@pytest.mark.parametrize("door", DOORS)
def test_a_summary_has_no_steps(summary: Served, door: str) -> None:
    """From both front-ends: connections take turns."""
    prompt = whole(summary, door, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    expected = {name: value for name, value in offline(prompt).items() if name not in PER_STEP}
    for _ in range(4):
        assert whole(summary, door)["metrics"] == {"speculative_decoding": expected}
        events = stream(summary, door, stream_options={"include_usage": True})
        assert events[-1]["metrics"] == {"speculative_decoding": expected}


@pytest.mark.parametrize("door", DOORS)
def test_none_unless_the_operator_asks(served: Served, door: str) -> None:
    assert "metrics" not in whole(served, door)
    assert not any("metrics" in event for event in stream(served, door, stream_options={"include_usage": True}))


def test_they_add_up_to_what_prometheus_is_told(summary: Served) -> None:
    names = {
        "num_spec_steps": "vllm:spec_decode_num_drafts_total",
        "num_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "num_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    }
    settle(summary)
    before, told = gauges(summary), []
    for speculation in (MTP, "ngram", "suffix", {"drafter": "mask", "acceptance": "trust"}):
        told.append(whole(summary, "/v1/completions", speculation)["metrics"]["speculative_decoding"])
    settle(summary)
    after = gauges(summary)
    for name, counter in names.items():
        assert after[counter] - before[counter] == sum(one[name] for one in told) > 0


def test_a_client_of_openai_finds_them(detailed: Served) -> None:
    with detailed.openai() as client:
        settings = {"model": "built-in", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        answer = client.completions.create(**settings)
        last = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))[-1]
    told = answer.model_extra["metrics"]["speculative_decoding"]
    assert told["num_spec_steps"] == sum(told["acceptance_histogram"]) == len(told["per_step_drafted"]) > 0
    assert last.model_extra["metrics"]["speculative_decoding"] == told


def test_what_waits_to_be_read_counts_its_steps() -> None:
    """An answer that nobody reads is bounded by what it holds, these lists included."""
    [output] = llm().generate([PROMPT], SamplingParams(**SAME, speculation=MTP))
    assert output.metrics is not None and output.metrics.speculative_decoding is not None
    plain = replace(output.metrics, speculative_decoding=None)
    long, short = (Chunk.of(Delta("g.0", [], finish=Finish("length", None, one))) for one in (output.metrics, plain))
    assert long.held - short.held == VERIFIED * output.metrics.speculative_decoding.num_spec_steps > 0
