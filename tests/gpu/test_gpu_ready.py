"""Ready means ready: once an engine has started, ordinary traffic captures and compiles nothing, and each request of a
random mix gets the tokens that it gets alone."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import SamplingParams
from stridelm.attention.base import Pairs
from stridelm.engine.engine import Engine
from stridelm.run import segments
from stridelm.run.segments import PassTimes
from support.doubles.stand import Stand
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
CONTEXT = 250
STREAMS = 40
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 7, "min_p": 0.02},
    {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {3: 2.0, 9: -4.0}},
    {"temperature": 0.0, "bad_words_token_ids": [[4, 5], [7]], "min_tokens": 3},
    {"temperature": 0.5, "logprobs": 4},
    {"temperature": 0.0, "prompt_logprobs": 2},
)
STARTED: dict[str, Any] = {
    "capture": "startup",
    "strict": False,
    "num_pages": STREAMS * CONTEXT // 16,
    "max_num_seqs": STREAMS,
    "max_num_batched_tokens": 512,
    "itl_target_ms": 5,
}
Asked = tuple[list[int], SamplingParams]


def mix(seed: int, count: int, speculations: Sequence[Any]) -> Iterator[Asked]:
    """Random prompts of all lengths, one in six nearly as long as the context, with random parameters, and drafted in
    any of these ways."""
    rng = random.Random(seed)
    for number in range(count):
        length = rng.randint(CONTEXT - 80, CONTEXT - 41) if rng.random() < 1 / 6 else rng.randint(1, 150)
        params = SamplingParams(
            **rng.choice(PARAMS),
            seed=number,
            max_tokens=rng.randint(3, 40),
            ignore_eos=rng.random() < 0.7,
            speculation=rng.choice(speculations),
        )
        yield rng.choices(range(60), k=length), params


def serve(engine: Engine, asked: list[Asked], rng: random.Random) -> list[list[int]]:
    """Each request's tokens. They arrive a few at a time, while earlier ones run."""
    waiting, requests = asked[::-1], []
    while waiting or engine.busy:
        for _ in range(rng.choice((0, 0, 1, 1, 2, 6))):
            if waiting:
                prompt, params = waiting.pop()
                requests.append(engine.add(f"{rng.random()}", prompt, params))
        engine.step()
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("drafting", ["none", "ngram@3", "mtp@3", "eagle@3", "ngram@auto", "mtp@auto"])
def test_traffic_captures_and_compiles_nothing(
    checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture, drafting: str, deterministic: bool
) -> None:
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "bfloat16", "cuda")
    drafter, _, depth = drafting.partition("@")
    options = {"drafter": drafter, "depth": int(depth) if depth.isdigit() else depth or None, "max_model_len": CONTEXT}
    engine = stand.llm(**options, deterministic=deterministic, **STARTED).engine
    before = (engine.stats.captures, engine.stats.compilations)
    assert min(before) > 0, "everything was made at the start"
    named = [{"depth": "auto"}] if depth == "auto" else []
    asked = list(mix(3, 200, [None, "off", *named]))
    caplog.set_level(logging.DEBUG, "stridelm.kernels.compilations")
    together = serve(engine, asked, random.Random(4))
    assert (engine.stats.captures, engine.stats.compilations) == before, caplog.messages
    assert set(engine.stats.uncaptured) <= {"prompt"}
    engine.check()
    if deterministic:
        engine.forget()
        alone = [serve(engine, [one], random.Random(0))[0] for one in asked[::5]]
        assert together[::5] == alone


def test_steps_that_leave_their_captured_pass_compile_nothing(
    checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, all that could expand latents do, if they have as many rows as the smallest captured pass."""
    monkeypatch.setattr(segments, "CLEARLY", 0.0)
    left, decide = [0], PassTimes.is_faster_launched

    def counting(self: PassTimes, pairs: Pairs, host: float) -> bool:
        leaves = pairs.spared > 0 and decide(self, pairs, host)
        left[0] += leaves
        return leaves

    monkeypatch.setattr(PassTimes, "is_faster_launched", counting)
    stand = Stand(checkpoint("deepseek_v3", v_head_dim=16), "bfloat16", "cuda")
    engine = stand.llm(max_model_len=CONTEXT, deterministic=False, **STARTED).engine
    before = (engine.stats.captures, engine.stats.compilations)
    caplog.set_level(logging.DEBUG, "stridelm.kernels.compilations")
    serve(engine, list(mix(3, 100, [None])), random.Random(4))
    assert (engine.stats.captures, engine.stats.compilations) == before, caplog.messages
    assert left[0] > 0
    engine.check()


@pytest.mark.parametrize("drafter", ["none", "mtp", "eagle"])
def test_what_is_read_of_replayed_steps(checkpoint: Callable[..., Path], drafter: str) -> None:
    """Log-probabilities and hidden states of replayed steps are those of the same steps launched one by one, while
    other graphs use the same memory."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32", "cuda")
    settings: dict[str, Any] = {"drafter": drafter, "deterministic": True, "num_pages": 400, "max_num_seqs": 16}
    read: dict[str, Any] = {"logprobs": 4, "return_hidden_states": True}
    wants: list[dict[str, Any]] = [read, {}, read, {"presence_penalty": 0.5, **read}, read, {}]
    asked = [
        ([number + 1] * (2 + number), SamplingParams(temperature=0.0, max_tokens=9 + number, ignore_eos=True, **more))
        for number, more in enumerate(wants)
    ]
    captured, eager = stand.llm(**settings, capture="startup"), stand.llm(**settings, enforce_eager=True)
    told = [llm.generate([each for each, _ in asked], [each for _, each in asked]) for llm in (captured, eager)]
    assert set(captured.engine.stats.uncaptured) <= {"prompt"}
    for one, other in zip(*told, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        states = [output.outputs[0].hidden_states for output in (one, other)]
        assert (states[0] is None) == (states[1] is None)
        assert states[0] is None or torch.equal(*states)
