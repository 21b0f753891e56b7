"""Simulated acceptance: the requested average number of tokens, from the draft's own rows, and never retracted."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_walk import random_draft
from torch.utils._python_dispatch import TorchDispatchMode

from stridelm import LLM, SamplingParams
from stridelm.batch import CANDIDATE, PROBE, Draft, ForwardBatch, Verdict
from stridelm.draft import DRAFTERS, settle
from stridelm.draft.base import chain
from stridelm.kernels import STEP_OPS
from stridelm.params import Speculation
from stridelm.sample.length import chance_of_another, log_odds
from stridelm.types import StepOutput
from stridelm.verify import RULES, synthetic
from stridelm.verify.paths import DraftPaths
from stridelm.verify.rule import VerifyInput
from stridelm.verify.trust import rule as trust
from stridelm.verify.trust.synthetic import SyntheticTrust
from support.checks import attempts
from support.checks.identity import prompts
from support.doubles.bounds import BOUNDS, bounds_registered
from support.doubles.interpreter import INTERPRETED
from support.doubles.lab import able_drafters
from support.doubles.stand import Job, Stand, assert_same
from support.doubles.tree_drafter import NAME as TREE
from support.doubles.tree_drafter import registered

CPU = torch.device("cpu")
MEANS = [(1.0, 1), (1.7, 1), (2.0, 1), (1.0, 4), (2.5, 4), (4.9, 4), (5.0, 4), (3.0, 64), (60.0, 64)]


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with bounds_registered(), registered():
        yield


# How many tokens


@pytest.mark.parametrize(("mean", "depth"), MEANS)
def test_the_distribution_has_the_mean_asked_for(mean: float, depth: int) -> None:
    """A geometric distribution truncated at the draft's depth: each further token has the same probability."""
    chances = torch.tensor(log_odds(mean, depth), dtype=torch.float64).exp()
    numbers = torch.arange(len(chances), dtype=torch.float64)
    assert abs(chances.sum() - 1) < 1e-6 and abs(1 + (numbers * chances).sum() - mean) < 1e-5 * mean
    assert not chances[depth + 1 :].any()
    p = chance_of_another(mean, depth)
    more = chances.flip(0).cumsum(0).flip(0)
    assert all(abs(float(more[n]) - p**n) < 1e-5 for n in range(depth + 1))


def inputs(
    draft: Draft, asked: Sequence[tuple[float, int]], decides: torch.Tensor | None = None, ops: str = "plain"
) -> VerifyInput:
    """Spans of requests with (mean, depth) in turn. There are no logits: they are not read."""
    kinds = [Speculation("any", depth, "synthetic", mean) for mean, depth in asked]
    return attempts.inputs(draft, kinds, decides, ops=STEP_OPS.get(ops)())


def full_chains(count: int, depth: int, role: int = CANDIDATE) -> Draft:
    tokens = torch.arange(depth).expand(count, -1) + 10
    return chain(depth, role, CPU).draft(tokens, torch.ones_like(tokens, dtype=torch.bool))


