"""With depths that are chosen while requests run, every request emits what plain decoding emits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stridelm import SamplingParams
from stridelm.config import EngineConfig
from stridelm.draft import DRAFTERS
from stridelm.params import Speculation
from stridelm.schedule.adaptive import Adaptive
from stridelm.types import Request
from support.checks.identity import check_identity, prompts, sampling
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.depths import Contrary, RandomDepths, Swinging
from support.doubles.stand import Job, Stand, speculation

DRAFTING = [name for name in DRAFTERS if name != "none"]


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def stands(path: Path) -> Iterator[dict[str, Stand]]:
    with bounds_registered():
        yield {"at once": Stand(path, "float32"), "in flight": LaggingStand(path, "float32")}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", ["at once", "in flight"])
@pytest.mark.parametrize("drafter", DRAFTING)
def test_identity(stands: dict[str, Stand], way: str, drafter: str, temperature: float) -> None:
    """Choices follow measured times, so they differ from run to run. Some of the requests keep a depth of their own."""
    stand = stands[way]
    reason = DRAFTERS.get(drafter).why_not(stand.target)
    if reason:
        pytest.skip(f"{drafter}: {reason}")
    jobs = [
        Job(
            prompt,
            sampling(stand, prompt, temperature, "nothing"),
            {"drafter": drafter, "depth": 2} if i == 4 else None,
        )
        for i, prompt in enumerate(prompts(stand, 6))
    ]
    llm = stand.llm(drafter=drafter, depth="auto", page_size=4, max_num_seqs=4)
    check_identity(stand, jobs, llm=llm)
    policy = llm.engine.steps.planner.depths
    assert isinstance(policy, Adaptive) and policy.figures.depths, "nothing was chosen"


@pytest.mark.parametrize("adversary", ["random", "contrary", "swinging"])
@pytest.mark.parametrize("way", ["at once", "in flight"])
@pytest.mark.parametrize("drafter", [name for name in ("ngram", "mtp", "eagle") if name in DRAFTERS])
def test_no_token_depends_on_what_is_decided(stands: dict[str, Stand], way: str, drafter: str, adversary: str) -> None:
    """Not even if whoever decides knows what will be refused, or never lets a drafter's KV catch up in time."""
    stand = stands[way]
    kind = {**speculation(stand, drafter), "depth": "auto"}
    jobs = [Job(prompt, sampling(stand, prompt, 1.0, "nothing"), kind) for prompt in prompts(stand, 6)]
    texts = {tuple(job.prompt): stand.tokens(job.prompt, job.params) for job in jobs}
    policy = {"random": RandomDepths(), "contrary": Contrary(texts), "swinging": Swinging()}[adversary]
    llm = stand.llm(drafter=drafter, depth="auto", page_size=4, max_num_seqs=4)
    llm.engine.steps.planner.depths = policy
    check_identity(stand, jobs, llm=llm)
    stats = llm.engine.stats
    assert stats.drafted, "nothing was tried"
    if drafter == "ngram" and adversary == "contrary":
        assert stats.accepted < 0.2 * stats.drafted
    assert not isinstance(policy, Swinging) or bool(policy.caught_up) == (drafter != "ngram")


def test_urgency_changes_no_token(stands: dict[str, Stand]) -> None:
    """Priorities and targets change what is drafted, and nothing else."""
    stand = stands["at once"]
    jobs = [
        Job(
            prompt,
            replace(sampling(stand, prompt, 1.0, "nothing"), priority=i - 2, target_tps=10.0**i if i % 2 else None),
        )
        for i, prompt in enumerate(prompts(stand, 6))
    ]
    llm = stand.llm(drafter="ngram", depth="auto", page_size=4, max_num_seqs=4)
    plain = [Job(job.prompt, replace(job.params, target_tps=None)) for job in jobs]
    emitted = [output.outputs[0].token_ids for output in stand.run(jobs, llm=llm)]
    assert emitted == [stand.tokens(job.prompt, job.params) for job in plain]


