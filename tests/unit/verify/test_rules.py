"""A rule's attributes, its options, and the verifier's handling of several rules at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.draft.settle import settle
from stridelm.params import Speculation
from stridelm.verify import RULES
from stridelm.verify.rule import Rule
from support.checks.identity import POOL, check_identity, mixed_jobs, prompts
from support.doubles.bounds import BOUNDS, bounds_registered
from support.doubles.stand import Job, Stand, accepted, all_speculations, assert_same
from support.doubles.tree_drafter import registered

GREEDY = ("rejection", "block", "typical")
"""Rules that equal plain decoding at temperature 0."""


@pytest.mark.parametrize("name", list(RULES))
def test_rules_are_complete(name: str) -> None:
    """A rule has its registered name and states whether it is lossless; some drafter works with it."""
    rule = RULES.get(name)
    assert rule.like is None or rule.like in RULES
    assert not (rule.simulated and rule.lossless)
    assert issubclass(rule, Rule) and rule.name == name
    assert isinstance(rule.lossless, bool) and isinstance(rule.all_or_nothing, bool)
    assert rule.lossless or not rule.coupled
    assert any(rule.works_with(DRAFTERS.get(name).rules, DRAFTERS.get(name).branches) for name in DRAFTERS)


def test_exact_is_the_default() -> None:
    """Lossy rules must be named; a request that names none gets the lossless one."""
    assert RULES.get("exact").lossless and not RULES.get("trust").lossless


def test_rules_share_a_batch(checkpoint: Callable[..., Path]) -> None:
    """Requests of all rules in one step each get what they get alone."""
    stand = Stand(checkpoint("qwen3"), "float32")
    kinds = [kind for rule in RULES for kind in all_speculations(stand, rule)]
    params = SamplingParams(temperature=0.7, max_tokens=12, seed=2, ignore_eos=True, presence_penalty=0.5)
    jobs = [Job(prompt, params, kind) for prompt, kind in zip(cycle(prompts(stand, POOL)), kinds)]
    for job, output in zip(jobs, stand.run(jobs)):
        assert_same(output, stand.alone(job), job.speculation)


def test_nothing_is_left_to_chance_at_temperature_0(checkpoint: Callable[..., Path]) -> None:
    """At temperature 0, rules that weigh probabilities emit what plain decoding emits, for chains and trees, with a
    history and without, and also if the host reads a step late."""
    with bounds_registered(), registered():
        stand = Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")
        features = ["nothing", "frequency_penalty", "repetition_penalty", "bad_words", "samples", "min_tokens"]
        jobs, used = mixed_jobs(stand, POOL, 0.0, features, seed=5), set()
        for job, rule in zip(jobs, cycle(GREEDY)):
            assert job.speculation is not None
            kind = DRAFTERS.get(job.speculation["drafter"])
            able = RULES.get(rule).works_with(kind.rules, kind.branches)
            job.speculation = {**job.speculation, "acceptance": rule if able else "rejection"}
            used.add(job.speculation["acceptance"])
        assert used == set(GREEDY)
        for options in ({"max_num_batched_tokens": 24}, {"attention": BOUNDS, "page_size": 4}):
            assert accepted(check_identity(stand, jobs, **options)) > 0


def test_relaxed_relaxes_greedy_decoding(checkpoint: Callable[..., Path]) -> None:
    """A token nearly as likely as the argmax is accepted even at temperature 0."""
    stand = Stand(checkpoint("qwen3"), "float32")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    took = {}
    for rule, options in {"exact": {}, "relaxed": {"relaxed_topk": 64, "relaxed_delta": 1.0}}.items():
        kind = {"drafter": "ngram", "prompt_lookup_min": 1, "acceptance": rule, **options}
        took[rule] = accepted(stand.run([Job(prompt, params, kind) for prompt in prompts(stand, 4)]))
    assert took["relaxed"] > took["exact"]


def test_block_takes_no_trees(checkpoint: Callable[..., Path]) -> None:
    """It is refused when a request's speculation is resolved, and before."""
    stand = Stand(checkpoint("qwen3"), "float32")
    with registered() as tree:
        for rule in ("rejection", "typical", "relaxed"):
            assert settle(Speculation(tree.name, acceptance=rule), stand.target).acceptance == rule
        with pytest.raises(ValueError, match=f"not work with drafter {tree.name!r}; it works with: .*none") as said:
            settle(Speculation(tree.name, acceptance="block"), stand.target)
        assert tree.name not in str(said.value).partition("works with:")[2]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"posterior_threshold": 0.1}, "posterior_threshold would have no effect"),
        ({"acceptance": "rejection", "posterior_alpha": 0.1}, "posterior_alpha would have no effect"),
        ({"acceptance": "typical", "relaxed_topk": 3}, "relaxed_topk would have no effect"),
        ({"acceptance": "relaxed", "confidence": 0.5}, "confidence would have no effect"),
        ({"acceptance": "typical", "posterior_threshold": 1.5}, "from 0.0 to 1.0"),
        ({"acceptance": "typical", "posterior_alpha": -1}, "from 0.0"),
        ({"acceptance": "relaxed", "relaxed_topk": 0}, "an integer from 1"),
        ({"acceptance": "relaxed", "relaxed_topk": 2.5}, "an integer from 1"),
        ({"acceptance": "relaxed", "relaxed_delta": 2}, "from 0.0 to 1.0"),
    ],
    ids=str,
)
def test_refused(checkpoint: Callable[..., Path], asked: dict[str, Any], says: str) -> None:
    """Values that are impossible, or would have no effect."""
    with pytest.raises(ValueError, match=says):
        settle(Speculation.of({"drafter": "none", **asked}), Stand(checkpoint("qwen3"), "float32").target)


def test_a_rules_numbers_are_its_own() -> None:
    """A request that names another rule than the engine's does not inherit them."""
    base: Any = Speculation("ngram", 3, "typical", posterior_threshold=0.2, prompt_lookup_min=1)
    assert Speculation().over(base) == base
    deep = replace(base, depth=9, adaptive=True)
    assert deep.over(base) == deep, "of those that are chosen from"
    assert Speculation(acceptance="typical", posterior_alpha=0.1).over(base) == replace(base, posterior_alpha=0.1)
    assert Speculation(acceptance="relaxed").over(base) == Speculation("ngram", 3, "relaxed", prompt_lookup_min=1)
