"""Whole decode steps captured as CUDA graphs, propose to observe, and replayed.

A graph is captured per kind of step: a number of requests, a number of rows each, one way of drafting and accepting.
Which requests they are, and how far each may go, is passed in one small tensor, so in steady state a step is one
launch. If the host drafts, its proposals are passed in another tensor, and the graph begins after them. Steps with
prompts or with several drafters run through the same code part by part; in those, the proposals (engine/proposals.py)
and the forward pass (run/segments.py) are captured separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from stridelm.cache.transaction import Transaction
from stridelm.draft.base import Drafter, Group
from stridelm.draft.guess import Guessing
from stridelm.engine.device_step import DeviceStep, Run
from stridelm.engine.kinds import DRAFTING, REQUESTS, Inputs, Kind, padded_size
from stridelm.engine.proposals import FromHost, Proposing
from stridelm.params import SamplingParams
from stridelm.progress import bar
from stridelm.run.batch import RowLayout, row_layout
from stridelm.run.graphs import GraphPool, reach_of
from stridelm.sample.table import Feature, SamplingTable
from stridelm.schedule.limits import Budget
from stridelm.schedule.rows import window_leftover
from stridelm.types import Draft, ForwardBatch, Request, Span, StepPlan

if TYPE_CHECKING:
    from stridelm.run.segments import Segments

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
        graph = None if kind is None else self._graph(kind, _like(plan.spans))
        if graph is None:
            return None
        graph.replay(plan.spans, draft)
        run = graph.run
        return replace(run, table=run.table[: len(plan.spans)])

    def propose(self, drafter: Drafter, group: Group) -> Draft:
        """What the drafter proposes, by replay if possible."""
        kind = None if drafter.host_bound else self._about(group.spans)
        graph = None if kind is None else self._proposing_of(kind, _like(group.spans))
        return drafter.propose(group) if graph is None else graph.replay(group.spans)

    def at_start(self) -> None:
        """Capture the steps of requests with default speculation, greedy and sampled, for every batch size: the largest
        first, and as many as the pool's memory allows."""
        wanted = list(self._expected())
        with bar("capturing steps", len(wanted), "graphs") as advance:
            for kind, like in wanted:
                self._graph(kind, like)
                if kind.draft and not like.host_bound:
                    self._proposing_of(kind, like)
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
        largest = padded_size(min(self._budget.requests, REQUESTS[-1]))
        for size in reversed(REQUESTS[: REQUESTS.index(largest) + 1]):
            for temperature, features in ((0.0, Feature(0)), (1.0, Feature.SAMPLED)):
                like = self._typical(SamplingParams(temperature=temperature, max_tokens=1))
                depth = len(like.rows_by_depth) - 1
                kind = Kind(
                    requests=size,
                    real=depth + 1 if like.all_or_nothing else 1,  # tokens emitted by a trusted window are run again
                    draft=like.rows_by_depth[-1],
                    depth=depth,
                    reach=self._reach(1),
                    speculation=like.speculation,
                    features=features,
                )
                for is_chain in (True, False) if like.host_bound and kind.draft else (None,):
                    yield replace(kind, is_chain=is_chain), like

    def _kind(self, spans: tuple[Span, ...], draft: Draft | None) -> Kind | None:
        """The kind of a whole step; None if it cannot be captured."""
        if draft is not None and draft.probs is not None:
            return None
        for span in spans:
            request = span.request
            if not span.decides or span.real > (window_leftover(request) if request.all_or_nothing else 1):
                return None  # a prompt, or its end: all other requests would be padded to as many rows
            if request.params.reads_rows:
                return None
        kind = self._about(spans)
        if kind is None:
            return None
        padded = kind.requests * (kind.real + kind.draft)
        if padded > max(self._budget.tokens, MIN_ROWS):
            return None
        return kind if draft is None else replace(kind, is_chain=draft.is_chain)

    def _about(self, spans: tuple[Span, ...]) -> Kind | None:
        """The kind that the spans have in common; None if there are too many or they speculate differently."""
        speculation = spans[0].request.speculation
        if len(spans) > REQUESTS[-1] or any(span.request.speculation != speculation for span in spans):
            return None
        features = Feature(0)
        for span in spans:
            features |= self._sampling.features(span.request.slot)
        if features & Feature.GRAMMAR:  # its matchers run on the host
            return None
        deepest = max(spans, key=lambda span: span.depth)
        return Kind(
            requests=padded_size(len(spans)),
            real=max(span.real for span in spans),
            draft=deepest.draft,
            depth=deepest.depth,
            reach=self._reach(max(span.end for span in spans)),
            speculation=speculation,
            features=features,
            lists=self._sampling.generation if features & Feature.LISTED else 0,
        )

    def _reach(self, end: int) -> int:
        return reach_of(end, self.device.tokens.tokens.shape[1])


def _like(spans: Sequence[Span]) -> Request:
    """A representative request. All are of one kind, but if any reads histories, this one does, and so the graph."""
    return max((span.request for span in spans), key=lambda request: request.params.uses_history)


def _half(
    device: DeviceStep, kind: Kind, like: Request, inputs: Inputs, layout: RowLayout, proposed: FromHost | None
) -> Run:
    """The step of `kind.requests` requests like `like`, read from `inputs`. proposed: the host's proposals, if any."""
    spans, slots = kind.stand_ins(like), inputs.slots
    layout = replace(layout, reals_R=inputs.reals, drafts_R=inputs.drafts)

    def propose() -> Draft:
        return device.drafters.propose(spans, slots) if proposed is None else proposed.draft()

    def lay_out(draft: Draft) -> ForwardBatch:
        if draft.width:
            draft.valid = inputs.within(draft)
        return device.on_layout(spans, layout, draft, slots, kind.reach)

    return device.half(spans, slots, propose, lay_out, device.runner.forward)
