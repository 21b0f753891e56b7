"""A closed loop with a fixed number of streams, and the records that it makes."""

from __future__ import annotations

import pytest

from stridelm.bench.drive import Job, drive
from stridelm.bench.prompts import PromptSet
from stridelm.bench.stand import encode, make_jobs
from stridelm.bench.variants import plain
from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams


def jobs(engine: Engine, prompts: PromptSet, **params: object) -> list[Job]:
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **params)  # type: ignore[arg-type]
    return make_jobs(encode(engine, prompts), plain(engine.loaded.target), sampling, seed=3)


def test_every_job_is_completed_in_order(engine: Engine, prompts: PromptSet) -> None:
    run = drive(engine, jobs(engine, prompts), streams=2)
    assert [t.request.prompt_ids for t in run.timelines] == encode(engine, prompts)
    assert all(len(t.token_ids) == 6 for t in run.timelines)
    assert run.tokens == 18 and run.steps >= 6 and run.rows >= 18
    assert not engine.busy


def test_emissions_grow_and_add_up(engine: Engine, prompts: PromptSet) -> None:
    for timeline in drive(engine, jobs(engine, prompts), streams=1).timelines:
        times = [when for when, _ in timeline.emissions]
        assert times == sorted(times) and times[0] > 0
        assert sum(count for _, count in timeline.emissions) == len(timeline.token_ids)


def test_streams_bound_what_runs_at_once(engine: Engine, prompts: PromptSet) -> None:
    """One stream holds the pages of one request at a time."""
    alone = max(-(-(len(ids) + 6) // 16) for ids in encode(engine, prompts))
    one, two = (drive(engine, jobs(engine, prompts), streams=n) for n in (1, 2))
    assert one.peak_pages <= alone < two.peak_pages
    assert [t.token_ids for t in one.timelines] == [t.token_ids for t in two.timelines]


def test_seeds_are_the_prompts_own(engine: Engine, prompts: PromptSet) -> None:
    assert [job.params.seed for job in jobs(engine, prompts)] == [3, 4, 5]


def test_a_job_that_cannot_be_served_leaves_nothing_running(engine: Engine, prompts: PromptSet) -> None:
    good = jobs(engine, prompts)
    with pytest.raises(ValueError, match="context"):
        drive(engine, [good[0], Job([3] * 1000, good[0].params)], streams=2)
    assert not engine.busy
    engine.check()


def test_jobs_arrive(engine: Engine, prompts: PromptSet) -> None:
    """Each is timed from its arrival, and outputs are those of a closed loop."""
    arrivals = [0.0, 0.001, 0.05]
    run = drive(engine, jobs(engine, prompts), arrivals=arrivals)
    assert not engine.busy
    first = run.timelines[0].added_s
    assert [t.added_s - first for t in run.timelines] == pytest.approx(arrivals)
    assert all(t.emissions[0][0] > 0 for t in run.timelines)
    closed = drive(engine, jobs(engine, prompts), streams=2)
    assert [t.token_ids for t in run.timelines] == [t.token_ids for t in closed.timelines]
