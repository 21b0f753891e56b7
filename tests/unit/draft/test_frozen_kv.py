"""Assistants that read the target's entries: their drafts in the engine equal those of a plain computation over the
whole text, whatever was rejected, shared, cut into chunks or computed again meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stridelm import LLM, SamplingParams
from stridelm.attention import BACKENDS
from stridelm.attention.triton import TritonAttention
from stridelm.batch import Draft, ForwardBatch
from stridelm.cache.layout import FULL as FULL_PAGES
from stridelm.cache.layout import LayerStates
from stridelm.config import EngineConfig
from stridelm.draft.base import TargetInfo
from stridelm.draft.frozen_kv.drafter import FrozenKVDrafter
from stridelm.draft.frozen_kv.head import FrozenKVHead
from stridelm.draft.given import given
from stridelm.engine.engine import Engine
from stridelm.engine.load import load as load_engine
from stridelm.engine.outcome import Outcome
from stridelm.parallel.shard import ONE, Shard
from stridelm.types import Span, StepPlan
from support.checkpoints.assistants import write_assistant
from support.checkpoints.heads import tensors_of
from support.checkpoints.models import write
from support.checks.watch import (
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
from support.doubles.interpreter import INTERPRETED
from support.doubles.ranks import on_each_rank
from support.oracles.assistants import Assistant
from support.oracles.models import FULL, SLIDING, VARIANTS

DEPTH = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
WINDOWED: dict[str, Any] = {"layer_types": [SLIDING, FULL, SLIDING], "num_hidden_layers": 3, "sliding_window": 7}
GEMMA = {**VARIANTS["gemma4_text"]["shared-with-inputs"], "sliding_window": 7, "global_head_dim": 32}
TARGETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma": ("gemma4_text", GEMMA, {}),
    "ordered": ("gemma4_text", GEMMA, {"centroids": (VOCAB, 2)}),
    "llama": ("llama", {}, {"kinds": [FULL, FULL]}),
    "slides": ("qwen2", {**WINDOWED, "use_sliding_window": True}, {"kinds": [SLIDING, FULL]}),
}
"""Family, its changes, and the assistant's."""


def make(path: Path, name: str) -> tuple[Path, Path]:
    family, changes, head = TARGETS[name]
    target = write(path / "target", family, vocab_size=VOCAB, **changes)
    made = write_assistant(path / "head", target, **head)
    assert made is not None
    return target, made


@pytest.fixture(scope="module", params=TARGETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("gemma"), "gemma")


def load(pair: tuple[Path, Path], **options: Any) -> LLM:
    target, head = pair
    return engine(target, drafter="frozen_kv", drafter_model=str(head), **{"depth": DEPTH, **options})


def watch(llm: LLM, pair: tuple[Path, Path]) -> Watch:
    """Compares with the oracle. A request is drafted for once it has decided since it got its slot."""
    target, head = pair
    oracle = Assistant(head, target)
    decided: dict[int, int] = {}
    admit = llm.engine.drafters.admit

    def forget(request: Any) -> None:
        decided[request.slot] = request.known
        admit(request)

    def expected(span: Span) -> bool:
        return span.request.known > decided[span.request.slot]

    llm.engine.drafters.admit = forget  # type: ignore[method-assign]
    return Watch(llm, oracle, expected)


def mixed(count: int) -> list[SamplingParams]:
    """Different depths, in turn."""
    kinds = [{"drafter": "frozen_kv", "depth": depth} for depth in (DEPTH, 1, 2)]
    return [replace(GREEDY, speculation=kind) for kind in kinds * count][:count]


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("page_size", [1, 4])
def test_drafts_are_the_oracle_s(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, page_size: int, chunk: int
) -> None:
    """Cold and after a prefix hit, with requests of several depths in one batch."""
    cut_prompts(monkeypatch, chunk)
    llm = load(pair, page_size=page_size)
    check_cold_and_warm(llm, watch(llm, pair), mixed)


@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": None}, {"rope_scaling": {"type": "linear", "factor": 3.0}}])
def test_a_target_in_older_spellings(tmp_path: Path, scaling: dict[str, Any]) -> None:
    """Published configs have a base and, if rotation is scaled at all, a field for that, not `rope_parameters`."""
    target = write(tmp_path / "target", "llama", vocab_size=VOCAB)
    config = json.loads((target / "config.json").read_text())
    del config["rope_parameters"]
    (target / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0, **scaling}))
    head = write_assistant(tmp_path / "head", target)
    assert head is not None
    llm = load((target, head))
    seen = watch(llm, (target, head))
    llm.generate(prompts(3), GREEDY)
    assert seen.checked > 15