@pytest.mark.parametrize("options", [{"drafter": "ngram"}, {"drafter": "none"}], ids=str)
def test_a_target_is_refused_where_it_would_do_nothing(stands: dict[str, Stand], options: dict[str, str]) -> None:
    llm = stands["at once"].llm(**options)
    with pytest.raises(ValueError, match="--depth auto"):
        llm.engine.add("a", [1, 2], SamplingParams(target_tps=5.0))
    chosen = stands["at once"].llm(drafter="ngram", depth="auto")
    with pytest.raises(ValueError, match="leave it out"):
        chosen.engine.add("a", [1, 2], SamplingParams(target_tps=5.0, speculation={"depth": 2}))
    chosen.engine.add("a", [1, 2], SamplingParams(target_tps=5.0))


@pytest.mark.parametrize("way", ["at once", "in flight"])
def test_a_request_may_ask_for_it(stands: dict[str, Stand], way: str) -> None:
    """Also of an engine that was not started with it, and with a drafter of its own; others keep their depth."""
    stand = stands[way]
    asked = [{"drafter": "mask", "depth": "auto"}, {"depth": "auto"}, None]
    jobs = [
        Job(prompt, sampling(stand, prompt, 0.7, "nothing"), asked[i % 3]) for i, prompt in enumerate(prompts(stand, 6))
    ]
    llm = stand.llm(drafter="ngram", page_size=4, max_num_seqs=4)
    requests = [llm.engine.add(str(i), job.prompt, job.request) for i, job in enumerate(jobs)]
    assert [request.adaptive for request in requests] == [True, True, False] * 2
    while llm.engine.busy:
        llm.engine.step()
    assert [request.output_ids for request in requests] == [stand.tokens(job.prompt, job.params) for job in jobs]
    policy = llm.engine.steps.planner.depths
    assert isinstance(policy, Adaptive) and policy is llm.engine.adaptive and policy.figures.depths


@pytest.mark.parametrize(
    ("speculation", "word"),
    [
        ({"drafter": "none", "depth": "auto"}, "no effect with drafter 'none'"),
        ({"drafter": "mask", "depth": "auto", "acceptance": "trust"}, "no effect with acceptance 'trust'"),
        ({"depth": "deep"}, "depth must be an integer or auto"),
    ],
    ids=str,
)
def test_a_request_is_refused_where_it_would_do_nothing(
    stands: dict[str, Stand], speculation: dict[str, str], word: str
) -> None:
    llm = stands["at once"].llm(drafter="ngram")
    with pytest.raises(ValueError, match=word):
        llm.engine.add("a", [1, 2], SamplingParams(speculation=speculation))


def test_an_engine_forgets_what_was_accepted(stands: dict[str, Stand]) -> None:
    """`Engine.forget` makes the policy take drafts to be accepted as one does that has seen none."""
    stand = stands["at once"]
    llm = stand.llm(drafter="mtp", depth="auto")
    policy = llm.engine.adaptive
    assert policy is not None

    def chances() -> list[list[float]]:
        request = Request("", [0], SamplingParams(), Speculation(drafter="mtp"), (0, 1, 2), adaptive=True)
        return policy.acceptance.chances(policy.acceptance.read([request]), 2).tolist()

    before = chances()
    stand.run([Job(prompt, sampling(stand, prompt, 1.0, "nothing")) for prompt in prompts(stand, 6)], llm=llm)
    assert chances() != before
    llm.engine.forget()
    assert chances() == before


def test_it_is_the_default() -> None:
    config = EngineConfig()
    assert config.depth == "auto" and config.speculation.depth is None
    with pytest.raises(ValueError, match="depth"):
        EngineConfig(depth="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"drafter": "none"}, {"drafter": "mask", "acceptance": "trust"}], ids=str)
def test_nothing_is_chosen_where_there_is_no_choice(stands: dict[str, Stand], options: dict[str, str]) -> None:
    """Since it is the default, it stands for the drafter's own depth there; requests may still bring a choice."""
    stand = stands["at once"]
    engine = stand.llm(**options, depth="auto").engine
    plain = engine.add("a", [1, 2], SamplingParams(max_tokens=2))
    assert (engine.adaptive, plain.adaptive) == (None, False)
    request = engine.add("b", [1, 2], SamplingParams(max_tokens=2, speculation={"drafter": "ngram", "depth": "auto"}))
    assert request.adaptive and engine.adaptive is not None
    while engine.busy:
        engine.step()
