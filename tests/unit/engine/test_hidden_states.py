"""Hidden states against transformers', position by position. tests/laws/test_identity.py checks that they do not depend
on how a request is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from stridelm import SamplingParams
from support.doubles.stand import Job, Stand


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3"), "float32")


@pytest.mark.parametrize("speculation", [None, {"drafter": "ngram", "depth": 4}, {"drafter": "mtp", "depth": 2}])
@pytest.mark.parametrize("chunk", [5, 1024])
@pytest.mark.parametrize("length", [1, 2, 21])
def test_of_every_position_that_was_run(
    stand: Stand, length: int, chunk: int, speculation: dict[str, object] | None
) -> None:
    prompt = [5, 6, 7] * (length // 3) + [9] * (length % 3)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, return_hidden_states=True)
    [sample] = stand.run([Job(prompt, params, speculation)], max_num_batched_tokens=chunk)[0].outputs
    model = AutoModelForCausalLM.from_pretrained(stand.path, dtype=torch.float32)
    with torch.inference_mode():
        out = model(torch.tensor([prompt + sample.token_ids[:-1]]), output_hidden_states=True)
    assert sample.hidden_states is not None and sample.hidden_states.shape == (length + 8, model.config.hidden_size)
    torch.testing.assert_close(sample.hidden_states, out.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
    head = sample.hidden_states[length - 1 :] @ model.lm_head.weight.T
    assert head.argmax(-1).tolist() == sample.token_ids


def test_not_told_unless_asked_for(stand: Stand) -> None:
    [sample] = stand.run([Job([5, 6], SamplingParams(max_tokens=2, logprobs=1))])[0].outputs
    assert sample.hidden_states is None
