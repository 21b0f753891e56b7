"""Runs an engine through the steps of a grid, and makes a cost table of what they took.

All kinds of steps are run in every round, so that a machine that is slow for a while is so for all of them. The first
round is dropped, as is the first step of each turn; of the others the median counts.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from stridelm.bench.cost.requests import recorded_requests
from stridelm.bench.cost.settings import CostSettings
from stridelm.bench.cost.watch import Note, Watch
from stridelm.bench.environment import device_name, dtype_name, environment
from stridelm.bench.serving.texts import load_texts
from stridelm.bench.stand import checkpoint_name
from stridelm.bench.variants import read_variant
from stridelm.draft.settle import can_choose
from stridelm.engine.engine import Engine
from stridelm.params import SamplingParams, Speculation
from stridelm.schedule import Unbounded
from stridelm.schedule.waits import Waits
from stridelm.simulate.curve import DecodePoint, PromptPoint
from stridelm.simulate.table import PLAIN, CostTable, DrafterCosts, EngineLimits
from stridelm.types import Request

TURN, FEWEST = 5, 40
"""Steps of one kind in a row, and of all kinds in turn: at least so many."""
PROMPT_ROWS = (3, 11, 23, 45, 75, 107, 150, 213, 300, 427, 601, 853)
"""Rows of the steps with prompts that are measured, besides as many as a step may have. Products of round numbers of
rows are faster, and prompts are seldom round."""
SHORT = 45
"""Tokens of a short prompt."""
Advance = Callable[[int], None]


def count_runs(settings: CostSettings, drafters: int) -> int:
    """What `record` advances by. drafters: without plain decoding."""
    grid = len(set(settings.max_concurrency)) * len(set(settings.contexts)) + 1
    return (1 + drafters) * (settings.rounds + 1) * grid + drafters


def speculations(engine: Engine, settings: CostSettings) -> dict[str, Speculation]:
    """Drafter -> how its requests are drafted, plain decoding first. Raises ValueError for one that cannot run."""
    found = {PLAIN: Speculation(drafter=PLAIN)}
    depth = "" if settings.depth is None else f"@{settings.depth}"
    for name in settings.drafters:
        variant = read_variant(f"{name}{depth}:{settings.acceptance}", engine.loaded.target)
        found[variant.drafter] = variant.speculation
    return found


def record(engine: Engine, settings: CostSettings, advance: Advance = lambda amount: None) -> CostTable:
    """The engine is idle before and after. Raises ValueError, before anything is measured, for contexts that its own
    cannot hold."""
    recorder = Recorder(engine, settings)
    for turn in range(settings.rounds + 1):
        recorder.round(turn, advance)
    return recorder.table(advance)


class Recorder:
    """For those who measure something else between the rounds. Raises ValueError as `record` does."""

    def __init__(self, engine: Engine, settings: CostSettings) -> None:
        self._engine, self._settings = engine, settings
        self._drafters = speculations(engine, settings)
        self._grids = {name: _Grid(engine, settings, each) for name, each in self._drafters.items()}

    def round(self, turn: int, advance: Advance = lambda amount: None) -> None:
        """Every kind of step; in turn 0, to warm up."""
        for grid in self._grids.values():
            grid.run(turn, advance)

    def table(self, advance: Advance = lambda amount: None) -> CostTable:
        """Of the rounds so far, at least two, and of the scenario's requests, which are run now."""
        engine, config = self._engine, self._engine.config
        return CostTable(
            hardware=device_name(engine),
            model=f"{checkpoint_name(engine)}, {dtype_name(engine)}",
            engine=EngineLimits(
                max_num_batched_tokens=config.max_num_batched_tokens,
                page_size=config.page_size,
                num_pages=min(engine.ledger.total()),
                max_model_len=engine.loaded.target.max_length,
                itl_target_ms=config.itl_target_ms,
                lag=engine.steps.lag,
                patience=engine.patience,
                apart=engine.steps.planner.waits.apart,
            ),
            drafters={name: grid.costs() for name, grid in self._grids.items()},
            scenario=self._settings.scenario,
            requests=recorded_requests(engine, self._drafters, self._settings, advance),
            about=environment(),
        )


