"""A simulated sweep: every load with every way of decoding, and plain decoding beside each.

Its cells are those of `stride bench sweep`, so that simulated and measured figures are reported alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from stridelm.bench.serving.cells import Cell, OnRun
from stridelm.bench.serving.figures import Figures, over_best, pace_ratio, speed_ratio
from stridelm.bench.serving.loads import Load
from stridelm.bench.serving.objective import Objective
from stridelm.bench.serving.record import Run
from stridelm.schedule import Configured
from stridelm.schedule.adaptive import Adaptive
from stridelm.schedule.step_cost import StepCost
from stridelm.simulate.card import Card, Drafting, Limits
from stridelm.simulate.fleet import ROUTES, Fleet
from stridelm.simulate.noise import Noise
from stridelm.simulate.settings import MAX_TOKENS, PROMPT_TOKENS, SimulationSettings
from stridelm.simulate.table import PLAIN, CostTable
from stridelm.simulate.workload import Job, read_acceptance
from stridelm.values import check_known

SYNTAX = "NAME@DEPTH or NAME@auto"


@dataclass(frozen=True)
class Variant:
    """One way of decoding. depth: of every request, at most if it is adaptive."""

    drafter: str
    depth: int
    adaptive: bool

    @property
    def label(self) -> str:
        """As in the reports of `stride bench`."""
        return "plain" if not self.depth else f"{self.drafter}@{'auto' if self.adaptive else self.depth}"

    def is_fixed_of(self, other: Variant) -> bool:
        """Whether this is the same drafter at a fixed depth."""
        return self.drafter == other.drafter and not self.adaptive


PLAIN_DECODING = Variant(PLAIN, 0, adaptive=False)


def read_variants(entries: Sequence[str], table: CostTable) -> list[Variant]:
    """What is simulated beside plain decoding, each once. Raises ValueError for what the table has no costs for."""
    drafting = [name for name, costs in table.drafters.items() if costs.usual_depth]
    entries = entries or [
        f"{name}@{depth}" for name in drafting for depth in (table.drafters[name].usual_depth, "auto")
    ]
    found = [_variant(entry, table) for entry in entries]
    return [variant for variant in dict.fromkeys(found) if variant.depth]


def _variant(entry: str, table: CostTable) -> Variant:
    name, _, depth = entry.partition("@")
    if name in (PLAIN, "plain") and not depth:
        return PLAIN_DECODING
    check_known([name], table.drafters, "drafter in the table")
    costs = table.drafters[name]
    if depth == "auto" and costs.usual_depth:
        return Variant(name, costs.usual_depth, adaptive=True)
    if not depth.isdigit():
        raise ValueError(f"drafter {entry!r} cannot be read; write {SYNTAX}")
    deepest = len(costs.rows_by_depth) - 1
    if not 1 <= int(depth) <= deepest:
        raise ValueError(f"{entry!r}: the table has costs of {name} at depths 1 to {deepest}; record others")
    return Variant(name, int(depth), adaptive=False)


def limits_of(table: CostTable, settings: SimulationSettings) -> Limits:
    """Of each card. Raises ValueError for more requests at once than the table has costs for."""
    most, engine = table.most_requests, table.engine
    if settings.max_num_seqs is not None and settings.max_num_seqs > most:
        raise ValueError(
            f"max_num_seqs {settings.max_num_seqs}: the table has steps of up to {most} requests; lower it, or "
            "record more"
        )
    given = settings.itl_target_ms
    return Limits(
        max_num_seqs=settings.max_num_seqs or most,
        max_num_batched_tokens=settings.max_num_batched_tokens or engine.max_num_batched_tokens,
        num_pages=settings.num_pages or engine.num_pages,
        page_size=engine.page_size,
        itl_target_ms=engine.itl_target_ms if given is None else given,
        lag=engine.lag,
        patience=engine.patience,
        apart=engine.apart,
    )


def fleet_of(table: CostTable, variant: Variant, settings: SimulationSettings) -> Fleet:
    costs, limits = table.drafters[variant.drafter], limits_of(table, settings)
    rows_by_depth = costs.rows_by_depth[: variant.depth + 1]
    drafting = Drafting(variant.drafter, rows_by_depth, variant.adaptive, costs.host_bound, costs.may_wait)
    cards = [
        Card(
            limits,
            drafting,
            Adaptive() if variant.adaptive else Configured(StepCost()),
            partial(table.seconds, variant.drafter),
            Noise(settings.noise, settings.seed + number),
        )
        for number in range(settings.cards)
    ]
    return Fleet(cards, ROUTES[settings.routing or "least-outstanding"])


def jobs_of(table: CostTable, variant: Variant, settings: SimulationSettings, count: int, seed: int) -> list[Job]:
    """The requests of a run: the table's in their order, again and again, with what the settings say instead. Raises
    ValueError if their acceptance is not known, or if one is longer than the context."""
    recorded, costs = table.requests, table.drafters[variant.drafter]
    kinds = read_acceptance(settings.acceptance, len(costs.rows_by_depth) - 1) if variant.depth else []
    jobs = []
    for number in range(count):
        own = recorded[number % len(recorded)] if recorded else None
        chances: Sequence[float] = ()
        if variant.depth:
            chances = kinds[number % len(kinds)] if kinds else own.chances.get(variant.drafter, ()) if own else ()
            if len(chances) < variant.depth:
                raise ValueError(
                    f"how often drafts of {variant.drafter} are accepted is not known: the table's requests do "
                    "not say it; give acceptance"
                )
        prompt = settings.prompt_tokens or (own.prompt_tokens if own else PROMPT_TOKENS)
        most = settings.max_tokens or (own.max_tokens if own else MAX_TOKENS)
        if prompt + most > table.engine.max_model_len:
            raise ValueError(
                f"a request of {prompt} + {most} tokens is longer than the context of {table.engine.max_model_len}; "
                "lower prompt_tokens or max_tokens"
            )
        jobs.append(Job.drawn(prompt, most, chances, seed, number))
    return jobs


def scenario_name(table: CostTable, settings: SimulationSettings) -> str:
    """The table's, unless its requests are changed."""
    recorded = table.requests
    changes = [
        _changed([each.prompt_tokens for each in recorded], settings.prompt_tokens, PROMPT_TOKENS, "prompt tokens"),
        _changed([each.max_tokens for each in recorded], settings.max_tokens, MAX_TOKENS, "output tokens"),
        f"accepted {', '.join(settings.acceptance)}" if settings.acceptance else "",
    ]
    return ", ".join(filter(None, (table.scenario or "recorded" if recorded else "", *changes)))


