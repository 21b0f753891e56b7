"""Medusa heads: their drafts in the engine equal those of a plain computation over the whole text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stridelm import LLM, SamplingParams
from stridelm.draft.given import given
from stridelm.draft.medusa.drafter import MedusaDrafter
from stridelm.types import Span
from support.checkpoints.heads import config_of, tensors_of, write_medusa
from support.checkpoints.models import write
from support.checks.watch import (
    CLOSE,
    VOCAB,
    Watch,
    check_cold_and_warm,
    check_short_of_pages,
    cut_prompts,
    engine,
    prompts,
    vary_depths,
)
from support.doubles.bounds import BOUNDS, bounds_registered
from support.oracles.heads import Drafted, Medusa

HEADS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("target"), "qwen3", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return write_medusa(tmp_path_factory.mktemp("heads"), target, HEADS)


def load(target: Path, heads: Path, **options: Any) -> LLM:
    return engine(target, drafter="medusa", drafter_model=str(heads), **{"depth": HEADS, **options})


def watch(llm: LLM, target: Path, heads: Path) -> Watch:
    """Compares with the oracle. A request is drafted for once it has decided since it got its slot."""
    oracle = Medusa(heads, target)
    decided: dict[int, int] = {}
    admit = llm.engine.drafters.admit

    def forget(request: Any) -> None:
        decided[request.slot] = request.known
        admit(request)

    def expected(span: Span) -> bool:
        return span.request.known > decided[span.request.slot]

    llm.engine.drafters.admit = forget  # type: ignore[method-assign]

    return Watch(llm, lambda ids, guesses: oracle(ids, len(guesses)), expected)


def mixed(count: int) -> list[SamplingParams]:
    """Different depths, in turn."""
    kinds = [{"drafter": "medusa", "depth": depth} for depth in (HEADS, 1, 2)]
    return [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, speculation=k) for k in kinds * count][
        :count
    ]


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("page_size", [1, 16])
def test_drafts_are_the_oracle_s(
    target: Path, heads: Path, monkeypatch: pytest.MonkeyPatch, page_size: int, chunk: int
) -> None:
    """Cold and after a prefix hit, with requests of several depths in one batch."""
    cut_prompts(monkeypatch, chunk)
    llm = load(target, heads, page_size=page_size)
    check_cold_and_warm(llm, watch(llm, target, heads), mixed)


@pytest.mark.parametrize("attention", ["auto", BOUNDS])
@pytest.mark.parametrize("pages", [120, 12])
def test_depth_changes_and_preemption(
    target: Path, heads: Path, monkeypatch: pytest.MonkeyPatch, pages: int, attention: str
) -> None:
    """Depths that change from step to step, including 0; preemption; rows laid out from bounds."""
    vary_depths(monkeypatch)
    with bounds_registered():
        llm = load(target, heads, num_pages=pages, attention=attention)
    check_short_of_pages(llm, watch(llm, target, heads), mixed(5), short=pages == 12)


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("form", ["safetensors", "pt", "prefixed", "unbiased", "with its model"])
def test_layouts(target: Path, tmp_path: Path, form: str, blocks: int) -> None:
    """However the heads are stored, they draft the same as the oracle."""
    path = write_medusa(tmp_path / "heads", target, 2, blocks, binary=form == "pt")
    plain = tmp_path / "plain"
    tensors = tensors_of(path)
    if form == "unbiased":
        for name, tensor in tensors.items():
            if name.endswith("bias"):
                tensor.zero_()
    rewrite(path, plain, tensors)
    if form == "prefixed":
        rewrite(path, path, {f"medusa_head.{name}": tensor for name, tensor in tensors.items()})
    if form == "with its model":
        named = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
        rewrite(path, path, named | tensors_of(target))
    if form == "unbiased":
        rewrite(path, path, {name: tensor for name, tensor in tensors.items() if not name.endswith("bias")})
    assert MedusaDrafter.recognises(given(path))
    llm = load(target, path, depth=2)
    seen = watch(llm, target, plain)
    llm.generate(prompts(2), GREEDY)
    assert seen.checked > 10


def rewrite(source: Path, path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """The directory with other tensors in one file, and with changes to its config."""
    path.mkdir(exist_ok=True)
    changed = {**config_of(source), **config}
    for file in path.iterdir():
        file.unlink()
    (path / "config.json").write_text(json.dumps(changed))
    save_file(tensors, path / "heads.safetensors")
    return path


TREES: dict[str, dict[str, Any]] = {
    "dynamic": {"depth": 3, "draft_topk": 3, "num_draft_tokens": 10},
    "all": {"depth": 2, "draft_topk": 2, "num_draft_tokens": 6},
    "static": {"depth": 3, "token_tree": [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]},
}


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """The path of tokens to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)
    return set(found)


def likeliest(drafted: Drafted, kind: dict[str, Any]) -> tuple[set[tuple[int, ...]], float]:
    """The nodes that the tree should have, and the margin by which they were chosen."""
    logs = drafted.logits_DV.log_softmax(-1)
    ranked = [[(float(value), int(token)) for value, token in zip(*level.sort(descending=True))] for level in logs]
    clear = min(a[0] - b[0] for level in ranked for a, b in itertools.pairwise(level))
    if "token_tree" in kind:
        return {tuple(ranked[d][rank][1] for d, rank in enumerate(path)) for path in kind["token_tree"]}, clear
    grows: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    nodes: list[tuple[float, tuple[int, ...]]] = []
    for level in ranked[: kind["depth"]]:
        born = [
            (total + value, (*path, token)) for total, path in grows for value, token in level[: kind["draft_topk"]]
        ]
        nodes += born
        born.sort(reverse=True)
        grows = born[: kind["draft_topk"]]
        clear = min([clear, *(a[0] - b[0] for a, b in itertools.pairwise(born))])
    nodes.sort(reverse=True)
    clear = min([clear, *(a[0] - b[0] for a, b in itertools.pairwise(nodes))])
    return {path for _, path in nodes[: kind["num_draft_tokens"]]}, clear


