"""Whole decode steps captured as CUDA graphs, propose to observe, and replayed.

A graph is captured per kind of step: a number of requests, a number of rows each, the ways of drafting (engine/ways.py)
and one rule. Which requests they are, how each is drafted and how far it may go is passed in one small tensor, so in
steady state a step is one launch. If the host drafts, its proposals are passed in another tensor, and the graph begins
after them. Steps with prompts run through the same code part by part; in those, the proposals (engine/proposals.py) and
the forward pass (run/segments.py) are captured separately.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from stridelm.batch import Draft, ForwardBatch, Verdict
from stridelm.cache.transaction import Transaction
from stridelm.draft.base import Drafter, Group
from stridelm.draft.guess import Guessing
from stridelm.engine.device_step import DeviceStep, Land, Run
from stridelm.engine.expected import expected_kinds
from stridelm.engine.kinds import CLASSES, DRAFTING, REQUESTS, Inputs, Kind, kind_of, padded_size, row_stairs, sizes_for
from stridelm.engine.proposals import FromHost, Proposing
from stridelm.engine.stats import EngineStats
from stridelm.engine.ways import OTHERS, Ways, combined, share_of, ways_of
from stridelm.params import SamplingParams
from stridelm.progress import bar, size
from stridelm.run.batch import RowLayout, packed, row_layout
from stridelm.run.eager import Logits
from stridelm.run.graphs import GraphPool
from stridelm.sample.table import Feature, SamplingTable
from stridelm.schedule.limits import Budget
from stridelm.schedule.rows import has_prompt
from stridelm.types import Request, Span, StepPlan

if TYPE_CHECKING:
    from stridelm.run.segments import Segments

logger = logging.getLogger(__name__)

MIN_ROWS = 64
"""Rows, padding included, that a captured step may have even if the step budget is smaller."""


class Graph:
    """One captured step with its inputs."""

    def __init__(self, device: DeviceStep, sampling: SamplingTable, kind: Kind, ways: Ways, pool: GraphPool) -> None:
        where = device.device
        self._inputs = Inputs(kind.requests, where)
        self._proposed = None if kind.is_chain is None else FromHost(kind, where)
        # Kept alive because the graph reads this layout's tensors.
        self._layout = row_layout(((kind.real, kind.draft, True),) * kind.requests, kind.draft, where)

        def body() -> Run:
            with sampling.assuming(kind.features):
                return _half(device, kind, ways, self._inputs, self._layout, self._proposed)

        captured = pool.capture(body)
        self._graph: torch.cuda.CUDAGraph | None = None
        if captured is not None:
            self._graph, run = captured
            assert run.detail is not None
            self._kept = run.detail.batch.geometry.kept  # the tiles, which the graph reads
            # Drop the step's tensors, so that other graphs may use their memory; it is read before one of them runs.
            self._readable = run.readable and run.readable.map(pool.borrow)
            self._run = replace(run, readable=None, detail=None)

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def replay(self, spans: tuple[Span, ...], ways: Ways, draft: Draft | None) -> Run:
        """draft: what the host proposed, if it drafts for this kind."""
        assert self._graph is not None
        self._inputs.fill(spans, ways.numbers)
        if self._proposed is not None:
            assert draft is not None
            self._proposed.fill(draft)
        self._graph.replay()
        run = replace(self._run, table=self._run.table[: len(spans)])
        if self._readable is not None and any(span.request.params.reads_rows for span in spans):
            run.readable = replace(self._readable, spans=spans)
        return run


G = TypeVar("G", Graph, Proposing)


class Capture:
    """The captured steps, and parts of steps, of an engine: captured at its start or when first needed."""

    def __init__(
        self,
        device: DeviceStep,
        sampling: SamplingTable,
        pool: GraphPool,
        segments: Segments | None,
        typical: Callable[[SamplingParams], Request],
        budget: Budget,
        stats: EngineStats,
        shallow: bool,
    ) -> None:
        """segments: the forward passes of steps not captured whole. typical: makes a representative request, which is
        never queued. budget: limits of a step. shallow: whether shallower drafts have graphs of their own."""
        self.device = device
        self.pool = pool
        self._sampling = sampling
        self._segments = segments
        self._typical = typical
        self._budget, self._shallow = budget, shallow
        self._graphs: dict[Kind, Graph | None] = {}
        """None: there was no memory for it."""
        self._proposing: dict[Kind, Proposing | None] = {}
        self._missing = 0
        self._stats = stats

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of steps captured so far."""
        return tuple(kind for kind, graph in self._graphs.items() if graph is not None)

    @property
    def proposals(self) -> tuple[Kind, ...]:
        """The kinds whose proposals were captured by themselves."""
        return tuple(kind for kind, graph in self._proposing.items() if graph is not None)

    @property
    def missing(self) -> int:
        """How many graphs there was no memory for."""
        return self._missing + (0 if self._segments is None else self._segments.missing)

    def run(self, plan: StepPlan, transaction: Transaction, land: Land, *, detailed: bool = False) -> Run:
        """Run the device's half of a step: by replay if the whole step can be captured, else part by part."""
        draft = self.device.begin(plan, transaction)
        replayed = None if detailed else self.replay(plan, draft)
        if replayed is not None:
            return replayed
        forward = None if self._segments is None else self._segments.forward
        return self.device.finish(plan, draft, land, self.propose, forward)

    def replay(self, plan: StepPlan, draft: Draft | None = None) -> Run | None:
        """Replay the step; None if its kind cannot be captured, or graphs may take no more memory. draft: what the host
        proposed, if it drafts."""
        ways, needed = self._wanted(plan.spans)
        kind = "mixed_speculation" if ways is None else self._kind(plan.spans, ways, needed, draft)
        if ways is None or isinstance(kind, str):
            self._count_uncaptured(str(kind))
            return None
        graph = self._graph(kind, ways)
        if graph is None:
            self._count_uncaptured("memory")
            return None
        return graph.replay(plan.spans, ways, draft)

    def _count_uncaptured(self, reason: str) -> None:
        self._stats.uncaptured[reason] = self._stats.uncaptured.get(reason, 0) + 1

    def propose(self, drafter: Drafter, group: Group) -> Draft:
        """What the drafter proposes, by replay if possible."""
        ways, needed = self._wanted(group.spans)
        if drafter.host_bound or ways is None or len(ways.device) > 1 or len(group.spans) > REQUESTS[-1]:
            return drafter.propose(group)
        graph = self._proposing_of(kind_of(group.spans, ways, needed, None, self._sampling.generation), ways)
        return drafter.propose(group) if graph is None else graph.replay(group.spans, ways)

    def at_start(self) -> None:
        """Capture the steps of requests with default speculation, and of those without, for every batch size and class
        of parameters, and the parts of steps with prompts: as many as the pool's memory allows. Those with few rows
        come first, since they lose most without a graph."""
        params = SamplingParams(max_tokens=1)
        requests = (self._typical(params), self._typical(replace(params, speculation="off")))
        kinds = expected_kinds(requests, self._budget.requests, self._sampling.generation)
        fit = sorted(filter(self._fits, kinds), key=lambda kind: (kind.rows, kind.features.value))
        steps: list[tuple[int, Callable[[], None]]] = []
        steps += [(kind.rows, partial(self._prepare, kind, kinds[kind])) for kind in fit]
        passes: list[tuple[int, Callable[[], None]]] = []
        if self._segments is not None:
            sizes = self._segments.expected(self._budget.requests)
            pages = (self.device.pages, self.device.page_size)
            passes += [(size[0], partial(self._segments.prepare, *size, *pages)) for size in sizes]
        with bar("capturing steps", len(steps) + len(passes), "graphs") as advance:
            self._capture_largest([(kind, kinds[kind]) for kind in reversed(fit)])
            for _, capture in passes[-1:] + sorted(steps + passes, key=lambda job: job[0]):
                capture()  # the largest pass too shares its memory with the others
                advance(1)
        if self.missing:
            logger.error(
                "%d of the graphs that ordinary steps need were not captured: capture_memory (%s) or the device's "
                "memory is used up. Without one, a step of few rows takes several times as long. Raise capture_memory, "
                "lower max_num_seqs, or free memory on %s",
                self.missing,
                size(self.pool.budget),
                self.device.device,
            )

    def _prepare(self, kind: Kind, ways: Ways) -> None:
        """Capture the step and, by themselves, its proposals."""
        self._graph(kind, ways)
        if kind.draft and kind.ways:
            self._proposing_of(kind, ways)

    def _capture_largest(self, kinds: Sequence[tuple[Kind, Ways]]) -> None:
        """Capture the largest step that leaves half of the pool's memory to others: all smaller ones share what it
        takes for its tensors. kinds: the largest first."""
        rows = math.inf
        for kind, ways in kinds:
            if kind.rows < rows:
                rows = kind.rows
                self._graph(kind, ways)
                if 2 * self.pool.spent <= self.pool.budget:
                    return
                self._graphs.clear()
                self._missing = 0
                self.pool.clear()

    def _graph(self, kind: Kind, ways: Ways) -> Graph | None:
        """The graph for the kind, captured now if possible."""
        return self._once(self._graphs, Graph, kind, ways)

    def _proposing_of(self, kind: Kind, ways: Ways) -> Proposing | None:
        """The graph of the proposals of such a step, captured now if possible."""
        if Guessing.of(ways.likes[0].speculation) is Guessing.DRAWN:
            return None
        kind = replace(kind, requests=padded_size(kind.requests, DRAFTING), real=1, rows=0)
        return self._once(self._proposing, Proposing, kind, ways)

    def _once(self, made: dict[Kind, G | None], make: type[G], kind: Kind, ways: Ways) -> G | None:
        if kind not in made:
            graph = make(self.device, self._sampling, kind, ways, self.pool)
            made[kind] = graph if graph.is_captured else None
            self._missing += not graph.is_captured
        return made[kind]

    def _kind(self, spans: tuple[Span, ...], ways: Ways, needed: Feature, draft: Draft | None) -> Kind | str:
        """The kind of a whole step, or why it cannot be captured."""
        if draft is not None and draft.probs is not None:
            return "draft_probabilities"
        for span in spans:
            if has_prompt(span):
                return "prompt"  # all other requests would be padded to as many rows
            if span.request.params.structured_outputs is not None:
                return "grammar"
        several = len(ways.device) + (draft is not None) > 1
        if several and any(Guessing.of(like.speculation) is Guessing.DRAWN for like in ways.likes):
            return "draft_probabilities"
        if len(spans) > REQUESTS[-1]:
            return "size"
        is_chain = None if draft is None else draft.is_chain
        kind = kind_of(spans, ways, needed, is_chain, self._sampling.generation)
        return kind if self._fits(kind) else "size"

    def _fits(self, kind: Kind) -> bool:
        return kind.rows <= max(self._budget.tokens, MIN_ROWS)

    def _wanted(self, spans: tuple[Span, ...]) -> tuple[Ways | None, Feature]:
        """How the spans are drafted, and the features they need, grammars apart: guesses need not obey them."""
        needed = self._sampling.features_of(span.request.slot for span in spans) & ~Feature.GRAMMAR
        return ways_of(spans, whole=not self._shallow or needed not in CLASSES[0]), needed

    def row_stairs(self, requests: int, depth: int) -> tuple[int, ...]:
        """Rows up to which captured steps of so many of the engine's default requests, drafted to this depth, take as
        long; none if none is captured."""
        by_depth = self._typical(SamplingParams(max_tokens=1)).rows_by_depth
        if requests > REQUESTS[-1] or depth >= len(by_depth):
            return ()
        draft = by_depth[depth]
        size = padded_size(requests, sizes_for(CLASSES[0], draft, 0))
        return tuple(rows - (size - requests) for rows in row_stairs(size, 1, draft, chosen=True))