def _changed(recorded: Sequence[int], asked: int | None, default: int, what: str) -> str:
    """How many there are, if that is not what was recorded."""
    same = bool(recorded) and asked in (None, *(recorded if len(set(recorded)) == 1 else ()))
    return "" if same else f"{asked or default} {what}"


def count_runs(variants: Sequence[Variant], settings: SimulationSettings) -> int:
    """Runs that `sweep` makes."""
    return len(settings.loads) * (1 + len(variants)) * (settings.repeats + 1)


def sweep(table: CostTable, settings: SimulationSettings, on_run: OnRun = lambda what: None) -> list[Cell]:
    """Cells of each load and way of decoding, plain decoding first. Raises ValueError for what cannot be simulated."""
    drafting = read_variants(settings.drafters, table)
    if settings.acceptance and not drafting:
        raise ValueError("acceptance would have no effect on plain decoding; leave it out, or name drafters")
    scenario, objective = scenario_name(table, settings), Objective.of(settings.slo)
    cells = []
    for load in settings.loads:
        ways = {each: _runs(table, each, load, settings, on_run) for each in (PLAIN_DECODING, *drafting)}
        bases = ways[PLAIN_DECODING]
        for variant, runs in ways.items():
            fixed = [each for other, each in ways.items() if variant.adaptive and other.is_fixed_of(variant)]
            cell = Cell("simulated", scenario, load.name, variant.label, True, True, Figures.of(runs, objective))
            if variant.depth:
                speed, pace = speed_ratio(runs, bases), pace_ratio(runs, bases)
                cell = replace(cell, speed=speed, pace=pace, over_best=over_best(runs, bases, fixed))
            cells.append(cell)
    return cells


def _runs(table: CostTable, variant: Variant, load: Load, settings: SimulationSettings, on_run: OnRun) -> list[Run]:
    """The warm-up is dropped, but what it taught the policy is kept."""
    fleet = fleet_of(table, variant, settings)
    runs = []
    for turn in range(-1, settings.repeats):
        warming = turn < 0
        on_run(f"{load.name}, {'warming up' if warming else f'round {turn + 1}'}, {variant.label}")
        count = settings.warm_up(load) if warming else settings.count(load)
        if count:
            seed = settings.seed + max(0, turn)
            jobs = jobs_of(table, variant, settings, count, seed)
            run = fleet.run(jobs, load.max_concurrency, load.arrivals(count, seed))
            runs += [] if warming else [run]
    return runs
