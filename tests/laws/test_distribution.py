"""Under every lossless rule and with every drafter the output has the target's distribution, by enumeration and by
sampling.

The mutations at the end break the verifier on purpose. Each must be caught by the checks that the tests above use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stridelm.verify.exact as exact
from stridelm import SamplingParams
from stridelm.batch import CANDIDATE, Draft, Verdict
from stridelm.cache.pool import PagePool
from stridelm.cache.transaction import Transaction
from stridelm.draft import DRAFTERS
from stridelm.draft.base import Drafter
from stridelm.kernels import plain_logits, plain_step
from stridelm.kernels.host.tables import HostTables
from stridelm.kernels.noise import gumbel
from stridelm.kernels.step_ops import Past
from stridelm.schedule.depth import Configured
from stridelm.verify.paths import candidate_history
from stridelm.verify.rule import VerifyInput
from support.checkpoints.models import make
from support.checks.identity import check_identity, mixed_jobs, prompts, sampling
from support.doubles.depths import Spiteful
from support.doubles.lab import (
    DRAWN,
    LENGTH,
    Lab,
    check_counts,
    check_joint,
    chi_square,
    lossless_cases,
    trees_registered,
)
from support.doubles.stand import Job, Stand
from support.doubles.tree_drafter import NAME as RANDOM_TREE
from support.doubles.tree_drafter import registered
from support.oracles.enumeration import check_enumeration

SAMPLES = 200_000
TINY: dict[str, Any] = {
    "vocab_size": 5,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "eos_token_id": None,
    "scale": 8.0,
}
PROMPT = [3, 1, 4]
PARAMETERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "logit_bias": {"logit_bias": {0: 1.5, 3: -2.0}},
    "bad_words": {"bad_words_token_ids": [[2], [0, 1], [1, 4]]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [0, 3]},
    "everything": {
        "temperature": 1.3,
        "top_k": 4,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": {1: 0.8},
        "bad_words_token_ids": [[0, 0], [4, 1]],
        "min_tokens": 1,
        "stop_token_ids": [2],
    },
}
PENALISED = SamplingParams(
    temperature=1.2,
    repetition_penalty=1.4,
    frequency_penalty=0.6,
    min_p=0.03,
    bad_words_token_ids=[[0, 1]],
    max_tokens=LENGTH,
    ignore_eos=True,
)


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with trees_registered():
        yield


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", **TINY), "float32", mask_token_id=4)


@pytest.fixture(scope="module")
def model() -> Any:
    return make("qwen3", **TINY)


def params(seed: int = 0, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, seed=seed, **changes)


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_every_output(stand: Stand, model: Any, parameters: str) -> None:
    """Each output of three tokens has exactly the probability that plain logits and naive processors give."""
    check_enumeration(stand, model, PROMPT, params(**PARAMETERS[parameters]))


LOSSLESS = lossless_cases()


def samples_of(drafter: str, rule: str) -> int:
    """How many requests to sample: fewer where each is drafted for separately on the host, and for cases that other
    tests check closely. Looked-up chains and blind trees are special cases of the noisy tree."""
    elsewhere = rule != "exact" or drafter in {tree.name for tree in DRAWN}
    if elsewhere or DRAFTERS.get(drafter).host_bound:
        return SAMPLES // 10
    return SAMPLES // 5 if drafter in ("ngram", "blind_tree") else SAMPLES


def lab_of(drafter: str, rule: str, parameters: SamplingParams | None = None) -> Lab:
    options = {"prompt_lookup_min": 1} if drafter == "ngram" else {}
    chosen = {"drafter": drafter, "acceptance": rule, **options}
    return Lab(chosen) if parameters is None else Lab(chosen, parameters)


@pytest.mark.parametrize(("drafter", "rule"), LOSSLESS)
def test_joint(drafter: str, rule: str) -> None:
    """The first three tokens of 200,000 requests have the target's joint distribution."""
    lab, samples = lab_of(drafter, rule), samples_of(drafter, rule)
    check_joint(lab, samples)
    assert (lab.accepted > samples // 20) == (DRAFTERS.get(drafter).default_depth > 0)


@pytest.mark.parametrize(("drafter", "rule"), LOSSLESS)
def test_joint_with_penalties(drafter: str, rule: str) -> None:
    """The same where the distribution depends on the row's own history."""
    check_joint(lab_of(drafter, rule, PENALISED), min(SAMPLES // 8, samples_of(drafter, rule)))


LEARNERS = [(d, r) for d, r in LOSSLESS if d in DRAFTERS and DRAFTERS.get(d).forget is not Drafter.forget]
"""Drafters that learn from the output of earlier requests."""


@pytest.mark.parametrize(("drafter", "rule"), LEARNERS)
def test_joint_when_a_seed_comes_again(drafter: str, rule: str) -> None:
    """Output drawn with a seed came from the same noise that decides acceptance when the seed is used again: a drafter
    that learned from it must not make it more likely."""
    lab = Lab({"drafter": drafter, "acceptance": rule}, size=1)
    check_counts(lab, lab.sample_again(2500))


def test_joint_of_the_engine(stand: Stand, model: Any) -> None:
    """Samples of the whole engine, all drafters under all lossless rules in one batch, are distributed as
    transformers' logits say."""
    kinds = [{"drafter": name, "acceptance": rule} for name, rule in LOSSLESS]
    llm = stand.llm(max_num_seqs=256, num_pages=600, max_num_batched_tokens=8192, strict=False)
    jobs = [Job(PROMPT, params(seed=seed, n=64), kinds[seed % len(kinds)]) for seed in range(96)]
    counts = torch.zeros(5, 5, 5, dtype=torch.int64)
    for output in stand.run(jobs, llm=llm):
        for sample in output.outputs:
            counts[tuple(sample.token_ids)] += 1
    assert counts.sum() == 96 * 64
    assert chi_square(counts, joint_of(model, PROMPT))[2] > 1e-4


def joint_of(model: Any, prompt: list[int]) -> torch.Tensor:
    """[5, 5, 5] float64: the probability of each output of three tokens."""
    joint = torch.zeros(5, 5, 5, dtype=torch.float64)
    for said in torch.cartesian_prod(*[torch.arange(5)] * 3).tolist():
        logits = model(torch.tensor([[*prompt, *said[:2]]])).logits[0, -3:].double().detach()
        joint[tuple(said)] = float(logits.softmax(-1)[range(3), said].prod())
    return joint


DEPTH_2 = {"depth": 2}
TWICE = [3, 1, 4, 3, 1]
"""A prompt that ends as it began, so that something is looked up."""
DRAFTED: list[dict[str, Any]] = [
    *({"drafter": name} for name in DRAFTERS if DRAFTERS.get(name).default_depth),
    {"drafter": "eagle", "draft_topk": 2, "depth": 2},
    {"drafter": "medusa", "token_tree": ((0,), (1,), (0, 0))},
]
"""All drafters, and trees of those that can make some."""


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", DRAFTED, ids=lambda kind: "-".join(map(str, kind.values())))
def test_joint_of_chosen_depths_when_a_seed_comes_again(
    stand: Stand, model: Any, kind: dict[str, Any], rule: str
) -> None:
    """Where depths are chosen, the joint distribution is the target's even if they are chosen by what was accepted of
    other requests, under the same seeds too."""
    asked = {"acceptance": rule, **kind, "depth": "auto"}
    try:
        llm = stand.llm(max_num_seqs=256, num_pages=1000, max_num_batched_tokens=8192, strict=False, **asked)
    except ValueError as refused:
        pytest.skip(str(refused))
    llm.engine.steps.planner.depths = Spiteful()
    seeds = 1000
    longer = params(ignore_eos=True)  # so that drafts of several levels are of use
    jobs = [Job(TWICE, replace(longer, seed=seed, max_tokens=LENGTH + 2)) for seed in range(seeds)]
    stand.run(jobs, llm=llm)
    counts = torch.zeros(5, 5, 5, dtype=torch.int64)
    for output in stand.run(jobs, llm=llm):
        counts[tuple(output.outputs[0].token_ids[:LENGTH])] += 1
    assert llm.engine.stats.accepted > seeds // 20
    assert chi_square(counts, joint_of(model, TWICE))[2] > 1e-4


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_seed_repeats_at_its_own_depth(stand: Stand, rule: str) -> None:
    """A request that names its depth emits the same tokens whenever its seed comes again; one whose depth is chosen
    draws anew."""
    llm = stand.llm(drafter="ngram", depth="auto", acceptance=rule)
    llm.engine.steps.planner.depths = Configured()
    own, chosen = (
        [Job(TWICE, params(seed=seed, ignore_eos=True), kind) for seed in range(40)] for kind in (DEPTH_2, {})
    )

    def emitted(jobs: list[Job]) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in stand.run(jobs, llm=llm)]

    assert emitted(own) == emitted(own)
    assert emitted(chosen) != emitted(chosen)


def test_chi_square() -> None:
    """P-values match published tables at the 95% and 99.9% quantiles, and rare cells are pooled."""
    even = torch.full((4,), 0.25)
    for statistic, p in ((7.815, 0.05), (16.266, 0.001)):
        shift = (statistic * 250 / 2) ** 0.5
        counts = torch.tensor([250 + shift, 250 - shift, 250, 250])
        assert abs(chi_square(counts, even)[2] / p - 1) < 0.01
    assert chi_square(torch.tensor([996, 2, 2]), torch.tensor([0.996, 0.002, 0.002]))[1] == 1
    assert chi_square(torch.tensor([999, 1]), torch.tensor([1.0, 0.0]))[2] == 0


# Mutations.


def walk_by(monkeypatch: pytest.MonkeyPatch, walk_down: Callable[..., Verdict]) -> None:
    """Walk down drafts by this function, in place of the CPU's compiled one too."""
    monkeypatch.delattr(HostTables, "walk")
    monkeypatch.delattr(HostTables, "follow")
    monkeypatch.setattr(plain_step, "walk_down", walk_down)


def wrong_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are looked for under the row before the accepted one."""
    walk = plain_step.walk_down

    def mutant(draft: Draft, *rest: Any) -> Verdict:
        return walk(replace(draft, parents=torch.where(draft.parents > 0, draft.parents - 1, draft.parents)), *rest)

    walk_by(monkeypatch, mutant)


def drafts_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rejection the draft's token is emitted in place of the target's."""
    walk = plain_step.walk_down

    def mutant(draft: Draft, *rest: Any) -> Verdict:
        verdict = walk(draft, *rest)
        if not draft.width:
            return verdict
        children = draft.valid & (draft.roles == CANDIDATE) & (draft.parents == verdict.leaf[:, None])
        first = children.to(torch.uint8).argmax(1, keepdim=True)
        last = (verdict.counts - 1).clamp(min=0)[:, None]
        wrong = torch.where(
            children.any(1, keepdim=True), draft.tokens.gather(1, first), verdict.tokens.gather(1, last)
        )
        return replace(verdict, tokens=verdict.tokens.scatter(1, last, wrong))

    walk_by(monkeypatch, mutant)


def accepts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first child is accepted whatever the target drew."""
    walk = plain_step.walk_down

    def mutant(draft: Draft, drawn: torch.Tensor, *rest: Any) -> Verdict:
        if draft.width:
            first = (draft.parents == -1).to(torch.uint8).argmax(1, keepdim=True)
            drawn = torch.cat((draft.tokens.gather(1, first), drawn[:, 1:]), 1)
        return walk(draft, drawn, *rest)

    walk_by(monkeypatch, mutant)


def shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """All positions of a request see the same noise."""
    monkeypatch.setattr(plain_logits, "gumbel", lambda seeds, positions, *rest: gumbel(seeds, positions * 0, *rest))


def shifted_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft row sees the noise of the position it stands on, not of the one it draws for."""
    draw_nodes = exact.draw_nodes

    def mutant(inputs: VerifyInput) -> torch.Tensor:
        batch = inputs.batch
        positions = batch.positions - (batch.geometry.draft_rows >= 0).long()
        return draw_nodes(replace(inputs, batch=replace(batch, positions=positions)))

    monkeypatch.setattr(exact, "draw_nodes", mutant)


def commits_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draft row too many is kept."""
    commit = Transaction.commit

    def mutant(self: Transaction, kept: list[int], reals: list[int]) -> list[bool]:
        return commit(self, [min(rows + 1, span.draft) for rows, span in zip(kept, self.spans)], reals)

    monkeypatch.setattr(Transaction, "commit", mutant)


def emits_one_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token drawn after the accepted path is dropped, its row kept."""
    walk = plain_step.walk_down

    def mutant(*args: Any) -> Verdict:
        verdict = walk(*args)
        return replace(verdict, counts=torch.where(verdict.kept > 0, verdict.counts - 1, verdict.counts))

    walk_by(monkeypatch, mutant)


def never_compacts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted side branches stay where they were computed."""
    monkeypatch.setattr(PagePool, "keep", lambda self, batch, draft, verdict: None)


def forgets_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft row's penalties miss its own token."""
    history = candidate_history

    def mutant(*args: Any) -> torch.Tensor:
        path = history(*args)
        return torch.where(torch.cat((path[:, 1:], torch.full_like(path[:, :1], -1)), 1) >= 0, path, -1)

    monkeypatch.setattr(exact, "candidate_history", mutant)


def counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft row's penalties see its path twice."""
    history = candidate_history
    monkeypatch.setattr(exact, "candidate_history", lambda *args: history(*args).repeat(1, 2))


def sees_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft row's penalties see every row before it, related or not."""
    history = candidate_history

    def mutant(draft: Draft, *rest: Any) -> torch.Tensor:
        everyone = (1 << torch.arange(1, draft.width + 1)) - 1
        return history(replace(draft, ancestors=everyone.expand_as(draft.ancestors)), *rest)

    monkeypatch.setattr(exact, "candidate_history", mutant)


def prompt_not_penalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties miss the last known token."""
    counts = plain_logits._counts

    def mutant(size: int, past: Past) -> torch.Tensor:
        return counts(size, replace(past, known_S=past.known_S - 1))

    monkeypatch.setattr(plain_logits, "_counts", mutant)


Mutation = Callable[[pytest.MonkeyPatch], None]
JOINT: list[Mutation] = [wrong_parent, drafts_token, accepts_anything, shared_noise]
IDENTITY: list[Mutation] = [
    wrong_parent,
    drafts_token,
    accepts_anything,
    shifted_noise,
    commits_one_more,
    emits_one_less,
    never_compacts,
]
HISTORY: list[Mutation] = [forgets_last, counts_twice, sees_siblings]


HEAVY = replace(PENALISED, repetition_penalty=2.5, frequency_penalty=1.5)


def check_tree(parameters: SamplingParams | None = None) -> None:
    """What each mutation must fail."""
    check_joint(lab_of("blind_tree", "exact", parameters), SAMPLES // 10)


@pytest.fixture(scope="module")
def _unbroken() -> None:
    """Without a mutation the chi-squares pass."""
    check_tree()
    check_tree(HEAVY)


@pytest.mark.usefixtures("_unbroken")
@pytest.mark.parametrize("mutation", JOINT, ids=lambda m: m.__name__)
def test_joint_catches(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square of the joint distribution detects a verifier that is broken in this way."""
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match="chi-square"):
        check_tree()


@pytest.mark.usefixtures("_unbroken")
@pytest.mark.parametrize("mutation", HISTORY, ids=lambda m: m.__name__)
def test_joint_catches_history(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square under penalties detects a row with another row's history."""
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match="chi-square"):
        check_tree(HEAVY)


def check_trees(stand: Stand, feature: str) -> None:
    """What each mutation of IDENTITY must fail, or of HISTORY with penalties."""
    kind = {"drafter": RANDOM_TREE, "depth": 4}
    check_identity(stand, [Job(p, sampling(stand, p, 1.0, feature), kind) for p in prompts(stand, 8)])


@pytest.fixture(scope="module")
def identical(checkpoint: Callable[..., Path]) -> Iterator[Stand]:
    """With random trees, and where nothing is broken all outputs are the same."""
    with registered():
        stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")
        check_trees(stand, "nothing")
        check_trees(stand, "frequency_penalty")
        yield stand


@pytest.mark.parametrize("mutation", [*IDENTITY, *HISTORY], ids=lambda m: m.__name__)
def test_identity_catches(mutation: Mutation, identical: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token identity detects it too, or the engine stops on an invariant; committing a row too many is detected."""
    mutation(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check_trees(identical, "frequency_penalty" if mutation in HISTORY else "nothing")


def test_enumeration_catches(stand: Stand, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that plain decoding shares, such as penalties that miss a token, is detected by the enumeration."""
    with_penalties = params(**PARAMETERS["repetition_penalty"])
    check_enumeration(stand, model, PROMPT, with_penalties)
    prompt_not_penalised(monkeypatch)
    with pytest.raises(AssertionError):
        check_enumeration(stand, model, PROMPT, with_penalties)


def test_mutations_do_not_linger(identical: Stand) -> None:
    """After all mutations the verifier works again."""
    check_identity(identical, mixed_jobs(identical, 8, 1.0, ["everything"]))