def nobody(requests: int, device: torch.device) -> torch.Tensor:
    """[R] slots of padding."""
    return torch.full((requests,), -1, device=device)


def _half(
    device: DeviceStep, kind: Kind, ways: Ways, inputs: Inputs, layout: RowLayout, proposed: FromHost | None
) -> Run:
    """The step of `kind.requests` requests, read from `inputs`. proposed: the host's proposals, if any."""
    spans, slots = kind.stand_ins(ways.like, device.reach), inputs.slots
    if kind.rows < len(layout.span_N):
        layout = packed(layout, inputs.reals, inputs.drafts, kind.rows)
    else:
        layout = replace(layout, reals_R=inputs.reals, drafts_R=inputs.drafts)
    served, none_R = [], device.tokens.arena.keep(nobody, kind.requests)
    for number, (way, like) in enumerate(zip(kind.ways, ways.likes, strict=True), start=1):
        mine = inputs.ways == number
        served.append((mine, kind.stand_ins(like, device.reach, way), torch.where(mine, slots, none_R)))

    def propose() -> Draft:
        parts = [(mine, device.drafters.propose(theirs, where, bounds=inputs.drafts)) for mine, theirs, where in served]
        if proposed is not None:
            parts.append((inputs.ways == OTHERS, proposed.draft()))
        return combined(parts) if parts else device.drafters.propose(spans, slots)

    def lay_out(draft: Draft) -> ForwardBatch:
        if draft.width:
            draft.valid = inputs.within(draft)
        return device.on_layout(spans, layout, draft, slots, device.reach)

    def observe(batch: ForwardBatch, logits: Logits, verdict: Verdict) -> None:
        for mine, theirs, where in served:
            device.drafters.observe(theirs, where, *share_of(mine, none_R, batch, logits, verdict))

    return device.half(spans, slots, propose, lay_out, device.runner.forward, observe)