@pytest.mark.parametrize("tree", TREES)
def test_trees_are_the_likeliest_nodes(target: Path, heads: Path, tree: str) -> None:
    """Dynamic and static trees have the nodes that plain sorting of the oracle's log-probabilities gives."""
    kind, oracle = TREES[tree], Medusa(heads, target)
    llm = engine(target, drafter="medusa", drafter_model=str(heads))
    checked = accepted = 0

    def look(plan: Any, draft: Any, batch: Any, outcome: Any) -> None:
        nonlocal checked, accepted
        for row, span in enumerate(plan.spans):
            if draft.width == 0 or not bool(draft.valid[row].all()) or span.depth < kind["depth"]:
                continue
            wanted, clear = likeliest(oracle(span.request.token_ids, kind["depth"]), kind)
            if clear > CLOSE / 10:
                assert paths(draft.tokens[row].tolist(), draft.parents[row].tolist()) == wanted
                checked += 1
            accepted += outcome.accepted[row]

    llm.engine.tracer = look
    llm.generate(prompts(3), replace(GREEDY, speculation={"drafter": "medusa", **kind}))
    assert checked > 10 and accepted > 0
    llm.check()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_meet_the_target_s_noise(tmp_path: Path, temperature: float) -> None:
    """A head that predicts like the target is always right, sampled or not: a guess uses the noise of its position."""
    # Without layers the state depends only on the last token, so one vocabulary matrix determines everything.
    target = constant_target(tmp_path / "target")
    tensors = {f"{head}.0.weight": tensors_of(target)["lm_head.weight"] for head in range(3)}
    heads = tmp_path / "heads"
    heads.mkdir()
    config = {"medusa_num_heads": 3, "medusa_num_layers": 0, "hidden_size": 64, "vocab_size": 64}
    (heads / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, heads / "heads.safetensors")
    llm = load(target, heads, depth=3)
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True, seed=1, top_k=20)
    for output in llm.generate([[5, 6, 7], [9] * 12], params):
        metrics = output.metrics
        assert metrics is not None and metrics.accepted == metrics.drafted > 15
        assert len(set(output.outputs[0].token_ids)) > (5 if temperature else 0)


def constant_target(path: Path) -> Path:
    """A model whose state is the same after every token."""
    write(path, "qwen3")
    tensors = tensors_of(path)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:1].expand(64, -1).contiguous()
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name].zero_()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


# What is refused


def refused(target: Path, heads: Path | None, **options: Any) -> str:
    try:
        load(target, heads, **options) if heads else engine(target, drafter="medusa", **options)
    except ValueError as error:
        return str(error)
    raise AssertionError("it was not refused")


def test_heads_of_another_model(target: Path, heads: Path, tmp_path: Path) -> None:
    """The error has both numbers and the remedy, before a weight is read."""
    wide = write_medusa(tmp_path / "wide", write(tmp_path / "a", "qwen3", vocab_size=VOCAB, hidden_size=32))
    message = refused(target, wide)
    assert "hidden size 32" in message and "the model 64" in message and "trained for this model" in message
    other = write_medusa(tmp_path / "other", write(tmp_path / "b", "qwen3", vocab_size=9))
    message = refused(target, other)
    assert "says 9 tokens" in message and f"the model {VOCAB}" in message and "trained for this model" in message
    assert "drafter_model" in refused(target, None)
    assert f"over {HEADS}, the Medusa heads there are; lower it" in refused(target, heads, depth=HEADS + 1)
    assert "looked-up" in refused(target, heads, draft_topk=2, prompt_lookup_min=3)
    assert "at most prompt_lookup_max" in refused(target, heads, prompt_lookup_min=3, prompt_lookup_max=2)


def test_files_that_do_not_fit(target: Path, heads: Path, tmp_path: Path) -> None:
    """The error names a head that config.json lists, or a tensor, if it is missing, misshapen or not finite."""
    tensors = tensors_of(heads)
    assert "4.1.weight" in refused(target, rewrite(heads, tmp_path / "more", tensors, medusa_num_heads=5))
    less = {name: tensor for name, tensor in tensors.items() if name != "2.0.linear.bias"}
    assert "missing: 2.0.linear.bias" in refused(target, rewrite(heads, tmp_path / "less", less))
    bent = {**tensors, "1.1.weight": torch.zeros(3, 64)}
    assert "misshapen: 1.1.weight" in refused(target, rewrite(heads, tmp_path / "bent", bent))
    wrong = {**tensors, "1.1.weight": torch.full((VOCAB, 64), float("nan"))}
    assert "not finite" in refused(target, rewrite(heads, tmp_path / "wrong", wrong))


def test_what_the_config_leaves_out(target: Path, heads: Path, tmp_path: Path) -> None:
    """The first released heads have 2 in their config.json but 5 in the file: the tensors decide."""
    path = rewrite(heads, tmp_path / "few", tensors_of(heads), medusa_num_heads=2)
    llm = load(target, path, depth=HEADS)
    seen = watch(llm, target, heads)
    llm.generate(prompts(1), GREEDY)
    assert seen.checked > 5


def test_nothing_else_is_taken_for_heads(checkpoint: Callable[..., Path]) -> None:
    assert not MedusaDrafter.recognises(given(checkpoint("qwen3")))
