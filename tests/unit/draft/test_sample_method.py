"""`draft_sample_method`: greedy guesses are the drafter's argmax at any temperature, and under every lossless rule the
output keeps the target's distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_head_drafter import HEADS
from transformers import AutoModelForCausalLM

from stridelm import LLM, SamplingParams
from stridelm.batch import CANDIDATE, Draft
from stridelm.draft.base import Drafter, Group, TargetInfo
from stridelm.draft.guess import Chain, Guessing, chain_depth
from stridelm.draft.options import ChainOptions, GuessOptions
from stridelm.draft.settle import settle
from stridelm.params import Speculation
from stridelm.types import Request, Span
from support.checkpoints.assistants import write_assistant
from support.checkpoints.heads import write_medusa
from support.checkpoints.models import write
from support.checks.watch import CLOSE, VOCAB, Watch, engine, prompts
from support.doubles.lab import Lab, check_joint
from support.doubles.tree_drafter import registered
from support.oracles.assistants import Assistant
from support.oracles.heads import Drafted, Medusa

DEPTH = 2
MASK_ID = VOCAB - 1
REQUESTS = 10_000
"""Enough to detect a broken rule, as the last of their tests shows."""
SAMPLED = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=2)
Oracle = Callable[[list[int], list[int]], Drafted]
Case = tuple[dict[str, Any], Oracle]


@cache
def whole(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def said(path: Path, ids: list[int], count: int) -> Drafted:
    """The model's predictions at the last `count` of these tokens."""
    logits = whole(path)(torch.tensor([ids])).logits[0, -count:]
    return Drafted(logits.argmax(-1).tolist(), logits, torch.arange(VOCAB))


def medusa(path: Path) -> Case:
    target = write(path / "model", "qwen3", vocab_size=VOCAB)
    heads = write_medusa(path / "heads", target, DEPTH)
    oracle = Medusa(heads, target)
    options = {"model": str(target), "drafter": "medusa", "drafter_model": str(heads)}
    return options, lambda ids, drafted: oracle(ids, len(drafted))


def model(path: Path) -> Case:
    target = write(path / "model", "qwen3", vocab_size=VOCAB)
    small = write(path / "small", "qwen3", vocab_size=VOCAB, hidden_size=32, num_attention_heads=2, seed=3)
    options = {"model": str(target), "drafter": "model", "drafter_model": str(small)}
    return options, lambda ids, drafted: said(small, [*ids, *drafted[:-1]], len(drafted))


def assistant(path: Path) -> Case:
    target = write(path / "model", "qwen3", vocab_size=VOCAB)
    head = write_assistant(path / "head", target)
    oracle = Assistant(path / "head", target)
    options = {"model": str(target), "drafter": "frozen_kv", "drafter_model": str(head)}
    return options, oracle


def mask(path: Path) -> Case:
    """With n known tokens, masks from position n - 1 on predict the tokens from position n on."""
    target = write(path / "model", "qwen3", vocab_size=VOCAB)
    options = {"model": str(target), "drafter": "mask", "mask_token_id": MASK_ID}
    return options, lambda ids, drafted: said(target, ids[:-1] + [MASK_ID] * len(drafted), len(drafted))


NAMES = ("deepseek", "mimo-in-turn", "eagle3", "assistant", "medusa", "model", "mask")
CASES = {**HEADS, "assistant": assistant, "medusa": medusa, "model": model, "mask": mask}


def without_probes(draft: Draft) -> Draft:
    return replace(draft, valid=draft.valid & (draft.roles == CANDIDATE))


def outputs(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(3), params)]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_guesses(tmp_path: Path, name: str) -> None:
    """They are the oracle's argmax whatever is sampled, and the output is plain decoding's."""
    options, oracle = CASES[name](tmp_path)
    llm = engine(**{**options, "depth": DEPTH, "draft_sample_method": "greedy", "num_pages": 400})
    plain = outputs(llm, replace(SAMPLED, speculation="off"))
    watch = Watch(llm, oracle)
    llm.engine.tracer = lambda plan, draft, *rest: watch(plan, without_probes(draft), *rest)
    assert outputs(llm, SAMPLED) == plain
    checked = watch.checked
    outputs(llm, replace(SAMPLED, speculation={"acceptance": "rejection"}))
    assert checked > 8 and watch.checked > checked + 8 and watch.accepted > 0 and watch.missed > 0
    with pytest.raises(AssertionError):  # the oracle detects sampled guesses
        outputs(llm, replace(SAMPLED, speculation={"draft_sample_method": "probabilistic"}))
    llm.engine.tracer = None
    # A bias is applied, and requests with either method share a batch.
    either = [replace(SAMPLED, speculation={"draft_sample_method": method}) for method in ("greedy", "probabilistic")]
    biased = [replace(params, logit_bias={2: 100.0}) for params in either]
    found = llm.generate(prompts(3) * 4, [params for params in (*either, *biased) for _ in range(3)])
    assert [output.outputs[0].token_ids for output in found] == plain * 2 + [[2] * 16] * 6
    for output in found[6:]:
        metrics = output.outputs[0].metrics
        assert metrics is not None and metrics.accepted == metrics.drafted > 5
    llm.check()


