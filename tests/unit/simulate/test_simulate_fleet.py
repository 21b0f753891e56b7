"""Simulated cards: the engine's planner, queue and ledger around steps of known cost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.record import Run
from stridelm.sample.length import chance_of_another
from stridelm.schedule import Configured
from stridelm.schedule.adaptive import Adaptive
from stridelm.schedule.step_cost import StepCost
from stridelm.simulate.card import Card, Drafting, Limits, Seconds
from stridelm.simulate.curve import DecodePoint, PromptPoint
from stridelm.simulate.fleet import Fleet, least_outstanding, round_robin
from stridelm.simulate.settings import SimulationSettings
from stridelm.simulate.sweep import sweep
from stridelm.simulate.table import PLAIN as NONE
from stridelm.simulate.table import CostTable, DrafterCosts, EngineLimits
from stridelm.simulate.workload import Job, read_acceptance
from stridelm.types import Span

STEP = 0.125
"""Seconds, a power of two, so that sums are exact."""
DEPTH = 3
DRAFTING = Drafting("mtp", tuple(range(DEPTH + 1)))
PLAIN = Drafting("none")


def constant(spans: Sequence[Span]) -> float:
    return STEP


def by_rows(spans: Sequence[Span]) -> float:
    return 0.01 + 0.001 * sum(span.rows for span in spans)


def card(drafting: Drafting = PLAIN, seconds: Seconds = constant, streams: int = 8, **limits: Any) -> Card:
    policy = Adaptive() if drafting.adaptive else Configured(StepCost())
    return Card(Limits(streams, **limits), drafting, policy, seconds)


def some_jobs(count: int, tokens: int, chance: float = 0.0, prompt: int = 1, seed: int = 0) -> list[Job]:
    return [Job.drawn(prompt, tokens, (chance,) * DEPTH, seed, number) for number in range(count)]


def tokens_per_step(run: Run) -> float:
    return run.tokens / sum(each.steps or 0 for each in run.answered)


# Rates in closed form


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("streams", [1, 4])
def test_plain_decoding_takes_a_step_per_token(streams: int, lag: int) -> None:
    run = Fleet([card(lag=lag)]).run(some_jobs(3 * streams, 10, prompt=20), streams)
    assert run.seconds == 3 * 10 * STEP
    assert all(each.at == [STEP * (n + 1) for n in range(10)] for each in run.answered)


@pytest.mark.parametrize("streams", [1, 4])
def test_drafts_that_are_all_accepted(streams: int) -> None:
    """A step emits a draft and one token more; the step that reads the prompt has none to check."""
    fleet = Fleet([card(DRAFTING)])
    assert fleet.run(some_jobs(2 * streams, 12, 1.0), streams).seconds == 2 * 3 * STEP
    assert fleet.run(some_jobs(2 * streams, 13, 1.0, prompt=9), streams).seconds == 2 * 4 * STEP


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("mean", [1.2, 2.0, 3.5])
def test_the_acceptance_that_was_asked_for(mean: float, lag: int) -> None:
    [chances] = read_acceptance([str(mean)], DEPTH)
    jobs = [Job.drawn(1, 400, chances, 1, number) for number in range(40)]
    run = Fleet([card(DRAFTING, lag=lag)]).run(jobs, 8)
    assert tokens_per_step(run) == pytest.approx(mean, rel=0.03)


def test_a_queue_waits_for_a_place() -> None:
    """More streams than run at once: the others wait for the first to end."""
    run = Fleet([card(streams=2)]).run(some_jobs(4, 10), 4)
    assert [each.ttft for each in run.answered] == [STEP, STEP, 11 * STEP, 11 * STEP]


# What must always hold


@pytest.mark.parametrize(
    "drafting", [PLAIN, DRAFTING, replace(DRAFTING, adaptive=True)], ids=["plain", "fixed", "auto"]
)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("pages", [30, 400])
@pytest.mark.parametrize("load", [Load(12), Load(request_rate=5.0)], ids=["closed", "arriving"])
def test_every_token_once(drafting: Drafting, lag: int, pages: int, load: Load) -> None:
    """Each request gets its tokens, in order of time, and every page comes back; also where pages are so few that
    requests are preempted."""
    one = card(drafting, by_rows, lag=lag, num_pages=pages, page_size=4, max_num_batched_tokens=64)
    jobs = [Job.drawn(5 + 7 * n % 60, 1 + 11 * n % 50, (0.7,) * DEPTH, 0, n) for n in range(40)]
    run = Fleet([one]).run(jobs, load.max_concurrency, load.arrivals(len(jobs), 0))
    assert [each.tokens for each in run.answered] == [job.max_tokens for job in jobs]
    for each in run.answered:
        assert list(each.at) == sorted(each.at) and each.at[0] > 0 and each.steps == len(each.at)
        assert (each.accepted or 0) <= (each.drafted or 0)
    assert one.ledger.available() == one.ledger.total() and one.queue.empty and not one.flights
    assert bool(one.preemptions) == (pages == 30)


def test_a_draft_in_flight_is_planned_on_bounds() -> None:
    """With a lag, the second step of a request is launched before the first has landed."""
    one = card(DRAFTING, lag=1)
    one.add("a", Job.drawn(1, 40, (1.0,) * DEPTH, 0, 0))
    first, second = one.launch(0.0)
    assert (first.begins, first.ends, second.begins, second.ends) == (0.0, STEP, STEP, 2 * STEP)
    [emission] = one.land()
    assert emission.tokens == 4 and emission.request.rows_in_flight == 4


@pytest.mark.parametrize(("arrives", "first"), [(2.5, 4.0), (2.95, 5.0)])
def test_what_arrives_while_a_step_runs_is_in_the_next(arrives: float, first: float) -> None:
    """With a lag, a step is planned when the one before is about to end, not when that begins."""
    run = Fleet([card(lag=1)]).run(some_jobs(3, 10), arrivals=[0.0, arrives * STEP, 100 * STEP])
    [early, late, _] = run.answered
    assert early.at == [STEP * (step + 1) for step in range(10)]
    assert late.ttft == pytest.approx((first - arrives) * STEP)


def test_a_host_bound_drafter_waits_for_its_tokens() -> None:
    one = card(replace(DRAFTING, host_bound=True), lag=1)
    one.add("a", Job.drawn(1, 40, (1.0,) * DEPTH, 0, 0))
    assert len(one.launch(0.0)) == 1


def test_fates_do_not_depend_on_the_policy() -> None:
    """What a shallow draft accepts at a position is the beginning of what a deep one accepts there."""
    [job] = some_jobs(1, 200, 0.6)
    for place in range(200):
        deep = job.accepted(place, 3)
        assert [job.accepted(place, depth) for depth in range(3)] == [min(deep, depth) for depth in range(3)]
        assert deep == 0 or job.accepted(place + 1, 2) >= deep - 1


@pytest.mark.parametrize("drafting", [DRAFTING, replace(DRAFTING, adaptive=True)], ids=["fixed", "auto"])
def test_the_seed_decides(drafting: Drafting) -> None:
    def run(seed: int) -> Run:
        return Fleet([card(drafting, by_rows)]).run(some_jobs(20, 60, 0.6, seed=seed), 8)

    assert run(1) == run(1)
    assert run(1) != run(2)


# Fleets


@pytest.mark.parametrize("route", [least_outstanding, round_robin])
def test_cards_multiply(route: object) -> None:
    """Four cards with four times the streams have four times the rate, since requests are equal."""
    one = Fleet([card()]).run(some_jobs(16, 10), 4)
    four = Fleet([card() for _ in range(4)], route).run(some_jobs(64, 10), 16)  # type: ignore[arg-type]
    assert four.tokens_per_s == 4 * one.tokens_per_s


def test_requests_go_where_the_fewest_are() -> None:
    """Every other request is long: in turns, one card gets all the long ones."""
    jobs = [Job.drawn(1, 90 if number % 2 else 10, (), 0, number) for number in range(40)]

    def seconds(route: object) -> float:
        fleet = Fleet([card(streams=4), card(streams=4)], route)  # type: ignore[arg-type]
        return fleet.run(jobs, 8).seconds

    assert seconds(least_outstanding) < 0.8 * seconds(round_robin)


def test_an_idle_card_answers_at_once() -> None:
    """Arrivals that never meet take a step for their first token."""
    run = Fleet([card()]).run(some_jobs(5, 3), arrivals=[10.0 * n for n in range(5)])
    assert [each.at for each in run.answered] == [[STEP, 2 * STEP, 3 * STEP]] * 5
    assert run.seconds == 40 + 3 * STEP


def test_an_arrival_waits_for_the_step_that_runs() -> None:
    run = Fleet([card()]).run(some_jobs(2, 3), arrivals=[0.0, STEP / 4])
    assert [each.ttft for each in run.answered] == [STEP, 2 * STEP - STEP / 4]


# The policy


def test_the_engines_policy_chooses() -> None:
    """Where every row costs, `auto` drafts for requests that gain, and hardly for those that do not."""
    auto = replace(DRAFTING, adaptive=True)

    def rate(drafting: Drafting, chances: Sequence[float]) -> Run:
        jobs = [Job.drawn(1, 300, (chances[n % len(chances)],) * DEPTH, 0, n) for n in range(48)]
        return Fleet([card(drafting, by_rows)]).run(jobs, 8)

    useless, plain = rate(auto, [0.0]), rate(PLAIN, [0.0])
    assert useless.tokens_per_s > 0.93 * plain.tokens_per_s
    mixed = rate(auto, [0.1, 0.9])
    bad, good = (sum(each.drafted or 0 for each in mixed.answered[first::2]) for first in (0, 1))
    assert good > 3 * bad
    assert mixed.tokens_per_s > rate(DRAFTING, [0.1, 0.9]).tokens_per_s


def followed(patience: int, lag: int) -> CostTable:
    """A head whose own KV takes 40% of a plain step, or of a prompt; a draft's level takes 10% more."""

    def costs(depth: int, follows: float) -> DrafterCosts:
        decode = [
            DecodePoint(n, n * (1 + d), d, 0, (0.01 + 0.0005 * n) * (1 + follows + 0.1 * d))
            for n in (1, 16)
            for d in range(depth + 1)
        ]
        prompts = [PromptPoint(rows, 0, (0.01 + 0.00005 * rows) * (1 + follows)) for rows in (1, 256)]
        return DrafterCosts(tuple(range(depth + 1)), tuple(decode), tuple(prompts), depth, may_wait=depth > 0)

    engine = EngineLimits(1024, 16, 2**16, 2048, lag=lag, patience=patience, apart=lag == 0)
    return CostTable("a card", "a model", engine, {NONE: costs(0, 0.0), "mtp": costs(DEPTH, 0.4)})


