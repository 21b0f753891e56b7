"""Whole decode steps captured as CUDA graphs, propose to observe, and replayed.

A graph is captured per kind of step: a number of requests, a number of rows each, one way of drafting and accepting.
Which requests they are, and how far each may go, is passed in one small tensor, so in steady state a step is one
launch. If the host drafts, its proposals are passed in another tensor, and the graph begins after them. Steps with
prompts or with several drafters run through the same code part by part; in those, the proposals (engine/proposals.py)
and the forward pass (run/segments.py) are captured separately.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from stridelm.cache.transaction import Transaction
from stridelm.draft.base import Drafter, Group
from stridelm.draft.guess import Guessing
from stridelm.engine.device_step import DeviceStep, Run
from stridelm.engine.kinds import CLASSES, DRAFTING, REQUESTS, Inputs, Kind, padded_size
from stridelm.engine.proposals import FromHost, Proposing
from stridelm.engine.stats import EngineStats
from stridelm.params import SamplingParams
from stridelm.progress import bar
from stridelm.run.batch import RowLayout, row_layout
from stridelm.run.graphs import GraphPool
from stridelm.sample.table import Feature, SamplingTable
from stridelm.schedule.limits import Budget
from stridelm.schedule.rows import window_leftover
from stridelm.types import Draft, ForwardBatch, Request, Span, StepPlan

if TYPE_CHECKING:
    from stridelm.run.segments import Segments

MAX_ENDING = 4
"""Most requests whose shallower drafts are captured at the start."""
MIN_ROWS = 64
"""Rows, padding included, that a captured step may have even if the step budget is smaller."""


class Graph:
    """One captured step with its inputs."""

    def __init__(self, device: DeviceStep, sampling: SamplingTable, kind: Kind, like: Request, pool: GraphPool) -> None:
        where = device.device
        self._inputs = Inputs(kind.requests, where)
        self._proposed = None if kind.is_chain is None else FromHost(kind, where)
        # Kept alive because the graph reads this layout's tensors.
        self._layout = row_layout(((kind.real, kind.draft, True),) * kind.requests, kind.draft, where)
        sampling.assume(kind.features)
        captured = pool.capture(lambda: _half(device, kind, like, self._inputs, self._layout, self._proposed))
        self._graph: torch.cuda.CUDAGraph | None = None
        if captured is not None:
            self._graph, run = captured
            assert run.detail is not None
            self._kept = run.detail.batch.geometry.kept  # the tiles, which the graph reads
            # Drop the rest of the step's tensors, so that other graphs may use their memory.
            self.run = replace(run, detail=None)

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def replay(self, spans: tuple[Span, ...], draft: Draft | None) -> None:
        """draft: what the host proposed, if it drafts for this kind."""
        assert self._graph is not None
        self._inputs.fill(spans)
        if self._proposed is not None:
            assert draft is not None
            self._proposed.fill(draft)
        self._graph.replay()


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
    ) -> None:
        """segments: the forward passes of steps that are not captured whole. typical: makes a representative request
        with these parameters, which is never queued. budget: limits of a step."""
        self.device = device
        self.pool = pool
        self._sampling = sampling
        self._segments = segments
        self._typical = typical
        self._budget = budget
        self._graphs: dict[Kind, Graph | None] = {}
        """None: there was no memory for it."""
        self._proposing: dict[Kind, Proposing | None] = {}
        self._stats = stats

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of steps captured so far."""
        return tuple(kind for kind, graph in self._graphs.items() if graph is not None)

    @property
    def proposals(self) -> tuple[Kind, ...]:
        """The kinds whose proposals were captured by themselves."""
        return tuple(kind for kind, graph in self._proposing.items() if graph is not None)

    def run(self, plan: StepPlan, transaction: Transaction, *, detailed: bool = False) -> Run:
        """Run the device's half of a step: by replay if the whole step can be captured, else part by part."""
        draft = self.device.begin(plan, transaction)
        replayed = None if detailed else self.replay(plan, draft)
        if replayed is not None:
            return replayed
        forward = None if self._segments is None else self._segments.forward
        return self.device.finish(plan, draft, self.propose, forward)

    def replay(self, plan: StepPlan, draft: Draft | None = None) -> Run | None:
        """Replay the step; None if its kind cannot be captured, or graphs may take no more memory. draft: what the host
        proposed, if it drafts."""
        kind = self._kind(plan.spans, draft)
        graph = None if isinstance(kind, str) else self._graph(kind, plan.spans[0].request)
        if graph is None:
            reason = kind if isinstance(kind, str) else "memory"
            self._stats.uncaptured[reason] = self._stats.uncaptured.get(reason, 0) + 1
            return None
        graph.replay(plan.spans, draft)
        run = graph.run
        return replace(run, table=run.table[: len(plan.spans)])

    def propose(self, drafter: Drafter, group: Group) -> Draft:
        """What the drafter proposes, by replay if possible."""
        kind = "host" if drafter.host_bound else self._about(group.spans, None)
        graph = None if isinstance(kind, str) else self._proposing_of(kind, group.spans[0].request)
        return drafter.propose(group) if graph is None else graph.replay(group.spans)

    def at_start(self) -> None:
        """Capture the steps of requests with default speculation, and of those without, for every batch size and class
        of parameters, and the parts of steps with prompts: the largest first, and as many as the pool's memory
        allows."""
        wanted = list(self._expected())
        segments = [] if self._segments is None else self._segments.expected(self._budget.requests)
        with bar("capturing steps", len(wanted) + len(segments), "graphs") as advance:
            for kind, like in wanted:
                self._graph(kind, like)
                if kind.draft and not like.host_bound:
                    self._proposing_of(kind, like)
                advance(1)
            for segment in segments:
                assert self._segments is not None
                self._segments.prepare(segment, self.device.pages, self.device.page_size)
                advance(1)

    def _graph(self, kind: Kind, like: Request) -> Graph | None:
        """The graph for the kind, captured now if possible."""
        return self._once(self._graphs, Graph, kind, like)

    def _proposing_of(self, kind: Kind, like: Request) -> Proposing | None:
        """The graph of the proposals of such a step, captured now if possible."""
        if Guessing.of(kind.speculation) is Guessing.DRAWN:
            return None
        kind = replace(kind, requests=padded_size(kind.requests, DRAFTING), real=1)
        return self._once(self._proposing, Proposing, kind, like)

    def _once(self, made: dict[Kind, G | None], make: type[G], kind: Kind, like: Request) -> G | None:
        if kind not in made:
            graph = make(self.device, self._sampling, kind, like, self.pool)
            made[kind] = graph if graph.is_captured else None
        return made[kind]

    def _expected(self) -> Iterator[tuple[Kind, Request]]:
        params = SamplingParams(max_tokens=1)
        requests = [self._typical(params), self._typical(replace(params, speculation="off"))]
        largest = padded_size(min(self._budget.requests, REQUESTS[-1]))
        for size in reversed(REQUESTS[: REQUESTS.index(largest) + 1]):
            for features in CLASSES:
                for like in requests if requests[0].rows_by_depth[-1] else requests[1:]:
                    # A draft made on the host may be a chain, a tree, or missing.
                    shapes = (True, False, None) if like.host_bound else (None,)
                    # Shallow drafts are those of requests that are about to end: rarely of many at once.
                    depths = _depths(like)[: None if size <= MAX_ENDING else 1]
                    for depth, is_chain in itertools.product(depths, shapes):
                        kind = self._kind_of(like, size, depth, features, is_chain)
                        if self._fits(kind):
                            yield kind, like

    def _kind(self, spans: tuple[Span, ...], draft: Draft | None) -> Kind | str:
        """The kind of a whole step, or why it cannot be captured."""
        if draft is not None and draft.probs is not None:
            return "draft_probabilities"
        for span in spans:
            request = span.request
            if not span.decides or span.real > (window_leftover(request) if request.all_or_nothing else 1):
                return "prompt"  # or its end: all other requests would be padded to as many rows
            if request.params.reads_rows:
                return "logprobs"
        kind = self._about(spans, None if draft is None else draft.is_chain)
        return kind if isinstance(kind, str) or self._fits(kind) else "size"

    def _fits(self, kind: Kind) -> bool:
        return kind.requests * (kind.real + kind.draft) <= max(self._budget.tokens, MIN_ROWS)

    def _about(self, spans: tuple[Span, ...], is_chain: bool | None) -> Kind | str:
        """The kind that the spans have in common, or why there is none."""
        like = spans[0].request
        if len(spans) > REQUESTS[-1]:
            return "size"
        if any(span.request.speculation != like.speculation for span in spans):
            return "mixed_speculation"
        needed = Feature(0)
        for span in spans:
            needed |= self._sampling.features(span.request.slot)
        features = next((each for each in CLASSES if needed in each), None)
        if features is None:
            return "grammar"
        depth = max(span.depth for span in spans)
        return self._kind_of(like, padded_size(len(spans)), depth, features, is_chain)

    def _kind_of(self, like: Request, requests: int, depth: int, features: Feature, is_chain: bool | None) -> Kind:
        depths = _depths(like)
        if like.host_bound and is_chain is None:  # nothing was drafted
            depth = 0
        elif len(depths) == 1:
            (depth,) = depths
        return Kind(
            requests=requests,
            real=window_leftover(like) if like.all_or_nothing else 1,
            draft=like.rows_by_depth[depth],
            depth=depth,
            speculation=like.speculation,
            features=features,
            lists=self._sampling.generation if features & Feature.LISTED else 0,
            is_chain=is_chain,
        )


def _depths(like: Request) -> range:
    """Depths that the request's drafts may have in a graph, the deepest first. Of chains only that one: a shallower
    chain is its first rows, and the bounds on rows cut the others off."""
    deepest = len(like.rows_by_depth) - 1
    is_chain = all(rows == depth for depth, rows in enumerate(like.rows_by_depth))
    return range(deepest, deepest - 1 if is_chain or like.all_or_nothing else -1, -1)


def _half(
    device: DeviceStep, kind: Kind, like: Request, inputs: Inputs, layout: RowLayout, proposed: FromHost | None
) -> Run:
    """The step of `kind.requests` requests like `like`, read from `inputs`. proposed: the host's proposals, if any."""
    spans, slots = kind.stand_ins(like, device.reach), inputs.slots
    layout = replace(layout, reals_R=inputs.reals, drafts_R=inputs.drafts)

    def propose() -> Draft:
        return device.drafters.propose(spans, slots) if proposed is None else proposed.draft()

    def lay_out(draft: Draft) -> ForwardBatch:
        if draft.width:
            draft.valid = inputs.within(draft)
        return device.on_layout(spans, layout, draft, slots, device.reach)

    return device.half(spans, slots, propose, lay_out, device.runner.forward)
