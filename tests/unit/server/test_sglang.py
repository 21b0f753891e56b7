"""SGLang's API against the offline one: /generate, and the other routes that its clients use."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from stridelm import SamplingParams
from stridelm.builtin import builtin_path
from stridelm.server.errors import ApiError
from stridelm.server.generation import Generation
from stridelm.server.messages import Abort
from stridelm.server.sglang.rids import Call, Rids
from stridelm.text.tokenizer import Tokenizer
from support.doubles.server import PROMPT, Served, llm, offline, serving, settle, until

OTHER = "import os\n\n\ndef walk(path):\n"
GREEDY = {"temperature": 0, "max_new_tokens": 12}
MASK = json.loads((builtin_path() / "config.json").read_text(encoding="utf-8"))["mask_token_id"]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(builtin_path())


@cache
def ids() -> list[int]:
    """The prompt's."""
    return tokenizer().encode(PROMPT)


def post(served: Served, path: str = "/generate", /, **body: Any) -> Any:
    """The response, which must be a success."""
    with served.http() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, read as SGLang's benchmark reads them."""
    with served.http() as client, client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.strip()]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_says_what_offline_says(served: Served) -> None:
    """Text or ids, alone or in a list, which has a list of answers."""
    settings = {"temperature": 0.8, "sampling_seed": 7, "max_new_tokens": 30}
    [expected] = offline([PROMPT], temperature=0.8, seed=7, max_tokens=30, speculation="off")
    alone = [
        post(served, text=PROMPT, sampling_params=settings),
        post(served, input_ids=ids(), sampling_params=settings),
    ]
    listed = post(served, text=[PROMPT], sampling_params=settings)
    assert isinstance(listed, list) and len(listed) == 1
    for answer in (*alone, *listed):
        assert (answer["text"], answer["output_ids"]) == (expected.text, expected.token_ids)
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 30}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(ids()), 30)
        assert meta["id"] and 0 < meta["e2e_latency"] < 60 and meta["lossless"] is True


def test_defaults_are_those_of_the_api(served: Served) -> None:
    """128 tokens at temperature 1; null is no limit."""
    usual = post(served, text=PROMPT, sampling_params={"ignore_eos": True})
    assert usual["meta_info"]["completion_tokens"] == 128
    free = post(served, text=PROMPT, sampling_params={"max_new_tokens": None, "ignore_eos": True, "temperature": 0})
    assert free["meta_info"]["completion_tokens"] == 512 - len(ids())
    assert len({post(served, text=PROMPT)["text"] for _ in range(3)}) > 1


def test_lists_and_parameters_for_each(served: Served) -> None:
    each = [{"temperature": 0, "max_new_tokens": 5}, {"temperature": 0, "max_new_tokens": 9, "min_new_tokens": 9}]
    answers = post(served, text=[PROMPT, OTHER], sampling_params=each, return_logprob=[False, True])
    short, long = (
        offline([PROMPT], temperature=0, max_tokens=5)[0],
        offline([OTHER], temperature=0, max_tokens=9, min_tokens=9)[0],
    )
    assert [answer["output_ids"] for answer in answers] == [short.token_ids, long.token_ids]
    assert "output_token_logprobs" not in answers[0]["meta_info"]
    assert len(answers[1]["meta_info"]["output_token_logprobs"]) == 9


def test_samples_come_in_a_flat_list(served: Served) -> None:
    settings = {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 10, "n": 2}
    expected = [
        one.text
        for out in llm().generate([PROMPT, OTHER], SamplingParams(n=2, seed=5, max_tokens=10))
        for one in out.outputs
    ]
    assert [one["text"] for one in post(served, text=[PROMPT, OTHER], sampling_params=settings)] == expected
    assert [one["text"] for one in post(served, text=PROMPT, sampling_params=settings)] == expected[:2]
    assert len(set(expected)) > 2


