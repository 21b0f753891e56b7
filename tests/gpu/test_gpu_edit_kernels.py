"""The kernels that edit logits on a GPU: bit for bit like torch, in captured graphs too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from stridelm import SamplingParams
from stridelm.engine.kinds import Kind
from stridelm.sample.table import Feature
from support.checks.draw_kernels import TRUNCATED
from support.checks.edit_kernels import ALL, EDITS, make_case
from support.checks.identity import prompts
from support.doubles.poison import KINDS
from support.doubles.stand import Job, Stand
from support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
VOCAB = 128256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SAMPLED = ({"temperature": 0.8}, {"temperature": 0.0}, *TRUNCATED[5:])
MAX_TIES = 1
"""Rows whose best two scores are so close that another library's logarithm may decide differently."""


@pytest.mark.parametrize("vocab", [1, 4097, VOCAB, 262144])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_rows(dtype: torch.dtype, vocab: int) -> None:
    """Histories and lists of any length, draft nodes, and padding."""
    for seed, longest in enumerate((20, 512, 5000)):
        make_case(seed, vocab, dtype=dtype, rows_each=6, longest=longest, listed=longest // 4, device="cuda").check()


@pytest.mark.parametrize("name", EDITS)
def test_one_edit_alone(name: str) -> None:
    for drafted in (True, False):
        case = make_case(5, VOCAB, kinds=((name,), ()), longest=3000, drafted=drafted, device="cuda")
        case.check()
        assert not torch.equal(case.edited(), case.logits)
        replace(case, rows=replace(case.rows, longest=None)).check()


def test_one_token_all_over() -> None:
    """Every program of a row counts the same token."""
    case = make_case(1, VOCAB, kinds=[ALL] * 3, longest=100_000, device="cuda")
    case.sampler.history.tokens.fill_(7)
    case.check()


def test_again_and_among_others_the_same() -> None:
    case = make_case(2, VOCAB, rows_each=20, longest=3000, dtype=torch.bfloat16, device="cuda")
    whole = case.edited()
    for _ in range(5):
        assert torch.equal(case.edited(), whole)
    for index in ([0], list(range(3, 150, 7))):
        assert torch.equal(case.part(index).edited(), whole[index])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_the_samplers(dtype: torch.dtype) -> None:
    case = make_case(3, VOCAB, rows_each=8, longest=900, dtype=dtype, others=SAMPLED, device="cuda")
    got, wanted = case.sampler.draw(case.logits, case.rows, case.slots)[case.real], case.twin()
    assert int((got != wanted).sum()) <= MAX_TIES


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_rows_beside_edited_ones_draw_the_same(dtype: torch.dtype) -> None:
    kinds = [() for _ in TRUNCATED] + [ALL]
    case = make_case(7, VOCAB, kinds=kinds, others=(*TRUNCATED, {}), dtype=dtype, rows_each=9, device="cuda")
    free = [row for row, slot in enumerate(case.slots) if slot != len(TRUNCATED)]
    assert torch.equal(case.drawn()[free], case.part(free).drawn())


def test_graph() -> None:
    """A captured draw stays correct when logits, rows, parameters, lists and the token table change between replays."""
    case = make_case(0, VOCAB, longest=3000, listed=300, others=SAMPLED, device="cuda")
    table, nobody = case.table, [-1] * len(case.slots)
    # Grammar masks are made on the host, so those steps are not captured.
    with table.assuming(Feature.ALL & ~Feature.GRAMMAR):
        case.sampler.draw(case.logits, case.rows, nobody)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = case.sampler.draw(case.logits, case.rows, nobody)
            edited = case.sampler._edited(case.logits, case.rows, nobody, Feature.EDITED & ~Feature.GRAMMAR)
    for seed in range(1, 6):
        options: dict[str, Any] = {"longest": 3000 - 500 * seed, "listed": 250, "device": "cuda"}
        case.become(make_case(seed, VOCAB, others=SAMPLED, **options))
        graph.replay()
        assert torch.equal(edited, case.edited())
        assert torch.equal(tokens, case.drawn())
        case.become(make_case(seed, VOCAB, **options))
        graph.replay()
        assert torch.equal(edited[case.real], case.wanted())


SETTINGS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 3.0, 9: -4.0}},
    "longer bias": {"logit_bias": {token: 0.1 * token for token in range(40)}},
    "bad words": {"bad_words_token_ids": [[3], [5, 9], [9, 5, 3]]},
    "minimum": {"min_tokens": 12, "stop_token_ids": [5, 9], "logit_bias": {5: 4.0}},
}


@pytest.mark.parametrize("asked", KINDS, ids=str)
def test_edited_steps_are_captured_whole(checkpoint: Callable[..., Path], asked: dict[str, Any]) -> None:
    """In successive batches with other edits and longer lists each request emits what it emits without capture, and the
    graphs of the first batch serve all."""
    stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32", "cuda")
    llm, eager = stand.llm(), stand.llm(enforce_eager=True)
    seen: list[Kind] = []
    for seed, names in enumerate((["penalties"], ["bias"], ["longer bias", "penalties"], ["bias"], [*SETTINGS])):
        jobs = []
        for i, prompt in enumerate(prompts(stand, 6, seed=seed)):
            settings: dict[str, Any] = SETTINGS[names[i % len(names)]]
            params = SamplingParams(temperature=0.7 * (i % 2), max_tokens=24, seed=i, ignore_eos=True, **settings)
            jobs.append(Job(prompt, params, asked))
        for job, output in zip(jobs, stand.run(jobs, llm=llm)):
            assert output.outputs[0].token_ids == eager.generate(job.prompt, job.request)[0].outputs[0].token_ids
        assert llm.engine.capture is not None
        edited = [kind for kind in llm.engine.capture.kinds if kind.features & Feature.EDITED]
        assert edited, "nothing was captured"
        seen += [kind for kind in edited if kind not in seen]
    assert {kind.lists for kind in seen} == {0}
