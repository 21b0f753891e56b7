"""A small model as a drafter: its drafts in the engine equal its own output on the whole text, and drafts made with the
target's own weights are accepted to the last token. Only these tests detect stale KV."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from stridelm import LLM, SamplingParams
from stridelm.draft.given import given
from stridelm.draft.model.drafter import ModelDrafter
from stridelm.draft.model.vocabulary import FILE
from stridelm.llm import RequestOutput
from stridelm.models.layers.decoder import HEAD
from stridelm.run.state import PageTables
from stridelm.schedule.depth import Configured
from stridelm.types import Span
from support.checkpoints.changed import rewritten
from support.checkpoints.heads import config_of, tensors_of, write_eagle, write_medusa, write_mtp
from support.checkpoints.models import write
from support.checks.watch import (
    VOCAB,
    Watch,
    check_cold_and_warm,
    check_short_of_pages,
    continued,
    cut_prompts,
    engine,
    prompts,
    vary_depths,
)
from support.doubles.bounds import BOUNDS, bounds_registered
from support.doubles.depths import AtMost
from support.doubles.poison import PoisonedPool
from support.oracles.heads import Drafted
from support.oracles.models import VARIANTS

DEPTHS = (6, 1, 3)
"""Mixed in one batch."""
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "seed": 3}
DRAFTS: dict[str, dict[str, Any]] = {
    "qwen3": {**SMALL, "tie_word_embeddings": True},
    "mistral": {**SMALL, "num_hidden_layers": 1, "sliding_window": 5},
    "gemma4": {**VARIANTS["gemma4_text"]["shared-with-inputs"], "vocab_size_per_layer_input": VOCAB},
}
GREEDY: dict[str, Any] = {}
DRAWN = {"temperature": 1.0}
EDITED = {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4, "top_k": 4}
WEIGHED = {**EDITED, "rule": "rejection"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("target"), "qwen3", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {kind: write(root / kind, kind, vocab_size=VOCAB, **options) for kind, options in DRAFTS.items()}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """The target's own weights in another directory."""
    return Path(shutil.copytree(target, tmp_path_factory.mktemp("twin") / "model"))


def load(target: Path, draft: Path, **options: Any) -> LLM:
    return engine(target, drafter="model", drafter_model=str(draft), **options)


@cache
def oracle_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def watch(llm: LLM, path: Path) -> Watch:
    """Compares with the model by itself. A draft is expected whenever the missing tokens fit in a first pass."""

    @torch.inference_mode()
    def oracle(ids: list[int], guesses: list[int]) -> Drafted:
        logits = oracle_of(path)(torch.tensor([[*ids, *guesses[:-1]]])).logits[0, len(ids) - 1 :]
        return Drafted(logits.argmax(-1).tolist(), logits, torch.arange(VOCAB))

    def expected(span: Span) -> bool:
        return span.real <= len(span.request.rows_by_depth)

    return Watch(llm, oracle, expected)


def mixed(count: int, rule: str = "exact", **params: Any) -> list[SamplingParams]:
    """Different depths, in turn."""
    settings = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "seed": 1, **params}
    return [
        SamplingParams(**settings, speculation={"drafter": "model", "depth": depth, "acceptance": rule})
        for depth in (DEPTHS * count)[:count]
    ]


# What is drafted


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("page_size", [1, 16])
def test_drafts_are_the_model_s_own(
    target: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, page_size: int, chunk: int
) -> None:
    """Cold and after a prefix hit, with requests of several depths in one batch."""
    path = drafts["qwen3" if page_size == 1 else "gemma4" if chunk == 7 else "mistral"]
    cut_prompts(monkeypatch, chunk)
    llm = load(target, path, page_size=page_size)
    check_cold_and_warm(llm, watch(llm, path), mixed)


@pytest.mark.parametrize("attention", ["auto", BOUNDS])
@pytest.mark.parametrize("pages", [120, 14])
def test_depth_changes_and_preemption(
    target: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, pages: int, attention: str
) -> None:
    """Depths that change from step to step, including 0; preemption; rows laid out from bounds."""
    vary_depths(monkeypatch)
    with bounds_registered():
        llm = load(target, drafts["qwen3"], num_pages=pages, attention=attention)
    check_short_of_pages(llm, watch(llm, drafts["qwen3"]), mixed(5, max_tokens=30), short=pages == 14)


def test_a_head_that_config_denies(target: Path, tmp_path: Path) -> None:
    """A small model's head in the files is used, whatever its config.json says of a tie."""
    path = write(tmp_path / "draft", "qwen3", vocab_size=VOCAB, **SMALL)
    config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(config))
    llm = load(target, path)
    check_cold_and_warm(llm, watch(llm, path), mixed)


def all_accepted(outputs: list[RequestOutput], least: int) -> None:
    """Every guess of every sample is accepted, and at least `least` of each."""
    for output in outputs:
        for sample in output.outputs:
            assert sample.metrics is not None
            assert sample.metrics.accepted == sample.metrics.drafted >= least


