"""A cell: one scenario under one load, decoded in one way, and plain decoding and the other ways beside it.

All ways take turns, and each turn begins with another one: A B C, B C A, C A B. Runs of one turn are compared, so that
a machine that slows down meanwhile changes both; the ratio is the median of the pairs, with their range.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stridelm.bench.serving.figures import Figures, Ratio, over_best, pace_ratio, speed_ratio
from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.objective import Objective
from stridelm.bench.serving.record import Completion, Run
from stridelm.bench.serving.scenarios import requests, scenario_of
from stridelm.bench.serving.settings import Requests, ServingSettings, SweepSettings
from stridelm.bench.serving.target import Ask, Target, Way

OnRun = Callable[[str], None]
"""Called before each run with what it is."""


@dataclass(frozen=True)
class Side:
    """A target and how it decodes."""

    target: Target
    way: Way


@dataclass(frozen=True)
class Cell:
    target: str
    scenario: str
    load: str
    label: str
    lossless: bool | None
    simulated: bool
    figures: Figures
    speed: Ratio | None = None
    """Tokens per second over plain decoding's."""
    pace: Ratio | None = None
    """How many times as fast as under plain decoding a request's tokens come."""
    over_best: Ratio | None = None
    """If depths are chosen: tokens per second over those of the fastest way that has none to choose, of plain decoding
    and this drafter at the depths that are measured."""
    identical: bool | None = None
    """Whether every output of every run was plain decoding's; None if that is not promised."""
    identical_outputs: int | None = None
    """Of the first run; None for plain decoding, and where there is none."""

    def to_json(self) -> dict[str, Any]:
        """Flat except for percentiles and ratios."""
        row = asdict(self)
        return {**row, **row.pop("figures")}


def asks_of(name: str, settings: Requests, ignore_eos: bool) -> list[Ask]:
    """The requests of a run. Raises ValueError for a scenario that they cannot be made of."""
    scenario = scenario_of(name)
    length = settings.document_chars if scenario.document else None
    prompts = requests(scenario, settings.num_prompts, settings.seed, length)
    rng, mean, ratio = random.Random(settings.seed), settings.max_tokens or scenario.max_tokens, settings.range_ratio
    most = [max(1, round(mean * rng.uniform(1 - ratio, 1 + ratio))) for _ in prompts]
    return [
        Ask(prompt, most[i], settings.temperature, ignore_eos, settings.seed + i) for i, prompt in enumerate(prompts)
    ]


def check_lengths(names: Sequence[str], settings: Requests) -> None:
    """Raise ValueError if document_chars would have no effect on any of the scenarios."""
    if settings.document_chars is not None and not any(scenario_of(name).document for name in names):
        requests(scenario_of(names[0]), 1, settings.seed, settings.document_chars)


def alternate(
    sides: Sequence[Side], asks: Sequence[Ask], load: Load, settings: Requests, on_run: OnRun, what: str
) -> list[list[Run]]:
    """The runs of each side, which take turns. The warm-up is dropped. Raises ValueError if nothing is answered in it,
    or if a cache cannot be flushed."""
    first = settings.warm_up(load)
    if first:
        for side in sides:
            on_run(f"{what}, warming up, {side.way.label}")
            _check(side.target.run(asks[:first], load, load.arrivals(first, settings.seed), side.way), side)
    runs: list[list[Run]] = [[] for _ in sides]
    arrivals = load.arrivals(len(asks), settings.seed)
    in_turn = deque(zip(runs, sides, strict=True))
    for turn in range(settings.repeats):
        for mine, side in in_turn:
            on_run(f"{what}, round {turn + 1}, {side.way.label}")
            if settings.prefix_cache == "cold":
                side.target.flush()
            mine.append(_check(side.target.run(asks, load, arrivals, side.way), side))
        in_turn.rotate(-1)
    return runs


def count_alternating(sides: int, load: Load, settings: Requests) -> int:
    """Runs that `alternate` makes."""
    return sides * (settings.repeats + (settings.warm_up(load) > 0))