@pytest.mark.parametrize(("patience", "lag"), [(128, 0), (16, 1)], ids=["host", "card"])
def test_a_head_waits_while_nothing_is_drafted(patience: int, lag: int) -> None:
    """As in the engine: where depths are chosen and drafts gain nothing, `auto` takes hardly longer than plain steps,
    and where they gain, it is as fast as if the head followed at every step."""

    def speed(table: CostTable, mean: str, entry: str = "mtp@auto") -> float:
        settings = SimulationSettings(
            (entry,), (16,), acceptance=(mean,), num_prompts=48, repeats=1, prompt_tokens=32, max_tokens=96
        )
        ratio = sweep(table, settings)[1].speed
        assert ratio is not None
        return ratio.median

    waiting, following = followed(patience, lag), followed(0, lag)
    assert speed(following, "1") < 0.75
    assert speed(waiting, "1") > 0.93  # within a few percent
    assert speed(waiting, "3.5") == pytest.approx(speed(following, "3.5"), rel=0.02)
    assert speed(waiting, "1", "mtp@1") == speed(following, "1", "mtp@1")


# What is refused, and what is not needed


@pytest.mark.parametrize("mean", [1.0, 1.7, 3.99])
def test_the_chance_behind_a_mean(mean: float) -> None:
    chance = chance_of_another(mean, DEPTH)
    assert sum(chance**level for level in range(DEPTH + 1)) == pytest.approx(mean)


