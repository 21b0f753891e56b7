"""What a rule says of itself, and what the door makes of several at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest

from stridelm import SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.verify import RULES
from stridelm.verify.rule import Rule
from support.identity import POOL, prompts
from support.stand import Job, Stand, all_speculations, assert_same


@pytest.mark.parametrize("name", list(RULES))
def test_rules_are_complete(name: str) -> None:
    """A rule has its registered name and says whether it loses anything; some drafter works with it."""
    rule = RULES.get(name)
    assert rule.like is None or rule.like in RULES
    assert not (rule.simulated and rule.lossless)
    assert issubclass(rule, Rule) and rule.name == name
    assert isinstance(rule.lossless, bool) and isinstance(rule.whole, bool)
    assert rule.lossless or not rule.coupled
    assert any(rule.works_with(DRAFTERS.get(name).rules, DRAFTERS.get(name).branches) for name in DRAFTERS)


def test_exact_is_the_default() -> None:
    """Lossy rules have names; who asks for nothing gets the lossless one."""
    assert RULES.get("exact").lossless and not RULES.get("trust").lossless


def test_rules_share_a_batch(checkpoint: Callable[..., Path]) -> None:
    """Requests of all rules in one step each get what they get alone."""
    stand = Stand(checkpoint("qwen3"), "float32")
    kinds = [kind for rule in RULES for kind in all_speculations(stand.target, rule)]
    params = SamplingParams(temperature=0.7, max_tokens=12, seed=2, ignore_eos=True, presence_penalty=0.5)
    jobs = [Job(prompt, params, kind) for prompt, kind in zip(cycle(prompts(stand, POOL)), kinds)]
    for job, output in zip(jobs, stand.run(jobs)):
        assert_same(output, stand.alone(job), job.speculation)