@pytest.mark.parametrize(
    ("page_size", "chunk", "params"),
    [(1, 1, GREEDY), (1, 7, DRAWN), (1, 1024, EDITED), (16, 1, WEIGHED), (16, 7, GREEDY), (16, 1024, DRAWN)],
)
def test_the_target_s_own_weights(
    target: Path,
    twin: Path,
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
    chunk: int,
    params: dict[str, Any],
) -> None:
    """Drafts of the target itself are accepted whole: cold, on a cache that others filled, and after prefix hits.
    Sampled guesses use their position's noise, or have the distribution that they were drawn from, and penalties count
    the guesses before them."""
    cut_prompts(monkeypatch, chunk)
    llm = load(target, twin, page_size=page_size)
    jobs = prompts(3)
    llm.generate(jobs, SamplingParams(temperature=0.0, max_tokens=20, speculation={"drafter": "none"}))
    first = llm.generate(jobs, mixed(3, **params))
    all_accepted(first, least=9)
    longer = continued(jobs, [output.outputs[0].token_ids for output in first])
    second = llm.generate(longer, mixed(len(longer), n=2, **params))
    all_accepted(second, least=9)
    assert any(o.metrics is not None and o.metrics.cached_tokens > 0 for o in second)
    # A finished request's pages, to the last full one: its last tokens were never run by its own drafter.
    known = [prompt + output.outputs[0].token_ids for prompt, output in zip(longer, second)]
    third = llm.generate([tokens + [0] for tokens in known], mixed(len(known), **params))
    all_accepted(third, least=9)
    llm.check()


@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize("pages", [120, 14])
def test_the_target_s_own_weights_whatever_happens(
    target: Path, twin: Path, monkeypatch: pytest.MonkeyPatch, pages: int, lags: bool
) -> None:
    """Depths that change from step to step; preemption; and the host reading every verdict one step late."""
    vary_depths(monkeypatch)
    with bounds_registered():
        llm = load(target, twin, num_pages=pages, attention=BOUNDS if lags else "auto")
    assert llm.engine.steps.lag == int(lags)
    for seed in range(2):
        outputs = llm.generate([job[:6] for job in prompts(5, seed)], mixed(5, max_tokens=30, temperature=float(seed)))
        all_accepted(outputs, least=3)
    assert (llm.engine.stats.preemptions > 0) == (pages == 14)
    llm.check()


def test_depth_0_for_long(target: Path, twin: Path) -> None:
    """After any number of steps without a draft, the next draft is complete."""
    llm = load(target, twin)
    seen = watch(llm, twin)
    llm.engine.steps.planner.depths = AtMost(0)
    (request,) = [llm.engine.add("a", [1, 2, 3], mixed(1, max_tokens=80)[0])]
    while len(request.output_ids) < 40:
        llm.engine.step()
    assert seen.checked == 0
    llm.engine.steps.planner.depths = Configured()
    llm.engine.step()
    assert seen.checked == 1 and seen.accepted == DEPTHS[0]
    llm.engine.abort("a")


class PoisonedDraft(PoisonedPool):
    """Watches the drafter's own pool."""

    def _tensors(self) -> list[torch.Tensor]:
        drafter = self._engine.drafters.get("model")
        assert isinstance(drafter, ModelDrafter)
        return drafter._runner.pool.tensors


@pytest.mark.parametrize("attention", ["auto", BOUNDS])
def test_others_pages_are_left_alone(target: Path, twin: Path, monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    """In a batch with a deep request, a shallow one's rows neither write nor read pages that are not its own."""
    vary_depths(monkeypatch)
    with bounds_registered():
        llm = load(target, twin, attention=attention, page_size=1, num_pages=160, enable_prefix_caching=False)
    pool, requests = PoisonedDraft(llm.engine), []
    for i, (prompt, params) in enumerate(zip(prompts(7, longest=8), mixed(7, max_tokens=25))):
        requests.append(llm.engine.add(str(i), prompt, params))
    while llm.engine.busy:
        pool.step()
    assert pool.watched > 100
    assert all(r.stats.accepted == r.stats.drafted > 0 for r in requests)


def test_entries_behind_a_table_are_nobody_s() -> None:
    """A page that a request gave back no longer appears at the end of its table."""
    span: Any = SimpleNamespace(request=SimpleNamespace(slot=1))
    tables = PageTables(("main",), 2, 5, torch.device("cpu"))
    for stamp, pages in enumerate(([3, 4, 7], [3], [3, 9], [5, 9, 2, 1], []), start=1):
        lease = SimpleNamespace(tables={"main": pages}, stamp=stamp)
        tables.update((span,), SimpleNamespace(leases=[lease]))  # type: ignore[arg-type]
        assert tables.tables["main"][1].tolist() == pages + [0] * (5 - len(pages))
        assert not tables.tables["main"][[0, 2]].any()


# Vocabularies


def with_tokenizer(
    path: Path, tokens: list[str], added: list[dict[str, Any]] | None = None, *, unigram: bool = False
) -> Path:
    vocab: Any = [[token, 0.0] for token in tokens] if unigram else {token: id for id, token in enumerate(tokens)}
    (path / FILE).write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added or []}))
    return path