def measure(
    target: Target,
    entries: Sequence[str | None],
    names: Sequence[str],
    settings: ServingSettings | SweepSettings,
    on_run: OnRun = lambda what: None,
) -> list[Cell]:
    """Cells of each scenario, load and way of decoding, plain decoding first. entries: of `--drafters`; None: the
    target's default. Raises ValueError, before anything is timed, for what cannot be run."""
    check_lengths(names, settings)
    plain, ways = ways_of(target, entries)
    asked = {name: asks_of(name, settings, settings.ignore_eos) for name in names}
    for asks in asked.values():
        target.check(asks)
    cells = []
    for name, asks in asked.items():
        for load in settings.loads:
            cells += _cells(target, plain, ways, name, asks, load, settings, on_run)
    return cells


def ways_of(target: Target, entries: Sequence[str | None]) -> tuple[Way | None, list[Way]]:
    """Plain decoding, if the target can be asked for it, and the other ways, each once."""
    plain = target.plain()
    ways = {way.label: way for way in map(target.way, entries)}
    return plain, [way for way in ways.values() if way != plain]


def count_runs(target: Target, entries: Sequence[str | None], settings: ServingSettings | SweepSettings) -> int:
    """Runs that `measure` makes for one scenario."""
    plain, ways = ways_of(target, entries)
    return sum(count_alternating((plain is not None) + len(ways), load, settings) for load in settings.loads)


def _cells(
    target: Target,
    plain: Way | None,
    ways: Sequence[Way],
    name: str,
    asks: Sequence[Ask],
    load: Load,
    settings: ServingSettings | SweepSettings,
    on_run: OnRun,
) -> list[Cell]:
    objective, what = Objective.of(settings.slo), f"{name}, {load.name}"

    def cell(way: Way, runs: Sequence[Run], **more: Any) -> Cell:
        figures = Figures.of(runs, objective)
        return Cell(target.name, name, load.name, way.label, way.lossless, way.simulated, figures, **more)

    measured = [*([plain] if plain else []), *ways]
    alternated = alternate([Side(target, way) for way in measured], asks, load, settings, on_run, what)
    runs = {way.label: each for way, each in zip(measured, alternated, strict=True)}
    if plain is None:
        return [cell(way, runs[way.label]) for way in ways]
    bases = runs[plain.label]
    cells = [cell(plain, bases)]
    for way in ways:
        mine = runs[way.label]
        same = [identical_outputs(run, base) for run, base in zip(mine, bases, strict=True)]
        fixed = [runs[other.label] for other in ways if way.adaptive and _is_the_same_at_a_fixed_depth(other, way)]
        cells.append(
            cell(
                way,
                mine,
                speed=speed_ratio(mine, bases),
                pace=pace_ratio(mine, bases),
                over_best=over_best(mine, bases, fixed),
                identical=min(same) == len(asks) if way.repeats else None,
                identical_outputs=same[0],
            )
        )
    return cells


def _is_the_same_at_a_fixed_depth(other: Way, way: Way) -> bool:
    alike = (other.drafter, other.lossless, other.simulated) == (way.drafter, way.lossless, way.simulated)
    return alike and not other.adaptive


def identical_outputs(run: Run, base: Run) -> int:
    """How many requests had the same output in both."""
    pairs = zip(run.completions, base.completions, strict=True)
    return sum(one is not None and other is not None and same_output(one, other) for one, other in pairs)


def same_output(one: Completion, other: Completion) -> bool:
    """Whether two outputs are the same, by their tokens if both are known."""
    if one.token_ids is not None and other.token_ids is not None:
        return one.token_ids == other.token_ids
    return one.text == other.text


def _check(run: Run, side: Side) -> Run:
    """Raises ValueError if nothing was answered."""
    if not run.answered:
        raise ValueError(f"{side.target.name} answered no request; the first error: {run.errors[0]}")
    return run
