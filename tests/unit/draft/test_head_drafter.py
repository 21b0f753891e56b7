"""Heads that follow the target: their drafts in the engine equal those of a plain forward pass over the whole text,
whatever was rejected, shared, cut into chunks or computed again meanwhile. Only these tests detect stale KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from stridelm import LLM, SamplingParams
from support.checkpoints.fp8 import SUMS, write_fp8
from support.checkpoints.heads import EagleForm, MtpForm, write_eagle, write_mtp
from support.checkpoints.models import write
from support.checks.watch import CLOSE, VOCAB, Watch, continued, prompts, vary_depths
from support.checks.watch import engine as serve
from support.doubles.bounds import BOUNDS, bounds_registered
from support.oracles import heads as head_oracles
from support.oracles.fp8 import mtp_oracle, wide_softmax
from support.oracles.heads import Drafted

DEPTH = 3
Oracle = Callable[[list[int], list[int]], Drafted]
"""(known tokens, the draft made after them) -> the correct draft, of the same length."""


def mtp(form: MtpForm, modules: int, **target: Any) -> Callable[[Path], tuple[dict[str, Any], Oracle]]:
    def make(path: Path) -> tuple[dict[str, Any], Oracle]:
        write_mtp(path / "model", form, modules, vocab_size=VOCAB, **target)
        oracle = head_oracles.mtp(path / "model", form)
        options = {"model": str(path / "model"), "drafter": "mtp"}
        drafts = oracle.in_turn if modules > 1 else oracle.recursive
        return options, lambda ids, drafted: drafts(ids, len(drafted))

    return make


def eagle(
    form: EagleForm, model_type: str = "qwen3", target: dict[str, Any] | None = None, **kind: Any
) -> Callable[[Path], tuple[dict[str, Any], Oracle]]:
    def make(path: Path) -> tuple[dict[str, Any], Oracle]:
        write(path / "model", model_type, vocab_size=VOCAB, **(target or {}))
        write_eagle(path / "head", path / "model", form, **kind)
        oracle = head_oracles.eagle(path / "head", path / "model", form)
        options = {"model": str(path / "model"), "drafter": "eagle", "drafter_model": str(path / "head")}
        return options, lambda ids, drafted: oracle.recursive(ids, len(drafted))

    return make


HEADS = {
    "deepseek": mtp("deepseek", 1),
    "mimo": mtp("mimo", 1),
    "deepseek-in-turn": mtp("deepseek", 3),
    "mimo-in-turn": mtp("mimo", 2),
    "latent": mtp("deepseek", 1, model_type="deepseek_v3", scale=3.0),
    "latent-in-turn": mtp("deepseek", 3, model_type="deepseek_v3", scale=3.0),
    "partly-rotated": mtp("deepseek", 1, model_type="glm4_moe", scale=3.0, copies=True),
    "partly-rotated-in-turn": mtp("deepseek", 3, model_type="glm4_moe", scale=3.0, use_qk_norm=True),
    "latent-no-experts": mtp("deepseek", 1, model_type="deepseek_v3", scale=3.0, first_k_dense_replace=2, seed=7),
    "partly-rotated-no-experts": mtp("deepseek", 1, model_type="glm4_moe", scale=3.0, first_k_dense_replace=3, seed=13),
    "own-ends": mtp("deepseek", 1, copies="other"),
    "own-ends-in-turn": mtp("deepseek", 3, copies="other", tie_word_embeddings=True),
    "eagle1": eagle("eagle1"),
    "eagle1-own": eagle("eagle1", bias=True, embed="own", binary=True),
    "eagle3": eagle("eagle3", draft_vocab=4),
    "eagle3-normed": eagle("eagle3", norm_before_residual=True, embed="copy"),
    "speculators": eagle("speculators"),
    "eagle3-experts": eagle("eagle3", "qwen3_moe", {"scale": 3.0}, seed=2, head_dim=24, max_position_embeddings=16),
    "eagle3-latent": eagle(
        "eagle3",
        "deepseek_v3",
        {"scale": 3.0, "num_hidden_layers": 5},
        aux_layers=(2, 3, 4),
        nested=True,
        head_dim=None,
        num_key_value_heads=2,
    ),
    "speculators-latent": eagle("speculators", "deepseek_v3", {"scale": 3.0}, head_dim=16),
}


def engine(options: dict[str, Any], **more: Any) -> LLM:
    return serve(**{"depth": DEPTH, "num_pages": 400, **options, **more})


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_the_oracle_s(tmp_path: Path, name: str) -> None:
    """Cold, from the prefix cache, with chunks, and after preemption; with rejections and acceptances."""
    options, oracle = HEADS[name](tmp_path)
    depth = {"depth": 2} if name == "mimo-in-turn" else {}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    llm = engine(options, max_num_batched_tokens=23, **depth)
    watch = Watch(llm, oracle)
    jobs = prompts(3)
    said = [output.outputs[0].token_ids for output in llm.generate(jobs, params)]
    assert watch.checked > 15 and watch.accepted > 0
    # Once more with warm pages, prompts that continue earlier ones, and one that departs in the middle of a page.
    longer = continued(jobs, said)
    outputs = llm.generate(longer, params)
    assert any(o.metrics is not None and o.metrics.cached_tokens > 0 for o in outputs)
    llm.check()
    tight = engine(options, num_pages=12, page_size=4, **depth)
    watch = Watch(tight, oracle)
    tight.generate([job[:6] for job in prompts(5, seed=1)], params)
    assert tight.engine.stats.preemptions > 0 and watch.checked > 15
    tight.check()


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("form", SUMS)
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_modules_in_eight_bits(tmp_path: Path, kind: str, form: str, modules: int) -> None:
    """Drafts of modules that a checkpoint stores in eight bits, like its target's layers, are those of the format's
    definition."""
    sizes: dict[str, Any] = {"hidden_size": 136, "vocab_size": VOCAB}  # of a width that ends within a block
    dense = write_mtp(tmp_path / "dense", "deepseek", modules, model_type=kind, **sizes)
    path = write_fp8(tmp_path / "eight", dense, form)
    oracle = mtp_oracle(path, form)
    drafts = oracle.in_turn if modules > 1 else oracle.recursive

    def wanted(ids: list[int], drafted: list[int]) -> Drafted:
        with mock.patch.object(nn.functional, "softmax", wide_softmax):
            return drafts(ids, len(drafted))

    llm = engine({"model": path, "drafter": "mtp"}, dtype="float64", depth=2)
    watch = Watch(llm, wanted)
    llm.generate(prompts(3), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert watch.checked > 15


@pytest.mark.parametrize("name", ["deepseek", "mimo-in-turn", "eagle3"])
def test_depths_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """However the depth changes from step to step, 0 included, the next draft is the correct one."""
    options, oracle = HEADS[name](tmp_path)
    depth = {"depth": 2} if name == "mimo-in-turn" else {}
    vary_depths(monkeypatch)
    llm = engine(options, **depth)
    watch = Watch(llm, oracle)
    llm.generate(prompts(3, seed=3), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    assert watch.checked > 15 and watch.accepted > 0


@pytest.mark.parametrize("name", ["deepseek", "deepseek-in-turn", "eagle3"])
def test_on_bounds(tmp_path: Path, name: str) -> None:
    """The same if the device looks up lengths and pages, and the host plans on bounds; trees too."""
    options, oracle = HEADS[name](tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    said = [output.outputs[0].token_ids for output in engine(options).generate(prompts(3), params)]
    with bounds_registered():
        llm = engine(options, attention=BOUNDS, max_num_batched_tokens=23)
        watch = Watch(llm, oracle)
        llm.generate(prompts(3), params)
        assert watch.checked > 20
        kinds = [{}] if name == "deepseek-in-turn" else [{}, *TREES.values()]
        for kind in kinds:
            ahead = engine(options, attention=BOUNDS, **kind)  # no tracer, so a step stays in flight
            assert [output.outputs[0].token_ids for output in ahead.generate(prompts(3), params)] == said
            assert ahead.engine.steps.lag == 1
            ahead.check()


@pytest.mark.parametrize("name", ["deepseek", "eagle3"])
def test_unequal_neighbours(tmp_path: Path, name: str) -> None:
    """Requests of one step run to one depth; those with a smaller depth neither read nor write beyond their pages."""
    options, _ = HEADS[name](tmp_path)
    llm = engine(options, page_size=1, attention="reference", depth=9)
    shallow, deep = (
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, speculation={"depth": depth})
        for depth in (1, 9)
    )
    jobs = prompts(4)
    said = [output.outputs[0].token_ids for output in llm.generate(jobs, [shallow, deep, shallow, deep])]
    plain = engine(options, depth=0).generate(jobs, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert said == [output.outputs[0].token_ids for output in plain]
    llm.check()


TREES: dict[str, dict[str, Any]] = {
    "dynamic": {"draft_topk": 3, "num_draft_tokens": 9, "depth": 3},
    "static": {"token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]", "depth": 3},
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", ["deepseek", "eagle3"])
def test_trees(tmp_path: Path, name: str, tree: str) -> None:
    """Every node's children are the top tokens of a plain forward pass over its path; the tree accepts more than a
    chain does, with the same output."""
    options, oracle = HEADS[name](tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    chain = engine(options)
    watch = Watch(chain, oracle)
    said = [output.outputs[0].token_ids for output in chain.generate(prompts(4), params)]
    llm = engine(options, **TREES[tree])
    accepted = checked = 0

    def look(plan: Any, draft: Any, batch: Any, outcome: Any) -> None:
        nonlocal accepted, checked
        for row, span in enumerate(plan.spans):
            accepted += outcome.accepted[row]
            if not draft.width or not draft.valid[row].any():
                continue
            valid = draft.valid[row]
            tokens, parents = draft.tokens[row][valid].tolist(), draft.parents[row][valid].tolist()
            ids = span.request.token_ids
            first = oracle(ids, [0] * DEPTH)
            greedy = [t for t, parent in zip(tokens, parents) if parent == -1]
            best = first.ids_V[first.logits_DV[0].topk(len(greedy)).indices].tolist()
            if first.margin > CLOSE:
                assert greedy[0] == best[0]
                # The path along the most likely children is the chain, as far as the tree contains it.
                at, path = -1, []
                while at in parents:
                    at = parents.index(at)
                    path.append(tokens[at])
                if tree == "static":
                    assert path == first.tokens[: len(path)], (
                        span.request.id,
                        span.request.known,
                        span.depth,
                        tokens,
                        parents,
                    )
                checked += 1

    llm.engine.tracer = look
    again = [output.outputs[0].token_ids for output in llm.generate(prompts(4), params)]
    llm.check()
    assert again == said and checked > 20
    assert accepted > watch.accepted
