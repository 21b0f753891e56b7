"""Callers that share an engine: whichever of them steps it, every output reaches its own sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from stridelm import LLM, SamplingParams

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [40, 41, 42]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(speaking: Path) -> LLM:
    return LLM(speaking, dtype="float32", drafter="none", num_pages=48, max_num_seqs=4, strict=True)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_a_stream_grows_to_the_whole(llm: LLM, expected: list[list[int]]) -> None:
    lengths = [len(output.outputs[0].token_ids) for output in llm.stream(PROMPTS[0], GREEDY)]
    assert lengths == list(range(1, 13))


def test_metrics_come_with_every_output(llm: LLM) -> None:
    for output in llm.stream(PROMPTS[0], GREEDY):
        assert output.metrics is not None
        assert output.metrics.steps == len(output.outputs[0].token_ids)
        assert output.metrics.ttft_s is not None
        assert (output.metrics.latency_s is not None) == output.finished


def test_streams_side_by_side(llm: LLM, expected: list[list[int]]) -> None:
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    *_, last = zip(*streams)
    assert [output.outputs[0].token_ids for output in last] == expected
    assert not llm.engine.busy


def test_generate_in_the_middle_of_a_stream(llm: LLM, expected: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert len(next(stream).outputs[0].token_ids) == 1
    assert llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids == expected[1]
    *_, last = stream
    assert last.finished and last.outputs[0].token_ids == expected[0]


def test_a_stream_that_generate_finished(llm: LLM, expected: list[list[int]]) -> None:
    """It still yields, once, what it has not yielded yet."""
    stream = llm.stream(PROMPTS[0], GREEDY)
    llm.generate(PROMPTS[1], GREEDY)
    (only,) = stream
    assert only.outputs[0].token_ids == expected[0]


@pytest.mark.parametrize("read", [0, 3])
def test_dropping_a_stream_gives_everything_back(read: int, llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    for _ in range(read):
        next(stream)
    was_busy = llm.engine.busy
    del stream
    assert was_busy and not llm.engine.busy
    llm.check()
    assert all(group["held"] == 0 for group in llm.engine.ledger.counts().values())