@pytest.mark.parametrize("name", ["deepseek", "eagle3", "medusa"])
def test_greedy_trees(tmp_path: Path, name: str) -> None:
    """The first level has the oracle's top tokens, whatever the noise favours."""
    options, oracle = CASES[name](tmp_path)
    llm = engine(**{**options, "depth": DEPTH, "draft_topk": 2, "num_draft_tokens": 6, "num_pages": 400})
    checked = leant = 0

    def look(plan: Any, draft: Draft, batch: Any, outcome: Any) -> None:
        nonlocal checked, leant
        for row, span in enumerate(plan.spans):
            if not draft.width or not bool(draft.valid[row].all()):
                continue
            wanted = oracle(span.request.token_ids, [0])
            ranked = wanted.logits_DV[0].sort(descending=True)
            if float(ranked.values[1] - ranked.values[2]) > CLOSE:
                first = set(draft.tokens[row][draft.parents[row] == -1].tolist())
                differs = first != set(wanted.ids_V[ranked.indices[:2]].tolist())
                assert not (differs and span.request.speculation.read(GuessOptions).takes_argmax)
                checked, leant = checked + 1, leant + differs

    plain = outputs(llm, replace(SAMPLED, speculation="off"))
    llm.engine.tracer = look
    for method in ("greedy", "probabilistic"):
        assert outputs(llm, replace(SAMPLED, speculation={"draft_sample_method": method})) == plain
    assert checked > 20 and leant > 5
    llm.check()


@pytest.mark.parametrize("name", NAMES)
def test_who_shares_a_group(tmp_path: Path, name: str) -> None:
    """Requests that guess in the same way, however that was specified."""
    options, _ = CASES[name](tmp_path)
    drafter = engine(**{**options, "depth": DEPTH}).engine.drafters.get(options["drafter"])

    def kind(method: str | None, rule: str) -> Any:
        speculation = Speculation(options["drafter"], DEPTH, rule, draft_sample_method=method)
        return drafter.kind(Span(Request("a", [0], SAMPLED, speculation), 0, 1, DEPTH, DEPTH))

    greedy, drawn = kind("greedy", "exact"), kind(None, "exact")
    assert greedy != drawn
    assert kind("greedy", "rejection") == greedy and kind("probabilistic", "exact") == drawn
    # Mask rows have no distribution to sample from, so they are greedy even where sampling is the default.
    assert (kind(None, "rejection") == greedy) == (name == "mask")


# The distribution


class TableChain(Drafter):
    """A chain drafted from a table of its own."""

    name = "table_chain"
    default_depth = 3

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        return (0, 1, 2, 3)

    def kind(self, span: Span) -> Guessing:
        return Guessing.of(span.request.speculation)

    def propose(self, group: Group) -> Draft:
        positions_LR = group.table.known[group.slots] + torch.arange(3)[:, None]
        guesses, vocab = Chain(group, self.sampler, positions_LR), self.target.vocab_size
        logits_VV = 1.5 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(1))
        last = group.table.tokens[group.slots].gather(1, positions_LR[0][:, None] - 1)[:, 0]
        for _ in range(chain_depth(group)):
            guesses.draw(logits_VV[last])
            last = guesses.tokens[-1]
        return guesses.draft(torch.ones_like(group.slots, dtype=torch.bool))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_joint(rule: str) -> None:
    """The first three tokens of requests with greedy guesses have the target's joint distribution."""
    with registered(TableChain, ChainOptions):
        seen = Lab({"drafter": "table_chain", "acceptance": rule, "draft_sample_method": "greedy"})
        check_joint(seen, REQUESTS)
    assert seen.accepted > REQUESTS // 5


def test_greedy_guesses_taken_for_drawn_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they are weighed by a distribution that they were not drawn from, the chi-square detects it."""
    monkeypatch.setattr("stridelm.draft.guess.Sampler.draw", lambda sampler, logits, *rest: logits.max(-1).indices)
    with registered(TableChain, ChainOptions), pytest.raises(AssertionError, match="chi-square"):
        check_joint(Lab({"drafter": "table_chain", "acceptance": "rejection"}), REQUESTS)


# What is refused


def test_other_methods() -> None:
    for wrong in ("Greedy", "", 1, True):
        with pytest.raises(ValueError, match="draft_sample_method must be greedy or probabilistic; got"):
            Speculation(draft_sample_method=wrong)


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
def test_drafters_without_logits(drafter: str) -> None:
    target = TargetInfo(9, 9, 9, (), None, torch.device("cpu"))
    with pytest.raises(ValueError, match=f"draft_sample_method would have no effect with drafter '{drafter}'"):
        settle(Speculation(drafter, draft_sample_method="greedy"), target)


@pytest.mark.parametrize("rule", ["trust", "synthetic-trust:1.5", "rejection"])
def test_probes_that_are_not_drawn(tmp_path: Path, rule: str) -> None:
    """Their tokens are emitted unchecked, or have no distribution that a rule could weigh."""
    llm = engine(**mask(tmp_path)[0])
    trusted = replace(SAMPLED, speculation={"acceptance": rule, "draft_sample_method": "probabilistic"})
    with pytest.raises(ValueError, match=f"draft_sample_method 'probabilistic' .* no effect with acceptance '{rule}'"):
        llm.generate([1, 2, 3], trusted)
