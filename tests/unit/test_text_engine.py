"""Text on top of the engine: what a stop string leaves of a step, and the engine's state after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stridelm import LLM, SamplingParams
from stridelm.types import StepOutput

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(max_model_len=512, max_num_seqs=4)
    yield llm
    llm.check()


def steps_of(llm: LLM, name: str, params: SamplingParams) -> list[StepOutput]:
    text = llm.text_engine
    assert llm.engine.tokenizer is not None
    text.add(name, llm.engine.tokenizer.encode(PROMPT), params)
    outputs: list[StepOutput] = []
    while llm.engine.busy:
        outputs += text.step()
    return outputs


def test_a_stop_string_cuts_the_step_that_brought_it(llm: LLM) -> None:
    """Tokens after the one that completes it are gone from the output, its request and the counters, and so is what a
    step decided of them."""
    free = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=1)
    steps = steps_of(llm, "free", free)
    step = next(output for output in steps[1:] if len(output.new_token_ids) > 2 and output.pieces[1].strip())
    before = steps[: steps.index(step)]
    stop = step.pieces[1].strip()
    while any(stop in "".join(output.pieces) for output in before):  # until it is first emitted
        before.pop()
    emitted = llm.engine.stats.emitted
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=1, stop=[stop])
    cut = steps_of(llm, "cut", params)
    request, last = cut[-1].request, cut[-1]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop) and last.finished
    tokens = [token for output in cut for token in output.new_token_ids]
    assert tokens == request.output_ids == [t for output in steps for t in output.new_token_ids][: len(tokens)]
    assert len(last.new_token_ids) == len(last.pieces) == len(last.logprobs or ())
    assert llm.engine.stats.emitted - emitted == len(tokens)
    assert stop not in "".join(output.text for output in cut)
    assert not llm.text_engine._texts and not llm.engine.busy


def test_the_engine_alone_gives_ids(llm: LLM) -> None:
    """When stepped without the text layer, it knows no stop strings and returns no text."""
    request = llm.engine.add("alone", [300, 301], SamplingParams(temperature=0.0, max_tokens=6, stop=["e", " ", "\n"]))
    while llm.engine.busy:
        assert all(not output.pieces for output in llm.engine.step())
    assert len(request.output_ids) == 6 and request.finish_reason == "length"


def test_prompt_logprobs_are_made_when_they_are_looked_at(llm: LLM) -> None:
    """For every position except the first, with its own token first, and with text."""
    outputs = steps_of(llm, "scored", SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3))
    (output,) = outputs
    found, prompt = output.prompt_logprobs, output.request.prompt_ids
    assert found is not None and len(found) == len(prompt) and found[0] is None
    for entry, token in zip(found[1:], prompt[1:], strict=True):
        assert entry is not None and next(iter(entry)) == token and 3 <= len(entry) <= 4
        assert all(one.decoded_token for one in entry.values())
    with pytest.raises(IndexError):
        found[len(prompt)]