def test_acceptance_in_words() -> None:
    assert read_acceptance(["0.5", "0.9/0.8/0.7/0.6", "1"], DEPTH) == [
        (0.5, 0.5, 0.5),
        (0.9, 0.8, 0.7),
        pytest.approx((0.0, 0.0, 0.0)),
    ]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("5", "1 to 4 tokens per step"),
        ("x", "cannot be read"),
        ("0.5/0.5", "give as many"),
        ("0.5/2/1", "cannot be read"),
        ("-1", "1 to 4"),
    ],
)
def test_acceptance_that_is_refused(entry: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_acceptance([entry], DEPTH)


def test_a_request_that_no_card_can_hold() -> None:
    with pytest.raises(ValueError, match="raise num_pages"):
        card(num_pages=2).add("a", Job.drawn(20, 20, (), 0, 0))


def test_nothing_is_computed() -> None:
    """A simulation runs without torch."""
    program = (
        "import sys, stridelm.simulate.sweep, stridelm.simulate.table\n"
        "from stridelm.simulate.card import Card, Drafting, Limits\n"
        "from stridelm.schedule.adaptive import Adaptive\n"
        "from stridelm.simulate.fleet import Fleet\n"
        "from stridelm.simulate.workload import Job\n"
        "card = Card(Limits(4), Drafting('mtp', (0, 1), adaptive=True), Adaptive(), lambda spans: 1.0)\n"
        "assert Fleet([card]).run([Job.drawn(3, 9, (0.5,), 0, 0)], 1).tokens == 9\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
