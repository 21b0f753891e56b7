"""Layers of a model may differ in the state they keep, in how they mix, and in their number of heads. Nothing else may
be affected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stridelm import LLM, SamplingParams
from stridelm.llm import RequestOutput
from stridelm.models.layers.decoder import ModelInput
from stridelm.models.loader import load_model
from support.checks.identity import LENGTH, check_identity, mixed_jobs, prompts
from support.doubles.means import LAYERS, MeansStand, MeanState, dense_mix, means_registered, write_means
from support.doubles.stand import accepted
from support.doubles.tree_drafter import registered


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with means_registered(), registered():
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_means(tmp_path_factory.mktemp("means"))


@pytest.fixture(scope="module", params=["float32", "float64"])
def stand(path: Path, request: pytest.FixtureRequest) -> MeansStand:
    return MeansStand(path, request.param)


def cached(outputs: list[RequestOutput]) -> int:
    """The number of tokens found in the prefix cache."""
    return sum(output.metrics.cached_tokens for output in outputs if output.metrics is not None)


def test_plain_decoding_is_the_model(stand: MeansStand) -> None:
    """Greedy tokens, decoded one by one over pages, equal those of one pass over the text without any."""
    prompt = prompts(stand, 1)[0]
    said = stand.tokens(prompt, SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True))
    model = load_model(stand.path, dtype=torch.float64)
    assert [isinstance(state, MeanState) for state in model.layer_states] == ["width" in shape for shape in LAYERS]
    ids = torch.tensor(prompt + said)
    with torch.inference_mode():
        logits = model.logits(model(ModelInput(ids, torch.arange(len(ids)), dense_mix(model))))
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == said


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("chunk", "page_size"), [(33, 4), (1024, 16)])
def test_drafts_change_nothing(stand: MeansStand, chunk: int, page_size: int, temperature: float) -> None:
    """Every drafter that can serve the model, and random trees, in one batch and again after prefix hits: the output is
    plain decoding's bit for bit, and every page is accounted for."""
    llm = stand.llm(max_num_batched_tokens=chunk, page_size=page_size)
    jobs = mixed_jobs(stand, 8, temperature, ["nothing", "hidden_states"], seed=chunk)
    first, again = check_identity(stand, jobs, llm=llm), check_identity(stand, jobs, llm=llm)
    assert accepted(first) and accepted(again)
    assert cached(again) > cached(first)


def test_a_backend_that_does_not_know_a_kind_refuses_it(path: Path) -> None:
    with pytest.raises(ValueError, match="ReferenceAttention cannot serve layers with MeanState, only with HeadsKV"):
        LLM(str(path), attention="reference", device="cpu", skip_tokenizer_init=True)