class _Grid:
    """Steps whose requests are all drafted alike. Raises ValueError for contexts that the engine cannot hold."""

    def __init__(self, engine: Engine, settings: CostSettings, speculation: Speculation) -> None:
        assert engine.tokenizer is not None
        self.engine, self.settings = engine, settings
        # As where depths are chosen: a captured step of other requests always drafts as deep as they may.
        self.speculation = replace(speculation, adaptive=can_choose(speculation))
        self._text = [id for passage in load_texts().passages() for id in engine.tokenizer.encode(passage)]
        [self._like] = self._requests([self._text[:1]], 1)
        engine.abort(self._like.id)
        self._numbers, self._contexts = sorted(set(settings.max_concurrency)), sorted(set(settings.contexts))
        measured = max(len(turns) * _steps(turns) for turns in (_turns(self._like, n) for n in self._numbers))
        measured *= len(self._like.rows_by_depth)
        self._most = self._fitting(self._numbers[-1], self._contexts[-1], measured)
        self._order = random.Random(settings.seed)
        self._decoded: dict[tuple[int, tuple[int, int, int, bool]], list[Note]] = {}
        """(context that was asked for, kind of step) -> its steps."""
        self._read: dict[tuple[int, float], list[float]] = {}
        """(rows, tokens that a row sees) -> seconds."""

    def run(self, turn: int, advance: Advance) -> None:
        """Every kind of step; in turn 0, to warm up."""
        for requests in self._numbers:
            for context in self._contexts:
                self._decode(requests, context, is_noted=turn > 0)
                advance(1)
        self._prompts(turn)
        advance(1)

    def costs(self) -> DrafterCosts:
        """The medians of what was measured."""
        decode = [
            DecodePoint(
                requests,
                rows,
                depth,
                statistics.fmean(note.context for note in notes),
                statistics.median(note.seconds for note in notes),
            )
            for (_, (requests, rows, depth, prompts)), notes in self._decoded.items()
            if not prompts
        ]
        return DrafterCosts(
            rows_by_depth=self._like.rows_by_depth,
            decode=tuple(sorted(decode, key=lambda point: (point.requests, point.depth, point.rows, point.context))),
            prompts=tuple(
                PromptPoint(rows, context, statistics.median(found))
                for (rows, context), found in sorted(self._read.items())
            ),
            usual_depth=self.speculation.depth or 0,
            host_bound=self._like.host_bound,
            may_wait=self._like.draft_kv is not None and self._like.draft_kv.may_wait,
        )

    def _fitting(self, requests: int, context: int, measured: int) -> int:
        """Most tokens that a request may emit after its context: those of the measured steps, and one for each step in
        which others read their prompts. Raises ValueError if that does not fit."""
        engine = self.engine
        most = measured + requests * context // engine.config.max_num_batched_tokens + 2 * TURN
        limit = engine.loaded.target.max_length
        if context + most > limit:
            raise ValueError(
                f"contexts {context}: the steps after it need up to {most} tokens, and the model's context has "
                f"{limit}; lower contexts"
            )
        need, have = requests * engine.ledger.pages_for(context + most), min(engine.ledger.total())
        if need > have:
            raise ValueError(
                f"{requests} requests of {context + most} tokens need {need} pages of KV and the pool has {have}; "
                "lower contexts or max_concurrency, or raise num_pages"
            )
        return most

    def _decode(self, requests: int, context: int, *, is_noted: bool) -> None:
        """Steps of so many requests after a context of so many tokens."""
        turns = _turns(self._like, requests)
        with self._watched() as watch:
            running = self._requests([self._slice(place * context, context) for place in range(requests)], self._most)
            while not all(request.output_ids for request in running):
                self.engine.step()
            for watch.depth, watch.drafting in self._order.sample(turns, len(turns)):
                watch.begin()
                while len(watch.notes) < _steps(turns):
                    self.engine.step()
                kinds = [note.kind for note in watch.notes]
                for before, note in zip(kinds, watch.notes[1:], strict=False):
                    if (
                        is_noted and note.kind == before
                    ):  # with a step in flight, the first are still of the turn before
                        self._decoded.setdefault((context, note.kind), []).append(note)

    def _prompts(self, turn: int) -> None:
        """Steps that read whole prompts: as many rows as one prompt, and as several short ones. No two in a row have as
        many rows, which prompts seldom have: the second would be faster on a CPU, where products are set up anew for
        each number of rows."""
        config = self.engine.config
        largest = min(config.max_num_batched_tokens, self.engine.loaded.target.max_length - 2)
        shortest = max(SHORT, -(-largest // config.max_num_seqs))
        sizes = sorted({*(rows for rows in PROMPT_ROWS if rows < largest), largest})
        whole = [(rows, rows) for rows in sizes]
        for rows, each in [*whole, *((rows, shortest) for rows in sizes if rows > shortest)]:
            lengths = [min(each, rows - start) for start in range(0, rows, each)]
            prompts = [self._slice(turn * rows + place * each, length) for place, length in enumerate(lengths)]
            with self._watched() as watch:
                self._requests(prompts, 1)
                watch.begin()
                while self.engine.busy:
                    self.engine.step()
                if turn:
                    context = sum(length * (length - 1) / 2 for length in lengths) / rows
                    self._read.setdefault((rows, context), []).append(watch.notes[0].seconds)

    def _slice(self, start: int, length: int) -> list[int]:
        """Text of so many tokens, from a place that wraps around."""
        start %= max(1, len(self._text) - length)
        repeated = self._text * -(-length // len(self._text)) if length > len(self._text) else self._text
        return repeated[start : start + length]

    def _requests(self, prompts: Sequence[list[int]], most: int) -> list[Request]:
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, speculation=self.speculation)
        return [self.engine.add(f"cost {place}", prompt, params) for place, prompt in enumerate(prompts)]

    @contextmanager
    def _watched(self) -> Iterator[Watch]:
        """The engine's planner asks a Watch, reads prompts as fast as it can, and lets no drafter wait; afterwards all
        requests have left."""
        planner, watch = self.engine.steps.planner, Watch()
        before = planner.depths, planner.prompts, planner.waits
        planner.depths, planner.prompts, planner.waits = watch, Unbounded(), Waits()
        try:
            yield watch
        finally:
            for request in list(self.engine.queue):
                self.engine.abort(request.id)
            while self.engine.busy:
                self.engine.step()
            planner.depths, planner.prompts, planner.waits = before


def _turns(like: Request, requests: int) -> list[tuple[int, int]]:
    """(depth, requests that draft to it) of the kinds of steps: nobody drafts, one request, half of them, or all."""
    drafting = sorted({1, max(1, requests // 2), requests})
    return [(0, 0), *((depth, count) for depth in range(1, len(like.rows_by_depth)) for count in drafting)]


def _steps(turns: Sequence[tuple[int, int]]) -> int:
    """Of each kind."""
    return max(TURN, FEWEST // len(turns))