def special(id: int, content: str) -> dict[str, Any]:
    return {"id": id, "content": content, "special": True}


@pytest.mark.parametrize("sizes", [(8, 6), (6, 8)])
def test_vocabularies_padded_differently(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """If both have the same tokens, extra rows after the last one do no harm, even in a prompt."""
    target = with_tokenizer(write(tmp_path / "target", "qwen3", vocab_size=sizes[0]), list("abcde"))
    draft = with_tokenizer(write(tmp_path / "draft", "qwen3", vocab_size=sizes[1], seed=4), list("abcde"), unigram=True)
    jobs = [[1, 2, sizes[0] - 1, 3, 4, 2], [4] * 9]
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=2, ignore_eos=True, repetition_penalty=1.2, top_p=0.9)
    said = [o.outputs[0].token_ids for o in engine(target, drafter="none").generate(jobs, params)]
    outputs = load(target, draft).generate(jobs, params)
    assert [o.outputs[0].token_ids for o in outputs] == said
    assert sum(o.metrics.accepted for o in outputs if o.metrics is not None) > 0


def refused(target: Path, draft: Path | None, **options: Any) -> str:
    try:
        load(target, draft, **options) if draft else engine(target, drafter="model", **options)
    except ValueError as error:
        return str(error)
    raise AssertionError("it was not refused")


def test_another_tokenizer(tmp_path: Path) -> None:
    """The error names the first token that differs; special tokens, which fine-tuning renames, may differ."""
    target = with_tokenizer(write(tmp_path / "target", "qwen3", vocab_size=6), list("abcde"), [special(5, "<end>")])
    draft = write(tmp_path / "draft", "qwen3", vocab_size=6)
    load(target, with_tokenizer(draft, list("abcde"), [special(5, "<stop>")]))
    for tokens, shown in ((list("abxye"), "token 2 is 'x'"), (list("abcd"), "token 4 is none")):
        other = tmp_path / "".join(tokens)
        shutil.copytree(draft, other)
        message = refused(target, with_tokenizer(other, tokens))
        assert shown in message and "same tokenizer" in message and str(target) in message
    broken = Path(shutil.copytree(draft, tmp_path / "broken"))
    (broken / FILE).write_text("{}")
    assert "cannot be read" in refused(target, broken)


def test_another_size_of_vocabulary(target: Path, tmp_path: Path) -> None:
    """Without the tokenizers nothing proves that the ids agree."""
    message = refused(target, write(tmp_path / "draft", "qwen3", vocab_size=9))
    assert "9 tokens" in message and f"the model {VOCAB}" in message and FILE in message


# What else is refused, and recognised


def test_what_cannot_draft(target: Path, twin: Path, tmp_path: Path) -> None:
    """The model itself, one with a shorter context, none at all, and a depth beyond the limit of a draft."""
    assert "the model itself" in refused(target, target)
    short = write(tmp_path / "short", "qwen3", vocab_size=VOCAB, max_position_embeddings=64)
    message = refused(target, short)
    assert "64 tokens" in message and "256" in message and "set max_model_len to at most 64" in message
    load(target, short, max_model_len=64)
    assert "drafter_model" in refused(target, None)
    assert "over 64" in refused(target, twin, depth=65)
    assert "at most prompt_lookup_max" in refused(target, twin, prompt_lookup_min=3, prompt_lookup_max=2)


def test_weights_that_do_not_fit(target: Path, twin: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(twin, tmp_path / "less"))
    tensors = tensors_of(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert "missing: model.layers.1.mlp.up_proj.weight" in refused(target, path)


def test_no_room_for_its_pages(target: Path, twin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stridelm.run.heads.free_memory", lambda device: 1000)
    assert "lower num_pages" in refused(target, twin)


def test_heads_are_no_models(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A whole decoder is recognised, also with modules of its own; a head is not, whatever its config.json says."""
    target = checkpoint("qwen3")
    whole = [target, write_mtp(tmp_path / "mtp", "deepseek")]
    heads = [
        write_medusa(tmp_path / "medusa", target),
        *(write_eagle(tmp_path / form, target, form, embed="own") for form in ("eagle1", "eagle3", "speculators")),
    ]
    tied = checkpoint("qwen3", tie_word_embeddings=True)
    whole.append(rewritten(tied, tmp_path / "head", lambda t: t.update({HEAD: t.pop("model.embed_tokens.weight")})))
    medusa = shutil.copytree(target, tmp_path / "both")
    (medusa / "config.json").write_text(json.dumps({**config_of(target), "medusa_num_heads": 3}))
    assert [ModelDrafter.recognises(given(path)) for path in whole] == [True] * 3
    assert [ModelDrafter.recognises(given(path)) for path in [*heads, medusa]] == [False] * 5


def test_random_weights(target: Path, twin: Path) -> None:
    """With load_format="dummy" the small model's weights are random too."""
    llm = load(target, twin, load_format="dummy")
    assert np.size(llm.generate([[1, 2]], mixed(1))[0].outputs[0].token_ids) == 20