@pytest.mark.parametrize("attention", ["auto", BOUNDS])
@pytest.mark.parametrize("pages", [120, 12])
def test_depth_changes_and_preemption(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, pages: int, attention: str
) -> None:
    """Depths that change from step to step, including 0; preemption; rows laid out from bounds."""
    vary_depths(monkeypatch)
    with bounds_registered():
        llm = load(pair, num_pages=pages, attention=attention)
    check_short_of_pages(llm, watch(llm, pair), mixed(5), short=pages == 12)


@INTERPRETED
@pytest.mark.parametrize("deterministic", [True, False])
def test_drafts_on_the_kernel(gemma: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    """The kernel that serves on GPUs draws the same drafts."""

    class Interpreted(TritonAttention):
        device = None  # type: ignore[assignment]

        def __init__(self, _: bool) -> None:
            super().__init__(deterministic)

    BACKENDS.add("interpreted", Interpreted)
    try:
        llm = load(gemma, attention="interpreted", depth=2)
    finally:
        BACKENDS.remove("interpreted")
    seen = watch(llm, gemma)
    llm.generate(prompts(2, longest=12), replace(GREEDY, max_tokens=8))
    assert seen.checked > 4


def test_one_group_s_pages_for_all(gemma: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault seen in another engine, whose drafts were then never accepted: layers with a window are given the page
    tables of those without."""
    reading = FrozenKVHead.reading

    def in_one(head: FrozenKVHead, kept: LayerStates) -> Any:
        return tuple(replace(state, group=FULL_PAGES) for state in reading(head, kept))

    def drafts_well() -> None:
        llm = load(gemma, num_pages=40, enable_prefix_caching=False)
        seen = watch(llm, gemma)
        for seed in range(3):  # pages come back in another order from group to group
            llm.generate(prompts(3, seed), mixed(3))
        assert seen.checked > 30

    drafts_well()
    monkeypatch.setattr(FrozenKVHead, "reading", in_one)
    with pytest.raises(AssertionError):
        drafts_well()


@pytest.mark.parametrize("seen", [0, 1, 2])
def test_what_a_window_has_passed_is_not_read(
    gemma: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, seen: int
) -> None:
    """Pages that no request holds change nothing, in whichever group, however often they are overwritten. With windows
    one token wider they would."""
    reading = FrozenKVHead.reading

    def states(head: FrozenKVHead, kept: LayerStates) -> Any:
        return tuple(replace(s, window=s.window and s.window + seen) for s in reading(head, kept))

    monkeypatch.setattr(FrozenKVHead, "reading", states)
    options = {"page_size": 1, "enable_prefix_caching": False, "strict": True}
    clean, poisoned = (load(gemma, **options).engine for _ in range(2))
    drafts: list[list[list[int]]] = [[], []]
    for engine_, said in zip((clean, poisoned), drafts, strict=True):
        engine_.tracer = lambda plan, draft, batch, outcome, said=said: said.append(draft.tokens.tolist())
        for number, prompt in enumerate(prompts(3)):
            engine_.add(str(number), prompt, GREEDY)
        while engine_.busy:
            engine_.step()
            if engine_ is poisoned:
                _poison(engine_)
    assert (drafts[0] == drafts[1]) == (seen == 0)


def _poison(engine_: Any) -> None:
    """Fill the pages that nobody holds, the null page among them, with a value far from any key or value."""
    pool, ledger = engine_.loaded.pool, engine_.ledger
    for state, entries in zip(pool.states, pool.entries, strict=True):
        pages = ledger._pages[state.group]
        idle = [page for page in range(pages.total + 1) if page == 0 or pages.holders(page) == 0]
        for name in state.tensors():
            entries[name].view(-1, pool.page_size, *entries[name].shape[1:])[idle] = 3.0


@pytest.mark.parametrize("branches", [{"draft_topk": 2, "depth": 3}, {"token_tree": ((0,), (1,), (0, 0), (1, 0))}])
def test_trees(gemma: tuple[Path, Path], branches: dict[str, Any]) -> None:
    """Each node is one of the two tokens that are likeliest after its path, and the output is plain decoding's."""
    llm, oracle, checked = load(gemma, depth=None), Assistant(gemma[1], gemma[0]), 0
    plain = [replace(GREEDY, speculation={"drafter": "none"})] * 3
    wanted = [output.outputs[0].token_ids for output in llm.generate(prompts(3), plain)]

    def compare(plan: StepPlan, draft: Draft, batch: ForwardBatch, outcome: Outcome) -> None:
        nonlocal checked
        for row, span in enumerate(plan.spans):
            tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
            for node in draft.valid[row].nonzero()[:, 0].tolist():
                path = [node]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                logits = oracle(span.request.token_ids, [tokens[each] for each in path]).logits_DV[-1]
                assert logits[tokens[node]] > logits.topk(3).values[2]
                checked += 1

    llm.engine.tracer = compare
    params = [replace(GREEDY, speculation={"drafter": "frozen_kv", **branches})] * 3
    assert [output.outputs[0].token_ids for output in llm.generate(prompts(3), params)] == wanted
    assert checked > 50


@pytest.mark.parametrize("family", ["gemma4_text", "llama"])
def test_drafts_of_a_model_cut_over_ranks(tmp_path: Path, family: str) -> None:
    """A rank's share of the queries reads its share of the entries: every rank drafts what the whole does."""
    changes = {**GEMMA, "num_global_key_value_heads": 2} if family == "gemma4_text" else {}
    target = write(tmp_path / "target", family, vocab_size=VOCAB, **changes)
    head = write_assistant(tmp_path / "head", target, num_attention_heads=4)
    options: dict[str, Any] = {
        "dtype": "float64",
        "device": "cpu",
        "deterministic": True,
        "skip_tokenizer_init": True,
        "strict": True,
    }
    options |= {"num_pages": 100, "drafter": "frozen_kv", "drafter_model": str(head), "depth": DEPTH}
    config = EngineConfig(model=str(target), itl_target_ms=0, **options)

    def drafted(shard: Shard) -> list[Any]:
        made, said = Engine(config, load_engine(config, shard)), []
        made.tracer = lambda plan, draft, batch, outcome: said.append(draft.tokens[draft.valid].tolist())
        for number, prompt in enumerate(prompts(3)):
            made.add(str(number), prompt, GREEDY)
        while made.busy:
            made.step()
        return said

    whole = drafted(ONE)
    parts, sums = on_each_rank(2, drafted)
    assert sum(map(len, whole)) > 50 and parts == [whole, whole] and sums > 0


# What is refused


def rewrite(source: Path, path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    config, tensors = json.loads((source / "config.json").read_text()), tensors_of(source)
    change(config, tensors)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


REFUSED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "width": (lambda c, t: c.update(backbone_hidden_size=32), "for hidden states of width 32 and the model 64"),
    "no width": (lambda c, t: c.update(backbone_hidden_size=None), "backbone_hidden_size must be at least 1"),
    "vocabulary": (lambda c, t: c["text_config"].update(vocab_size=9), "logits for 9 tokens and the model 5"),
    "no text": (lambda c, t: c.update(text_config=None), "text_config is None and not an object"),
    "senseless text": (lambda c, t: c["text_config"].update(layer_types=3), "does not describe an assistant"),
    "experts": (lambda c, t: c["text_config"].update(enable_moe_block=True), "enable_moe_block True is not supported"),
    "own layers": (lambda c, t: c["text_config"].update(num_kv_shared_layers=1), "num_kv_shared_layers 1 of 2 leave"),
    "heads": (lambda c, t: _full(c).update(num_key_value_heads=2), "has 1 KV heads of 32 and not 2 KV heads of 32"),
    "head size": (lambda c, t: _full(c).update(head_dim=16), "has 1 KV heads of 32 and not 1 KV heads of 16"),
    "rotation": (
        lambda c, t: c["text_config"]["rope_parameters"][FULL].update(rope_theta=5.0),
        "whose keys are rotated otherwise",
    ),
    "window": (lambda c, t: c["text_config"].update(sliding_window=8), "a window of 7 tokens, through one of 8"),
    "narrow window": (lambda c, t: c["text_config"].update(sliding_window=1), "a window of 7 tokens, through one of 1"),
    "missing": (lambda c, t: t.pop("post_projection.weight"), "missing: post_projection.weight"),
    "unexpected": (lambda c, t: t.update({"model.layers.2.x": torch.zeros(1)}), "unexpected: model.layers.2.x"),
    "misshapen": (lambda c, t: t.update({"model.norm.weight": torch.zeros(9)}), r"model.norm.weight is \[9\]"),
    "parts": (lambda c, t: _order(c, t, count=3), "num_centroids 3 does not divide the 5 tokens"),
    "best": (lambda c, t: _order(c, t, best=6), "centroid_intermediate_top_k 6 is over num_centroids 5"),
    "no order": (lambda c, t: _order(c, t, order=None), "missing: masked_embedding.token_ordering"),
    "order": (lambda c, t: _order(c, t, order=[0, 0, 1, 2, 3]), "not a permutation of the 5 tokens"),
}


def _full(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["text_config"]["per_layer_config"]["1"]
    return found


def _order(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    count: int = VOCAB,
    best: int = 2,
    order: list[int] | None = [4, 3, 2, 1, 0],  # noqa: B006
) -> None:
    config.update(use_ordered_embeddings=True, num_centroids=count, centroid_intermediate_top_k=best)
    tensors["masked_embedding.centroids.weight"] = torch.zeros(count, 32)
    if order is not None:
        tensors["masked_embedding.token_ordering"] = torch.tensor(order)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(gemma: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before any weight is read, with the reason."""
    change, message = REFUSED[name]
    path = rewrite(gemma[1], tmp_path / "head", change)
    monkeypatch.setattr("stridelm.engine.load.load_model", lambda *a, **b: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=message):
        load((gemma[0], path))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v3", {"scale": 3.0}, "of full_attention, sliding_attention layers, and the model's are none"),
        ("llama", {}, "of sliding_attention layers, and the model's are full_attention"),
        ("mistral", {"sliding_window": 7}, "of full_attention layers, and the model's are sliding_attention"),
    ],
)
def test_targets_without_such_layers(
    gemma: tuple[Path, Path], tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    """A target needs a layer of each type, with keys and values by head."""
    target = write(tmp_path / "target", family, vocab_size=VOCAB, **changes)
    with pytest.raises(ValueError, match=message):
        load((target, gemma[1]))


def test_what_is_skipped(gemma: tuple[Path, Path], tmp_path: Path) -> None:
    """The copy of a tied matrix, and keys and values of layers that have none."""

    def add(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(3)

    llm = load((gemma[0], rewrite(gemma[1], tmp_path / "head", add)))
    assert llm.generate(prompts(1), GREEDY)


@pytest.mark.parametrize("stored", ["head alone", "both"])
def test_a_tied_head_under_its_own_name(
    gemma: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: str
) -> None:
    """Where a tied assistant's files have a head, it is the head; a warning names one that differs from the
    embedding."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
        if stored == "head alone":
            del tensors["model.embed_tokens.weight"]

    path = rewrite(gemma[1], tmp_path / "head", change)
    drafter = load((gemma[0], path)).engine.drafters.get("frozen_kv")
    assert isinstance(drafter, FrozenKVDrafter)
    assert torch.equal(drafter.head.head.weight, tensors_of(path)["lm_head.weight"])
    warned = [record for record in caplog.records if "lm_head.weight differs" in record.message]
    assert len(warned) == (stored == "both")


def test_recognised(gemma: tuple[Path, Path], tmp_path: Path) -> None:
    """By the model type; without a head the drafter says what it needs."""
    assert FrozenKVDrafter.recognises(given(gemma[1])) and not FrozenKVDrafter.recognises(given(gemma[0]))
    unified = rewrite(gemma[1], tmp_path / "head", lambda c, t: c.update(model_type="gemma4_unified_assistant"))
    assert FrozenKVDrafter.recognises(given(unified))
    nobody = TargetInfo(VOCAB, 32, 1, (), None, torch.device("cpu"))
    assert FrozenKVDrafter.why_not(nobody) == "no assistant is given; name its directory in drafter_model"


def test_nothing_is_kept(gemma: tuple[Path, Path]) -> None:
    """No pages, no copies: the pool is the target's alone, and the head's layers name its entries."""
    llm = load(gemma)
    made = llm.engine.drafters.get("frozen_kv")
    assert isinstance(made, FrozenKVDrafter)
    assert made.draft_kv is None and not made.keeps_kv
    states, pool = made.head.layer_states, llm.engine.loaded.pool
    assert [state.bytes_per_token(torch.float32) for state in states] == [0, 0]
    assert [state.group for state in states] == [pool.states[source].group for source in made.head.sources]
    assert made.head.sources == (0, 1)