def test_stream_is_cumulative(served: Served) -> None:
    whole = post(served, text=PROMPT, sampling_params=GREEDY, return_logprob=True, rid="whole")
    told = events(served, text=PROMPT, sampling_params=GREEDY, return_logprob=True, rid="told")
    assert len(told) > 1
    for earlier, later in pairwise(told):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
    for one in told:
        count = len(one["output_ids"])
        assert one["meta_info"]["id"] == "told" and one["meta_info"]["completion_tokens"] == count
        assert one["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:count]
    assert (told[-1]["text"], told[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert told[-1]["meta_info"].keys() == whole["meta_info"].keys()


def test_stream_of_several_says_which(served: Served) -> None:
    expected = [one.text for one in offline([PROMPT, OTHER], temperature=0, max_tokens=12)]
    last = {one["index"]: one for one in events(served, text=[PROMPT, OTHER], sampling_params=GREEDY)}
    assert [last[index]["text"] for index in range(2)] == expected
    assert all(one["meta_info"]["finish_reason"]["type"] == "length" for one in last.values())


def test_stops(served: Served) -> None:
    """The finish reason names it: a string, a token, or the model's own end."""
    free = post(served, text=PROMPT, sampling_params={**GREEDY, "max_new_tokens": 40})
    word, token = free["text"][8:11], free["output_ids"][6]
    cut = post(served, text=PROMPT, sampling_params={**GREEDY, "stop": [word, "never said"]})
    assert cut["text"] == free["text"][: free["text"].index(word)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    kept = post(served, text=PROMPT, sampling_params={**GREEDY, "stop": word, "no_stop_trim": True})
    assert kept["text"] == cut["text"] + word
    by_id = post(served, text=PROMPT, sampling_params={**GREEDY, "stop_token_ids": [token]})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert by_id["output_ids"] == free["output_ids"][: free["output_ids"].index(token) + 1]
    end = tokenizer().eos_ids[0]
    ended = post(served, text=PROMPT, sampling_params={**GREEDY, "logit_bias": {str(end): 100}})
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert (ended["text"], ended["output_ids"]) == ("", [end])


@pytest.mark.parametrize("speculation", ["off", {"drafter": "mtp", "depth": 2}], ids=str)
def test_logprobs(served: Served, speculation: object) -> None:
    """Those of the offline API, of the output and of the prompt from some position on."""
    asked: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": 3,
        "prompt_logprobs": 3,
        "speculation": "off",
    }
    out = llm().generate(PROMPT, SamplingParams(**asked))[0]
    settings = {"temperature": 0, "max_new_tokens": 8, "speculation": speculation}
    answer = post(
        served,
        text=PROMPT,
        sampling_params=settings,
        return_logprob=True,
        logprob_start_len=4,
        top_logprobs_num=3,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    expected = out.outputs[0]
    assert expected.logprobs is not None and out.prompt_logprobs is not None
    assert meta["output_token_logprobs"] == [
        [pytest.approx(entry[token].logprob, abs=1e-5), token, entry[token].decoded_token]
        for entry, token in zip(expected.logprobs, expected.token_ids)
    ]
    first, *told = meta["input_token_logprobs"]
    assert first == [None, ids()[4], tokenizer().token_text(ids()[4])] and meta["input_top_logprobs"][0] is None
    entries: list[Any] = out.prompt_logprobs[5:]
    assert [one[:2] for one in told] == [
        [pytest.approx(entry[token].logprob, abs=1e-5), token] for entry, token in zip(entries, ids()[5:])
    ]
    for tops, sources in (
        (meta["output_top_logprobs"], expected.logprobs),
        (meta["input_top_logprobs"][1:], entries),
    ):
        assert len(tops) == len(sources)
        for top, entry in zip(tops, sources):
            likeliest = sorted((e.rank, t) for t, e in entry.items() if e.rank <= 3)
            assert [one[1] for one in top] == [token for _, token in likeliest]
            assert [one[0] for one in top] == sorted((one[0] for one in top), reverse=True)


def test_which_logprobs_are_told(served: Served) -> None:
    """None unless requested; the output's by default; of the prompt up to all, without text unless requested."""
    settings = {"temperature": 0, "max_new_tokens": 2}
    silent = post(served, text=PROMPT, sampling_params=settings, logprob_start_len=0, top_logprobs_num=2)
    assert not any("logprobs" in name for name in silent["meta_info"])
    output = post(served, text=PROMPT, sampling_params=settings, return_logprob=True)["meta_info"]
    assert output["input_token_logprobs"] == [] and len(output["output_token_logprobs"]) == 2
    assert "output_top_logprobs" not in output and output["output_token_logprobs_length"] == 2
    whole = post(served, text=PROMPT, sampling_params=settings, return_logprob=True, logprob_start_len=0)["meta_info"]
    assert [one[1] for one in whole["input_token_logprobs"]] == ids()
    assert whole["output_token_logprobs"] == output["output_token_logprobs"]
    assert all(one[2] is None for one in whole["input_token_logprobs"] + whole["output_token_logprobs"])
    end = post(served, input_ids=ids(), sampling_params=settings, return_logprob=True, logprob_start_len=len(ids()))
    assert end["meta_info"]["input_token_logprobs"] == []


@pytest.mark.parametrize("chosen", [[300, 7], [[300, 7], [9]]], ids=["for all", "one each"])
def test_logprobs_of_chosen_tokens(served: Served, chosen: list[Any]) -> None:
    """In the requested order, at every position, whether likely or not."""
    settings = {"temperature": 0, "max_new_tokens": 3}
    asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": chosen}
    answers = post(served, text=[PROMPT, OTHER], sampling_params=settings, return_text_in_logprobs=True, **asked)
    each = [chosen, chosen] if isinstance(chosen[0], int) else chosen
    for answer, prompt, wanted in zip(answers, (PROMPT, OTHER), each, strict=True):
        params: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": 3,
            "logprobs": 0,
            "prompt_logprobs": 0,
            "logprob_token_ids": wanted,
        }
        out = llm().generate(prompt, SamplingParams(**params))[0]
        first, *told = answer["meta_info"]["input_token_ids_logprobs"]
        told += answer["meta_info"]["output_token_ids_logprobs"]
        assert out.prompt_logprobs is not None and out.outputs[0].logprobs is not None
        entries: list[Any] = [*out.prompt_logprobs[1:], *out.outputs[0].logprobs]
        assert first is None and told == [
            [[pytest.approx(entry[t].logprob, abs=1e-5), t, tokenizer().token_text(t)] for t in wanted]
            for entry in entries
        ]


def test_hidden_states(tmp_path: Path) -> None:
    """Those of the offline API: the prompt's in one list, then a vector for each token that was run."""
    with serving(tmp_path, "--enable-return-hidden-states") as server:
        settings = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
        asked: dict[str, Any] = {
            "text": [PROMPT, OTHER],
            "return_hidden_states": [True, False],
            "sampling_params": settings,
        }
        answer, other = post(server, **asked)
        *_, last = events(server, text=PROMPT, return_hidden_states=True, sampling_params=settings)
        scored = post(server, text=PROMPT, return_hidden_states=True, sampling_params={"max_new_tokens": 0})
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, return_hidden_states=True)
    expected = llm().generate(PROMPT, params)[0].outputs[0].hidden_states
    assert expected is not None
    prompt, *rest = answer["meta_info"]["hidden_states"]
    assert [*prompt, *rest] == expected.tolist() and len(prompt) == len(ids())
    assert last["meta_info"]["hidden_states"] == answer["meta_info"]["hidden_states"]
    assert scored["meta_info"]["hidden_states"] == [prompt]
    assert "hidden_states" not in other["meta_info"]


def test_scoring_generates_nothing(served: Served) -> None:
    """max_new_tokens 0, as the frontend's select and evaluation harnesses have it, streamed or not."""
    settings = {"max_new_tokens": 0, "temperature": 0}
    asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    answers = post(served, text=[PROMPT, OTHER], sampling_params=settings, **asked)
    outs = llm().generate([PROMPT, OTHER], SamplingParams(max_tokens=1, prompt_logprobs=1))
    for answer, out in zip(answers, outs, strict=True):
        meta = answer["meta_info"]
        assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert meta["output_token_logprobs"] == meta["output_top_logprobs"] == []
        assert out.prompt_logprobs is not None
        scored: list[Any] = out.prompt_logprobs[1:]
        own = [entry[t].logprob for entry, t in zip(scored, out.prompt_token_ids[1:])]
        assert [one[0] for one in meta["input_token_logprobs"]] == [None, *(pytest.approx(p, abs=1e-5) for p in own)]
    [told] = events(served, text=PROMPT, sampling_params=settings, **asked)
    assert (
        told["text"] == ""
        and told["meta_info"]["input_token_logprobs"] == (answers[0]["meta_info"]["input_token_logprobs"])
    )
    end = {str(tokenizer().eos_ids[0]): 100}  # this token ends the text and is not shown
    warmed = post(served, text=PROMPT, sampling_params={**settings, "logit_bias": end})
    assert warmed["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert warmed["meta_info"]["prompt_tokens"] == len(ids()) and warmed["output_ids"] == []


def test_evaluation_harness_reads_it(served: Served) -> None:
    """lm-evaluation-harness scores continuations so: a list of ids, and the entries behind the context."""
    tokens, context = ids() + tokenizer().encode(OTHER), len(ids())
    answers = post(
        served,
        input_ids=[tokens],
        sampling_params={"max_new_tokens": 1, "temperature": 0},
        logprob_start_len=0,
        top_logprobs_num=1,
        return_logprob=True,
    )
    meta = answers[0]["meta_info"]
    summed = sum(one[0] for one in meta["input_token_logprobs"][context:])
    out = llm().generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    assert out.prompt_logprobs is not None
    entries: list[Any] = list(zip(out.prompt_logprobs[context:], tokens[context:], strict=True))
    assert summed == pytest.approx(sum(entry[token].logprob for entry, token in entries), abs=1e-3)
    best = [top[0][1] for top in meta["input_top_logprobs"][context:]]
    assert best == [next(t for t, e in entry.items() if e.rank == 1) for entry, _ in entries]


def test_benchmark_reads_it(served: Served) -> None:
    """sglang.bench_serving's own request and what it takes from the events and from the server's information."""
    told = events(
        served,
        text=PROMPT,
        sampling_params={"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True},
        lora_path=None,
        return_logprob=False,
        return_routed_experts=False,
        logprob_start_len=-1,
        speculation={"drafter": "mtp", "depth": 2},
    )
    text, output_len, gaps = "", 0, 0
    for data in told:
        if data.get("text"):
            gaps += data["meta_info"]["completion_tokens"] - output_len
            text, output_len = data["text"], data["meta_info"]["completion_tokens"]
    [expected] = offline([PROMPT], temperature=0, max_tokens=24, ignore_eos=True)
    assert (text, output_len, gaps) == (expected.text, 24, 24)
    assert told[-1]["meta_info"]["spec_accept_length"] > 1
    with served.http() as client:
        client.post("/flush_cache", params={"timeout": 60.0}).raise_for_status()
        info = client.get("/get_server_info").json()
    assert info["internal_states"][0].get("avg_spec_accept_length") > 1


@pytest.mark.parametrize(
    ("asked", "offline_asked"),
    [
        ({"regex": "[ab]{4}"}, {"regex": "[ab]{4}"}),
        ({"json_schema": '{"enum": ["one", "two"]}'}, {"json": '{"enum": ["one", "two"]}'}),
        ({"ebnf": 'root ::= "x" root | "y"'}, {"grammar": 'root ::= "x" root | "y"'}),
        ({"json_schema": "$$ANY$$"}, {"json_object": True}),
    ],
    ids=str,
)
def test_structured_output(served: Served, asked: dict[str, str], offline_asked: dict[str, object]) -> None:
    answer = post(served, text=PROMPT, sampling_params={**GREEDY, **asked, "max_new_tokens": 20})
    [expected] = offline([PROMPT], temperature=0, max_tokens=20, structured_outputs=offline_asked)
    assert answer["text"] == expected.text and answer["output_ids"] == expected.token_ids


def test_router_reads_it(served: Served) -> None:
    """The fields that sglang's router adds to every request, and its check of a worker."""
    answer = post(
        served,
        text=PROMPT,
        model=None,
        sampling_params={**GREEDY, "stop": [], "stop_token_ids": [], "stop_regex": [], "regex": None, "n": 1},
        **dict.fromkeys(("return_text_in_logprobs", "stream", "return_hidden_states", "return_routed_experts"), False),
        **dict.fromkeys(("background", "no_logs", "return_bytes", "return_entropy"), False),
        log_metrics=True,
        lora_path="",
        image_data=[None],
    )
    assert len(answer["output_ids"]) == 12
    with served.http() as client:
        server, model = client.get("/server_info").json(), client.get("/model_info").json()
        [load] = client.get("/get_load").json()
        assert client.get("/get_model_info").json() == model
    assert server["served_model_name"] == "built-in" and server["dp_size"] == 1 and server["version"]
    assert server["context_length"] == 512 and server["max_running_requests"] == 8 and server["drafter"] != "auto"
    assert (model["model_path"], model["tokenizer_path"], model["is_generation"]) == ("built-in", "built-in", True)
    assert model["model_type"] == "qwen3" and model["architectures"] == ["Qwen3ForCausalLM"]
    assert load == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    text = json.dumps(server)
    assert "api_key" not in text and "/" not in text.replace("http://", "") and "jinja" not in text


# Speculation


@pytest.mark.parametrize(
    ("settings", "speculation"),
    [
        ({"mtp_k": 4}, {"drafter": "mask", "depth": 3, "acceptance": "trust"}),
        ({"mtp_k": 4, "mtp_mask_id": MASK, "mtp_temperature": 0.7}, {"drafter": "mask", "depth": 3}),
        ({"mtp_k": 3, "mtp_min_mask_id": MASK, "mtp_max_mask_id": MASK}, {"drafter": "mask", "depth": 2}),
        ({"mtp_k": 4, "mtp_strategy": ["conf_adapt", 0.6]}, {"drafter": "mask", "depth": 3, "confidence": 0.6}),
        ({"mtp_k": 4, "mtp_strategy": "conf_adapt+0.6"}, {"drafter": "mask", "depth": 3, "confidence": 0.6}),
        (
            {"mtp_k": 4, "mtp_strategy": "conf_adapt", "mtp_conf_threshold": 0.6},
            {"drafter": "mask", "depth": 3, "confidence": 0.6},
        ),
        ({"mtp_k": 4, "mtp_strategy": ["conf_adapt", 0.0]}, {"drafter": "mask", "depth": 3}),
        ({"mtp_k": 4, "mtp_strategy": "none"}, {"drafter": "mask", "depth": 3}),
        ({"mtp_k": 1}, "off"),
        ({"mtp_enabled": False, "mtp_k": 4}, "off"),
    ],
    ids=str,
)
def test_mask_token_parameters(served: Served, settings: dict[str, Any], speculation: Any) -> None:
    """Unchecked decoding as its own server is asked for it is trust here, token for token, step for step."""
    if isinstance(speculation, dict):
        speculation = {"acceptance": "trust", **speculation}
    [expected] = offline([PROMPT], temperature=0.7, seed=3, max_tokens=24, speculation=speculation)
    asked: dict[str, Any] = {
        "temperature": 0.7,
        "sampling_seed": 3,
        "max_new_tokens": 24,
        "mtp_enabled": True,
        **settings,
    }
    answer = post(served, text=PROMPT, sampling_params=asked)
    assert (answer["text"], answer["output_ids"]) == (expected.text, expected.token_ids)
    meta = answer["meta_info"]
    assert expected.metrics is not None
    assert (meta["drafter"], meta["acceptance"]) == (expected.metrics.drafter, expected.metrics.acceptance)
    assert meta["lossless"] is (speculation == "off")
    assert meta.get("spec_verify_ct", 24) == expected.metrics.steps


@pytest.mark.parametrize("where", ["request", "sampling_params"])
def test_speculation_and_its_figures(served: Served, where: str) -> None:
    """In the request it is for all prompts; the figures are those of the offline API, and add up."""
    speculation = {"drafter": "mtp", "depth": 2}
    [expected] = offline([PROMPT], temperature=0, max_tokens=30, speculation=speculation)
    settings: dict[str, Any] = {"temperature": 0, "max_new_tokens": 30}
    if where == "request":
        meta = post(served, text=PROMPT, sampling_params=settings, speculation=speculation)["meta_info"]
    else:
        settings["speculation"] = speculation
        meta = post(served, text=PROMPT, sampling_params=settings, speculation="suffix")["meta_info"]
    metrics = expected.metrics
    assert metrics is not None
    assert meta["drafter"] == "mtp" and meta["spec_verify_ct"] == metrics.steps < 30
    assert meta["spec_accept_length"] == pytest.approx(30 / metrics.steps)
    assert meta["spec_accept_rate"] == pytest.approx(metrics.accepted / metrics.drafted)
    histogram = meta["spec_accept_histogram"]
    assert sum(histogram) == metrics.steps and len(histogram) == 3
    assert sum(accepted * steps for accepted, steps in enumerate(histogram)) == metrics.accepted
    assert [sum(histogram[1:]), sum(histogram[2:])] == list(metrics.accepted_at)


# Names and aborting


@pytest.fixture
def endless(served: Served) -> Iterator[Any]:
    """Starts long requests beside the test, and returns their responses."""
    running: list[threading.Thread] = []

    def start(**body: Any) -> list[Any]:
        got: list[Any] = []
        settings = {"max_new_tokens": None, "ignore_eos": True, "speculation": "off"}
        asked: dict[str, Any] = {"sampling_params": settings, **body}
        url = f"{served.url}/generate"
        thread = threading.Thread(target=lambda: got.append(httpx.post(url, json=asked, timeout=60)))
        thread.start()
        running.append(thread)
        until = time.monotonic() + 60
        while load(served) == 0:
            assert time.monotonic() < until
            time.sleep(0.01)
        return got

    yield start
    post_abort(served, abort_all=True)
    for thread in running:
        thread.join(60)
        assert not thread.is_alive()


def load(served: Served) -> int:
    with served.http() as client:
        return int(client.get("/get_load").json()[0]["num_reqs"])


def post_abort(served: Served, **body: Any) -> None:
    with served.http() as client:
        assert client.post("/abort_request", json=body).status_code == 200


def wait_for(got: list[Any]) -> Any:
    until = time.monotonic() + 60
    while not got:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert got[0].status_code == 200
    return got[0].json()


def test_names(served: Served) -> None:
    """As given, and numbered if there are several; free again afterwards."""
    settings = {"max_new_tokens": 1}

    def names(**body: Any) -> Any:
        answer = post(served, sampling_params=settings | body.pop("more", {}), **body)
        many = answer if isinstance(answer, list) else [answer]
        return [one["meta_info"]["id"] for one in many]

    for _ in range(2):
        assert names(text=PROMPT, rid="a") == ["a"]
        assert names(text=[PROMPT, OTHER], rid="a") == ["a_0", "a_1"]
        assert names(text=[PROMPT, OTHER], rid=["a", "b"]) == ["a", "b"]
        assert names(text=[PROMPT, OTHER], rid=["a", "b"], more={"n": 2}) == ["a_0", "a_1", "b_0", "b_1"]
    with served.http() as client:
        refused = client.post("/generate", json={"input_ids": [10**9], "rid": "a"})
    assert refused.status_code == 400 and "vocabulary" in refused.json()["error"]["message"]
    assert names(text=PROMPT, rid="a") == ["a"]
    unnamed = names(text=[PROMPT, PROMPT])
    assert len(set(unnamed)) == 2 and all(unnamed)


def test_abort(served: Served, endless: Any) -> None:
    """An aborted request returns what it had, with the reason; others continue."""
    got = endless(text=PROMPT, rid="long", return_logprob=True)
    with served.http() as client:
        refused = client.post("/generate", json={"text": PROMPT, "rid": "long"})
    assert refused.status_code == 400 and "rid" in refused.json()["error"]["message"]
    post_abort(served, rid="lon")
    post_abort(served, rid="nobody")
    assert load(served) == 1 and not got
    post_abort(served, rid="long")
    answer = wait_for(got)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort" and answer["meta_info"]["finish_reason"]["message"]
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] < 512 - len(ids())
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
    settle(served)
    assert post(served, text=PROMPT, rid="long", sampling_params={"max_new_tokens": 1})["meta_info"]["id"] == "long"


@pytest.mark.parametrize(
    ("length", "aborted", "ended"),
    [(20, "x_1", [1]), (None, "x", [0, 1]), (None, None, [0, 1])],
    ids=["sample", "request", "all"],
)
def test_abort_of_several(
    served: Served, endless: Any, length: int | None, aborted: str | None, ended: list[int]
) -> None:
    """One sample by its own name, all of a request by the request's, everything without a name."""
    free = {"max_new_tokens": None, "ignore_eos": True, "speculation": "off"}
    got = endless(text=[PROMPT, OTHER], rid="x", sampling_params=[{**free, "max_new_tokens": length}, free])
    post_abort(served, **({"abort_all": True} if aborted is None else {"rid": aborted}))
    answers = wait_for(got)
    kinds = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert [index for index, kind in enumerate(kinds) if kind == "abort"] == ended


def test_higher_priority_is_served_first(served: Served, endless: Any) -> None:
    """As in SGLang: of two waiting requests, the later one runs first if its number is larger."""
    endless(text=[PROMPT] * 8, rid="all_places")
    order: list[int] = []

    def ask(priority: int) -> None:
        post(served, text=OTHER, sampling_params={"max_new_tokens": 30, "ignore_eos": True}, priority=priority)
        order.append(priority)

    waiting = [threading.Thread(target=ask, args=(priority,)) for priority in (-1, 1)]
    for open_before, thread in enumerate(waiting, start=8):
        thread.start()
        until = time.monotonic() + 60
        while load(served) <= open_before:
            assert time.monotonic() < until
            time.sleep(0.01)
    post_abort(served, rid="all_places_3")
    for thread in waiting:
        thread.join(60)
    assert order == [1, -1]


def test_a_stream_is_told_of_its_end(served: Served) -> None:
    settings = {"max_new_tokens": None, "ignore_eos": True, "speculation": "off"}
    body = {"text": PROMPT, "rid": "s", "stream": True, "sampling_params": settings}
    with served.http() as client, client.stream("POST", "/generate", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.strip())
        next(lines)
        post_abort(served, rid="s")
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_client_that_left_frees_its_name(served: Served) -> None:
    settings = {"max_new_tokens": None, "ignore_eos": True, "speculation": "off"}
    body = {"text": PROMPT, "rid": "gone", "stream": True, "sampling_params": settings}
    with served.http() as client, client.stream("POST", "/generate", json=body) as answer:
        next(answer.iter_lines())

    def is_free() -> bool:
        with served.http() as client:
            body = {"text": PROMPT, "rid": "gone", "sampling_params": {"max_new_tokens": 1}}
            return client.post("/generate", json=body).status_code == 200

    until("its name is free", is_free)


def test_aborted_before_the_engine_has_it() -> None:
    """A request aborted while it is handed over is cut at once, and the rest runs; then its names are free."""

    async def run() -> None:
        sent: list[Abort] = []
        generation = Generation("g", 2)
        link: Any = SimpleNamespace(open=dict.fromkeys(generation.ids), send=sent.append)
        rids, call = Rids(), Call.of("r", prompts=2, n=1, many=True)
        rids.take(call)
        assert rids.abort("r_1") and sent == []
        call.start(link, generation)
        assert sent == [Abort(["g.1"])]
        with pytest.raises(ApiError, match="rid"):
            rids.take(Call.of("r_0", prompts=1, n=1, many=False))
        generation.fail(ApiError(503, "gone"))
        rids.take(Call.of("r_0", prompts=1, n=1, many=False))

    asyncio.run(run())


# What is refused


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"text": None}, "input_ids"),
        ({"input_ids": [1]}, "input_ids"),
        ({"text": []}, "text"),
        ({"text": ""}, "empty"),
        ({"text": "secret " * 2000}, "context"),
        ({"text": None, "input_ids": [10**9]}, "vocabulary"),
        ({"text": None, "input_ids": []}, "input_ids"),
        ({"model": "gpt-5"}, "gpt-5"),
        ({"temperature": 0}, "temperature"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_tokens": 3}}, "max_tokens"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": True}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, "min_new_tokens"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"sampling_params": {"logit_bias": {"a": 1}}}, "logit_bias"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"spaces_between_special_tokens": False}}, "spaces_between_special_tokens"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "custom_params"),
        ({"sampling_params": {"regex": "(secret"}}, "unterminated"),
        ({"sampling_params": {"json_schema": "{"}}, "json"),
        ({"sampling_params": {"ebnf": "secret"}}, "::="),
        ({"sampling_params": {"regex": "secret", "ebnf": "secret"}}, "give one"),
        ({"sampling_params": {"structural_tag": "secret"}}, "structural_tag"),
        ({"sampling_params": {"structural_tag": "{}", "ebnf": "secret"}}, "give one"),
        ({"sampling_params": {"speculation": {"drafter": "nobody"}}}, "nobody"),
        ({"sampling_params": [{}, {}]}, "2 entries for 1 prompts"),
        ({"text": ["secret", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n must be the same"),
        ({"text": ["secret", "b"], "return_logprob": [True]}, "return_logprob"),
        ({"return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"return_logprob": True, "top_logprobs_num": 65}, "top_logprobs_num"),
        ({"return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [10**6]}, "logprob_token_ids"),
        ({"text": ["secret", "b"], "return_logprob": True, "token_ids_logprob": [[1]]}, "1 entries for 2"),
        ({"return_hidden_states": True}, "--enable-return-hidden-states"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"rid": ""}, "rid"),
        ({"text": ["secret", "b"], "rid": ["a", "a"]}, "rid"),
        ({"text": ["secret", "b"], "rid": ["a", "a_0"], "sampling_params": {"n": 2}}, "rid"),
        ({"lora_path": "adapter"}, "lora_path"),
        ({"image_data": ["secret"]}, "image_data"),
        ({"session_params": {"id": "1"}}, "session_params"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
    ids=str,
)
def test_refusals(served: Served, body: dict[str, Any], word: str) -> None:
    """The error names what is wrong, and contains nothing of the prompt."""
    with served.http() as client:
        answer = client.post("/generate", json={"text": "secret words", **body})
    assert answer.status_code == (404 if "model" in body else 400), answer.text
    assert word in answer.json()["error"]["message"] and "secret" not in answer.text


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"mtp_enabled": True}, "mtp_k"),
        ({"mtp_k": 2}, "mtp_enabled"),
        ({"mtp_mask_id": 0}, "mtp_enabled"),
        ({"mtp_enabled": True, "mtp_k": 0}, "mtp_k"),
        ({"mtp_enabled": True, "mtp_k": 999}, "depth"),
        ({"mtp_enabled": True, "mtp_k": 2, "speculation": "off"}, "speculation"),
        ({"mtp_enabled": True, "mtp_k": 2, "mtp_mask_id": MASK - 1}, f"[{MASK}]"),
        ({"mtp_enabled": True, "mtp_k": 2, "mtp_min_mask_id": MASK - 1}, f"[{MASK}]"),
        ({"mtp_enabled": True, "mtp_k": 2, "mtp_max_mask_id": MASK + 1}, f"[{MASK}]"),
        ({"mtp_enabled": True, "mtp_k": 2, "mtp_temperature": 0.5}, "mtp_temperature"),
        ({"mtp_enabled": True, "mtp_k": 2, "mtp_conf_threshold": 0.5}, "mtp_strategy"),
        ({"mtp_enabled": True, "mtp_k": 2, "mtp_strategy": "conf_adapt"}, "mtp_conf_threshold"),
        ({"mtp_enabled": True, "mtp_k": 2, "mtp_strategy": ["conf_adapt", 1.5]}, "from 0 to 1"),
        ({"mtp_enabled": True, "mtp_k": 2, "mtp_strategy": ["conf_adapt", "much"]}, "from 0 to 1"),
        ({"mtp_enabled": True, "mtp_k": 2, "mtp_strategy": ["fixed", 0.5]}, "conf_adapt"),
        (
            {"mtp_enabled": True, "mtp_k": 2, "mtp_strategy": ["conf_adapt", 0.5], "mtp_conf_threshold": 0.6},
            "mtp_strategy",
        ),
        ({"mtp_enabled": False, "mtp_strategy": ["conf_adapt", 0.5]}, "mtp_enabled"),
    ],
    ids=str,
)
def test_mask_token_refusals(served: Served, settings: dict[str, Any], word: str) -> None:
    with served.http() as client:
        answer = client.post("/generate", json={"text": "secret words", "sampling_params": settings})
    assert answer.status_code == 400 and word in answer.json()["error"]["message"], answer.text


# Beside /generate


def test_health_generates(served: Served, endless: Any) -> None:
    """Also while others hold every place, without waiting for one of them to end."""
    with served.http() as client:
        assert client.get("/health_generate").status_code == 200
        endless(text=[PROMPT] * 10)
        assert client.get("/health_generate").status_code == 200
    assert load(served) >= 10


def test_flush_cache(served: Served, endless: Any) -> None:
    """Refused while anything runs; afterwards the cache has no hits."""
    prompt = PROMPT * 3
    post(served, text=prompt, sampling_params=GREEDY)
    assert post(served, text=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"] > 0
    with served.http() as client:
        endless(text=OTHER)
        assert client.post("/flush_cache").status_code == 400
        assert client.get("/flush_cache").status_code == 405  # it changes state
        post_abort(served, abort_all=True)
        assert client.post("/flush_cache", params={"timeout": 20}, json={"empty_cache": True}).status_code == 200
    assert post(served, text=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"] == 0


def test_flush_cache_for_one_who_left(served: Served, endless: Any) -> None:
    """A client that disconnects before the cache can be flushed does not flush it."""
    prompt = PROMPT * 3
    post(served, text=prompt, sampling_params=GREEDY)
    with served.http() as client:
        endless(text=OTHER)
        with pytest.raises(httpx.TimeoutException):
            client.post("/flush_cache", params={"timeout": 60}, timeout=0.3)
        post_abort(served, abort_all=True)
        until("nothing is open", lambda: client.get("/get_load").json()[0]["num_reqs"] == 0, 10)
    time.sleep(0.2)  # longer than between two looks
    assert post(served, text=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"] > 0


def test_abort_names_something(served: Served) -> None:
    with served.http() as client:
        assert client.post("/abort_request", json={"rid": ""}).status_code == 400


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(served: Served, prefix: str) -> None:
    """As SGLang and vLLM have it, for one text and for several."""
    one = post(served, f"{prefix}/tokenize", prompt=PROMPT, add_special_tokens=False, return_token_strs=True)
    assert (one["tokens"], one["count"], one["max_model_len"]) == (ids(), len(ids()), 512)
    assert len(one["token_strs"]) == len(ids()) and one["token_strs"][0] == "class"
    two = post(served, f"{prefix}/tokenize", prompt=[PROMPT, OTHER], model="built-in")
    assert two["tokens"] == [ids(), tokenizer().encode(OTHER)] and two["count"] == [len(one) for one in two["tokens"]]
    back = post(served, f"{prefix}/detokenize", tokens=ids())
    assert back == {"text": PROMPT, "prompt": PROMPT}
    assert post(served, f"{prefix}/detokenize", tokens=two["tokens"])["text"] == [PROMPT, OTHER]
    assert post(served, f"{prefix}/detokenize", tokens=[]) == {"text": "", "prompt": ""}


def test_tokenize_a_conversation(served: Served) -> None:
    """What /v1/chat/completions reads of the same messages."""
    messages = [{"role": "user", "content": "hi"}]
    told = post(served, "/tokenize", messages=messages)
    assert told["count"] == len(told["tokens"]) and told["token_strs"] is None
    answer = post(served, "/v1/chat/completions", messages=messages, max_tokens=1)
    assert told["count"] == answer["usage"]["prompt_tokens"]
    unopened = post(served, "/tokenize", messages=messages, add_generation_prompt=False, return_token_strs=True)
    assert unopened["tokens"] == told["tokens"][: unopened["count"]] and unopened["count"] < told["count"]
    assert len(unopened["token_strs"]) == unopened["count"]


def test_detokenize_and_special_tokens(served: Served) -> None:
    """By default, each API keeps its own behaviour: SGLang's omits special tokens, vLLM's keeps them."""
    tokens = [*ids(), tokenizer().eos_ids[0]]
    shown = tokenizer().decode(tokens, skip_special_tokens=False)
    assert shown != PROMPT
    assert post(served, "/detokenize", tokens=tokens) == {"text": PROMPT, "prompt": shown}
    told = {skip: post(served, "/detokenize", tokens=tokens, skip_special_tokens=skip) for skip in (True, False)}
    assert told == {True: {"text": PROMPT, "prompt": PROMPT}, False: {"text": shown, "prompt": shown}}


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "secret", "model": "gpt-5"}, "gpt-5"),
        ("/tokenize", {"prompt": "secret \ud800"}, "Unicode"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "secret"}], "prompt": "secret"}, "prompt"),
        ("/tokenize", [1], "dictionary"),
        ("/detokenize", {"tokens": [10**9]}, "vocabulary"),
        ("/detokenize", {"tokens": ["secret"]}, "tokens"),
    ],
    ids=str,
)
def test_tokenizer_refusals(served: Served, path: str, body: Any, word: str) -> None:
    with served.http() as client:
        answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404) and word in answer.json()["error"]["message"], answer.text
    assert "secret" not in answer.text