def decide(rule: str, heard: VerifyInput, drawn: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """The rule's verdict if the sampler draws these tokens."""
    monkeypatch.setattr(synthetic, "draw_nodes", lambda inputs: drawn)
    monkeypatch.setattr(trust, "_draw_window", lambda inputs: drawn)
    return RULES.get(rule)().decide(heard)


@pytest.mark.parametrize(("mean", "depth"), [(1.0, 4), (2.5, 4), (4.2, 4), (5.0, 4), (1.5, 1), (9.0, 40)])
@pytest.mark.parametrize("rule", ["synthetic", "synthetic-trust"])
def test_full_drafts_emit_the_mean(rule: str, mean: float, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 20,000 requests the numbers emitted have the distribution's frequencies."""
    count = 20_000
    role = CANDIDATE if rule == "synthetic" else PROBE
    heard = inputs(full_chains(count, depth, role), [(mean, depth)])
    drawn = torch.full((count, depth + 1), 5)
    verdict = decide(rule, heard, drawn, monkeypatch)
    p = chance_of_another(mean, depth)
    for n in range(depth + 1):
        share, expected = float((verdict.counts > n).double().mean()), p**n
        assert abs(share - expected) <= 4.5 * math.sqrt(expected * (1 - expected) / count) + 1e-9
    assert torch.equal(verdict.accepted, verdict.counts - 1)
    assert bool((verdict.drafted == depth).all())
    assert torch.equal(verdict.reached, verdict.counts.clamp(max=depth))
    kept = verdict.counts - 1 if rule == "synthetic" else torch.zeros_like(verdict.counts)
    assert torch.equal(verdict.kept, kept) and torch.equal(verdict.leaf, kept - 1)


def test_means_are_each_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of different lengths share a call, and each gets what it gets in a call of its own."""
    asked = [(1.2, 6), (3.0, 6), (3.0, 2), (6.5, 6)]
    draft, drawn = full_chains(8000, 6), torch.full((8000, 7), 5)
    mixed = decide("synthetic", inputs(draft, asked), drawn, monkeypatch).counts
    for turn, one in enumerate(asked):
        alone = decide("synthetic", inputs(draft, [one]), drawn, monkeypatch).counts
        assert torch.equal(mixed[turn::4], alone[turn::4])
        assert abs(float(alone.double().mean()) - one[0]) < 0.1


def test_seed_sample_and_position_decide() -> None:
    """Each of them changes the number; the target's own noise does not affect it."""
    heard = inputs(full_chains(4000, 4), [(2.5, 4)])
    first = synthetic.draw_accepted(heard)
    sampling, table = heard.sampler.table, heard.table
    for tensor in (sampling.seed, sampling.sample_index, table.known):
        tensor += 1
        other = synthetic.draw_accepted(heard)
        assert 0.2 < float((other == first).double().mean()) < 0.5  # as often as by chance
        tensor -= 1
    assert torch.equal(synthetic.draw_accepted(heard), first)


# Which tokens


def plain_walk(draft: Draft, span: int, drawn: list[int], levels: int) -> tuple[list[int], list[int], int]:
    """(tokens, accepted rows, positions tested): down the first valid candidate, at most `levels` times."""
    at, reached = -1, 0
    path: list[int] = []
    tokens: list[int] = []
    while True:
        children = [
            row
            for row in range(draft.width)
            if draft.valid[span, row] and draft.roles[span, row] == CANDIDATE and draft.parents[span, row] == at
        ]
        reached += bool(children)
        if not children or len(path) == levels:
            return [*tokens, drawn[at + 1]], path, reached
        at = children[0]
        path.append(at)
        tokens.append(int(draft.tokens[span, at]))


@pytest.mark.parametrize("width", [1, 6, 20, 64])
@pytest.mark.parametrize("seed", range(3))
def test_the_first_live_child_is_taken(seed: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down any tree, with siblings, probes and invalid rows, whatever was drawn at its nodes; the rest of the verdict
    follows, and the emitted tokens are in the table."""
    spans, depth = 60, 12
    draft = random_draft(seed, spans, width)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 6, (spans, width + 1), generator=generator)
    decides = torch.rand(spans, generator=generator) < 0.9
    heard = inputs(draft, [(4.0, depth), (9.0, depth)], decides)
    levels, known = synthetic.draw_accepted(heard).tolist(), heard.table.known.tolist()
    verdict = decide("synthetic", heard, drawn, monkeypatch)
    longest = 0
    for span in range(spans):
        numbers = [int(getattr(verdict, f)[span]) for f in ("counts", "kept", "accepted", "reached", "drafted")]
        if not decides[span]:
            assert numbers == [0] * 5 and heard.table.known[span] == known[span]
            continue
        tokens, path, reached = plain_walk(draft, span, drawn[span].tolist(), levels[span])
        drafted = int((draft.valid[span] & (draft.roles[span] == CANDIDATE)).sum())
        assert numbers == [len(tokens), len(path), len(path), reached, drafted]
        assert verdict.tokens[span, : len(tokens)].tolist() == tokens
        assert verdict.path[span, : len(path)].tolist() == path
        assert verdict.rows[span, : len(tokens)].tolist() == [int(heard.nodes[span, row + 1]) for row in (-1, *path)]
        assert int(verdict.leaf[span]) == (path[-1] if path else -1)
        said = heard.table.tokens[span, known[span] : known[span] + len(tokens)].tolist()
        assert said == tokens and heard.table.known[span] == known[span] + len(tokens)
        longest = max(longest, len(path))
    assert longest > 1 or width == 1


@INTERPRETED
@pytest.mark.parametrize("rule", ["synthetic", "synthetic-trust"])
@pytest.mark.parametrize("asked", [[(2.5, 4)], [(4.0, 12), (1.5, 1), (65.0, 64)]], ids=str)
def test_the_kernels_say_the_same(rule: str, asked: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's code, run by Triton's interpreter: the number from the kernel that draws tokens, then the exact rule's
    walk or the trusted rule's cut. Padding gets nothing."""
    spans, width = 40, 20
    draft = random_draft(1, spans, width) if rule == "synthetic" else full_chains(spans, width, PROBE)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 6, (spans, width + 1), generator=generator)
    decides = torch.rand(spans, generator=generator) < 0.9
    ours, theirs = (inputs(draft, asked, decides, ops) for ops in ("triton", "plain"))
    wanted = decide(rule, theirs, drawn, monkeypatch)
    real = torch.arange(spans) % 5 != 4
    got = decide(rule, replace(ours, slots=torch.where(real, ours.slots, -1)), drawn, monkeypatch)
    assert not bool(got.counts[~real].any())
    for name in ("counts", "kept", "leaf", "drafted", "accepted", "reached"):
        said, expected = getattr(got, name), getattr(wanted, name)
        where = real & decides if name in ("leaf", "drafted", "reached") else real
        assert torch.equal(said[where], expected[where]), name
    for span in torch.nonzero(real & decides).flatten().tolist():
        count, kept = int(got.counts[span]), int(got.kept[span])
        for name, length in (("tokens", count), ("rows", count), ("path", kept)):
            assert torch.equal(getattr(got, name)[span, :length], getattr(wanted, name)[span, :length])
    assert torch.equal(ours.table.tokens[:-1][real], theirs.table.tokens[:-1][real])
    assert torch.equal(ours.table.known[:-1][real], theirs.table.known[:-1][real])


class Watch(TorchDispatchMode):
    """Records operations that copy between the device and the host."""

    WRONG = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "item")

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.WRONG:
            self.wrong.append(name)
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_or_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a step can be captured: the second time, with requests of the same kind."""
    heard, drawn = inputs(full_chains(6, 4), [(2.5, 4)]), torch.full((6, 5), 5)
    windows = SyntheticTrust()
    decide("synthetic", heard, drawn, monkeypatch)
    with Watch() as watch:
        decide("synthetic", heard, drawn, monkeypatch)
        windows.sureness(heard)
        assert not watch.wrong
        torch.tensor([1]).sum().item()
    assert watch.wrong


# In an engine


@contextmanager
def overheard(llm: LLM) -> Iterator[list[tuple[int, int]]]:
    """(valid levels of the draft, tokens emitted) of every deciding span."""
    heard: list[tuple[int, int]] = []
    verifier = llm.engine.device.verifier
    verify = verifier.verify

    def listening(
        batch: ForwardBatch, draft: Draft, logits_MV: torch.Tensor, paths: DraftPaths | None = None
    ) -> Verdict:
        verdict = verify(batch, draft, logits_MV, paths)
        levels = torch.where(draft.valid, draft.depths, 0)
        if draft.max_depth:
            levels = torch.where(draft.roles == CANDIDATE, levels, 0)
        for i, span in enumerate(batch.spans):
            if span.decides:
                heard.append((int(levels[i].max()) if draft.width else 0, int(verdict.counts[i])))
        return verdict

    verifier.verify = listening  # type: ignore[method-assign]
    try:
        yield heard
    finally:
        del verifier.verify


def jobs_of(stand: Stand, kind: dict[str, Any], count: int, temperature: float = 0.8, length: int = 24) -> list[Job]:
    return [
        Job(prompt, SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=31 * i), kind)
        for i, prompt in enumerate(prompts(stand, count, seed=5))
    ]


@pytest.mark.parametrize("mean", [1.0, 2.3, 3.6])
@pytest.mark.parametrize("rule", ["synthetic", "synthetic-trust"])
@pytest.mark.skipif("mask" not in DRAFTERS, reason="no mask-token drafter is installed")
def test_an_engine_emits_the_mean(stand: Stand, rule: str, mean: float) -> None:
    """In steps with a full draft, within 4 standard errors; a random model accepts next to nothing by itself."""
    depth = 3
    jobs = jobs_of(stand, {"drafter": "mask", "depth": depth, "acceptance": f"{rule}:{mean}"}, 10, length=120)
    llm = stand.llm(strict=False)
    with overheard(llm) as heard:
        outputs = stand.run(jobs, llm=llm)
    counts = torch.tensor([count for levels, count in heard if levels == depth], dtype=torch.float64)
    chances = torch.tensor(log_odds(mean, depth), dtype=torch.float64).exp()
    spread = math.sqrt(float((chances * (1 + torch.arange(len(chances)) - mean) ** 2).sum()))
    assert len(counts) > 300 and abs(float(counts.mean()) - mean) <= 4 * spread / math.sqrt(len(counts)) + 1e-6
    assert all(count <= levels + 1 for levels, count in heard)
    for output in outputs:
        assert output.metrics is not None and len(output.outputs[0].token_ids) == 120
        said = (output.metrics.acceptance, output.metrics.acceptance_length, output.metrics.simulated)
        assert said == (rule, mean, True)


KINDS: dict[str, dict[str, Any]] = {
    "ngram": {"drafter": "ngram", "acceptance": "synthetic:2.5", "prompt_lookup_min": 1},
    "mask": {"drafter": "mask", "depth": 3, "acceptance": "synthetic:2.5"},
    "window": {"drafter": "mask", "depth": 3, "acceptance": "synthetic-trust:2.5"},
    "another mean": {"drafter": "mask", "depth": 3, "acceptance": "synthetic-trust:1.3"},
    TREE: {"drafter": TREE, "depth": 3, "acceptance": "synthetic:3.5"},
}


def kinds() -> list[dict[str, Any]]:
    return [kind for kind in KINDS.values() if kind["drafter"] in DRAFTERS]


def test_the_same_alone_in_a_batch_and_with_a_lag(stand: Stand) -> None:
    """Beside other rules, other lengths and plain decoding; also if the host reads a step late."""
    asked = [*kinds(), {"drafter": "none"}, {"drafter": "ngram"}]
    jobs = [job for kind, job in zip(asked, jobs_of(stand, {}, len(asked)))]
    for kind, job in zip(asked, jobs):
        job.speculation = kind
    alone = [stand.alone(job) for job in jobs]
    assert any(output.metrics is not None and output.metrics.accepted for output in alone)
    for options in ({}, {"page_size": 3}, {"attention": BOUNDS, "page_size": 4}):
        llm = stand.llm(**options)
        for job, output, wanted in zip(jobs, stand.run(jobs, llm=llm), alone):
            assert_same(output, wanted, (job.speculation, options))
            assert output.metrics is not None and wanted.metrics is not None
            assert output.metrics.accepted_at == wanted.metrics.accepted_at
        assert llm.engine.steps.lag == ("attention" in options)


@pytest.mark.parametrize("name", KINDS)
def test_what_the_sampler_drew_is_the_models(stand: Stand, name: str) -> None:
    """The token drawn after the accepted rows is plain decoding's, so the kept KV is that of the output; for a window,
    the first token is."""
    if KINDS[name] not in kinds():
        pytest.skip("its drafter is not installed")
    greedy = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    several = 0
    for job in jobs_of(stand, KINDS[name], 3, temperature=0.0):
        steps: list[list[int]] = []

        def listen(output: StepOutput, steps: list[list[int]] = steps) -> None:
            steps.append(output.new_token_ids)

        llm = stand.llm(page_size=2)
        llm.generate(job.prompt, job.request, on_output=listen)
        llm.check()
        known = list(job.prompt)
        for step in steps[:-1]:  # the last may be cut short
            place = 0 if "trust" in KINDS[name]["acceptance"] else len(step) - 1
            assert stand.tokens(known + step[:place], greedy) == [step[place]]
            known += step
            several += len(step) > 1
    assert several > 3


def test_samples_differ(stand: Stand) -> None:
    """The samples of a prompt accept different numbers."""
    kind = {"drafter": TREE, "depth": 3, "acceptance": "synthetic:3"}
    job = Job([5, 6, 7], SamplingParams(n=4, max_tokens=24, seed=1, ignore_eos=True), kind)
    (output,) = stand.run([job])
    assert len({sample.metrics.accepted_at for sample in output.outputs if sample.metrics is not None}) > 1


# Options


def test_a_length_is_part_of_the_rule() -> None:
    """Both ways of writing it are equivalent."""
    short, long = Speculation(acceptance="synthetic:2.5"), Speculation(acceptance="synthetic", acceptance_length=2.5)
    assert short == long and hash(short) == hash(long) and short.rule == "synthetic:2.5"
    assert Speculation.of({"acceptance": "synthetic-trust:2"}).rule == "synthetic-trust:2"
    base = Speculation("mask", 3, "synthetic:2.5")
    assert Speculation().over(base) == base
    assert Speculation(acceptance="exact").over(base) == Speculation("mask", 3, "exact")
    assert Speculation(acceptance_length=3).over(base).rule == "synthetic:3"
    assert Speculation(drafter="none").over(base) == Speculation("none")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"acceptance": "synthetic"}, "write synthetic:2.5"),
        ({"acceptance": "synthetic:"}, "as in synthetic:2.5"),
        ({"acceptance": "synthetic:many"}, "as in synthetic:2.5"),
        ({"acceptance": "synthetic:0.5"}, "from 1.0"),
        ({"acceptance": "synthetic:nan"}, "from 1.0"),
        ({"acceptance": "synthetic:inf"}, "from 1.0"),
        ({"acceptance": "synthetic:2", "acceptance_length": 2}, "leave acceptance_length out"),
        ({"acceptance": "exact:2"}, "acceptance_length would have no effect"),
        ({"acceptance": "trust:2"}, "acceptance_length would have no effect"),
        ({"acceptance_length": 2}, "acceptance_length would have no effect"),
        ({"acceptance": "hope:2"}, "choose one of: block, exact"),
        ({"acceptance": "synthetic:2", "confidence": 0.5}, "confidence would have no effect"),
        ({"acceptance": "synthetic-trust:2", "confidence": 0.5}, "confidence would have no effect"),
        ({"acceptance": "synthetic:3.1", "depth": 2}, "at depth 2 a step emits 3 tokens at most"),
        ({"acceptance": "synthetic:3.1"}, "at depth 2 a step emits 3 tokens at most"),
        ({"acceptance": "synthetic:5.1", "drafter": "ngram"}, "at depth 4 a step emits 5 tokens at most"),
        ({"acceptance": "synthetic:1", "drafter": "none"}, "without a draft"),
        ({"acceptance": "synthetic:1", "depth": 0}, "without a draft"),
        ({"acceptance": "synthetic-trust:2", "drafter": "ngram"}, "it works with: mask"),
    ],
    ids=str,
)
@pytest.mark.skipif("mask" not in DRAFTERS or "ngram" not in DRAFTERS, reason="a drafter is not installed")
def test_refused(stand: Stand, asked: dict[str, Any], says: str) -> None:
    """Values that are impossible or would have no effect are refused, with the remedy."""
    with pytest.raises(ValueError, match=says):
        settle.settle(Speculation.of({"drafter": "mask", **asked}), stand.target)


@pytest.mark.parametrize("drafter", [name for name in able_drafters() if DRAFTERS.get(name).default_depth])
def test_every_drafter_of_candidates_can(stand: Stand, drafter: str) -> None:
    """They need not name the rule; a config accepts it, and auto finds a drafter for it."""
    job = Job(prompts(stand, 1)[0], SamplingParams(max_tokens=8, seed=0, ignore_eos=True), None)
    for name in (drafter, "auto"):
        (output,) = stand.run([job], drafter=name, acceptance="synthetic:1.5")
        assert output.metrics is not None and output.metrics.simulated
        assert name in ("auto", output.metrics.drafter)


def test_it_is_said_once(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    """A warning when it is first used; none otherwise."""
    settle._warn_of_simulation.cache_clear()
    with caplog.at_level(logging.WARNING):
        settle.settle(Speculation(), stand.target)
        assert "simulated" not in caplog.text
        for _ in range(2):
            settle.settle(Speculation(acceptance="synthetic:1.5"), stand.target)
    assert caplog.text.count("acceptance is simulated: the output is not the model's; for benchmarks only") == 1
