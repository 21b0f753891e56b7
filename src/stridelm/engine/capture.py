"""Whole decode steps captured as CUDA graphs, propose to observe, and replayed.

A graph is captured for a kind of step: so many requests, so many rows each, one way of drafting and accepting. Which
requests they are, and how far each may go, comes in through one small tensor, so in steady state a step is one launch.
What a drafter proposes on the host comes in through another, and the graph begins behind it. Prompts and mixtures of
drafters run through the same code part by part, and of those only the forward pass is captured (run/segments.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from stridelm.engine.step import Run, on_device
from stridelm.params import SamplingParams
from stridelm.progress import bar
from stridelm.run.graphs import GraphPool, reach_of
from stridelm.run.padded import Frame, build_on_bounds, frame
from stridelm.sample.table import Feature
from stridelm.schedule.rows import window_leftover
from stridelm.types import DeviceGeometry, Draft, ForwardBatch, Request, Span, StepPlan
from stridelm.upload import staging

if TYPE_CHECKING:
    from stridelm.engine.engine import Engine

REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Sizes that a step's requests are padded to."""
LEAST_ROWS = 64
"""Rows that a captured step may always have, padding included."""
BUFFERS = 4
"""Host copies of the inputs that may be on their way at once; more than the steps that are in flight."""


@dataclass(frozen=True)
class Kind:
    """What a graph is captured for."""

    requests: int
    real: int
    draft: int
    depth: int
    reach: int
    """A bound on every request's tokens."""
    speculation: Hashable
    features: Feature
    lists: int = 0
    """The sampling table's generation, if lists of it are read: a graph of another one reads tensors that are gone, and
    is never replayed again."""
    straight: bool | None = None
    """Whether what the host proposes are chains; None: the device drafts, or nobody does."""


class Proposal:
    """Where a graph reads what the host proposed."""

    def __init__(self, kind: Kind, device: torch.device) -> None:
        assert kind.straight is not None
        self._straight = kind.straight
        self._rows = torch.zeros(6, kind.requests, kind.draft, dtype=torch.int64, device=device)
        """A draft's tensors one after another. Padding is cut off by its bound, whatever is left here."""
        self._candidates = np.ones((kind.requests, kind.draft), dtype=bool)

    def draft(self) -> Draft:
        tokens, parents, roles, depths, ancestors, live = self._rows.unbind(0)
        return Draft(
            tokens,
            parents,
            roles,
            depths,
            ancestors,
            live.bool(),
            self._candidates,
            straight=self._straight,
            max_depth=tokens.shape[1],
        )

    def fill(self, draft: Draft) -> None:
        skeleton = (draft.tokens, draft.parents, draft.roles, draft.depths, draft.ancestors)
        self._rows[:, : len(draft.tokens)] = torch.stack((*skeleton, draft.live.to(torch.int64)))


class Graph:
    """One captured step with its inputs."""

    def __init__(self, engine: Engine, kind: Kind, like: Request, pool: GraphPool) -> None:
        self._inputs = torch.zeros(3, kind.requests, dtype=torch.int64, device=engine.parts.device)
        """Slot, most real rows and most draft rows of each request."""
        self._staging = [staging(3, kind.requests, device=engine.parts.device) for _ in range(BUFFERS)]
        self._turn = 0
        self._last: list[tuple[int, int, int]] | None = None
        self._inputs[0] = -1  # until it is replayed, nobody's
        self._inputs[1] = 1
        # The graph reads this layout's tensors for as long as it lives.
        self._layout = frame(((kind.real, kind.draft, True),) * kind.requests, kind.draft, engine.parts.device)
        self._proposal = None if kind.straight is None else Proposal(kind, engine.parts.device)
        proposed = None if self._proposal is None else self._proposal.draft
        engine.sampling.assume(kind.features)
        captured = pool.capture(lambda: _body(engine, kind, like, self._inputs, self._layout, proposed))
        self._graph: torch.cuda.CUDAGraph | None = None
        if captured is not None:
            self._graph, run = captured
            assert run.detail is not None and isinstance(run.detail.batch.geometry, DeviceGeometry)
            self._kept = run.detail.batch.geometry.kept  # the tiles, which the graph reads
            # The rest of what the step left goes, so that other graphs may have its memory.
            self.run = replace(run, detail=None)

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def replay(self, rows: list[tuple[int, int, int]], draft: Draft | None) -> None:
        """rows: slot, real rows and draft rows of each request; what is missing to the captured size is padding.
        draft: what the host proposed, for a kind of which it does."""
        if rows != self._last:
            staged = self._staging[self._turn]
            self._turn = (self._turn + 1) % BUFFERS
            staged[:, : len(rows)] = torch.tensor(rows, dtype=torch.int64).t()
            staged[0, len(rows) :] = -1
            staged[1, len(rows) :] = 1
            staged[2, len(rows) :] = 0
            self._inputs.copy_(staged, non_blocking=True)
            self._last = rows
        if self._proposal is not None:
            assert draft is not None
            self._proposal.fill(draft)
        assert self._graph is not None
        self._graph.replay()


class Capture:
    """The captured steps of an engine: at its start, or when they are first needed."""

    def __init__(self, engine: Engine, pool: GraphPool) -> None:
        self._engine = engine
        self._pool = pool
        self._graphs: dict[Kind, Graph | None] = {}
        """None: there was no memory for it."""

    def run(self, plan: StepPlan, draft: Draft | None) -> Run | None:
        """Replay the step; None if it is not of a kind that can be captured, or graphs may take no more memory.
        draft: what the host proposed, if it did."""
        kind = self._kind(plan, draft)
        # All are of one kind, but for who looks at histories: if any does, so does the step.
        like = max((span.request for span in plan.spans), key=lambda request: request.params.uses_history)
        graph = None if kind is None else self._graph(kind, like)
        if graph is None:
            return None
        graph.replay([(span.request.slot, span.real, span.draft) for span in plan.spans], draft)
        run = graph.run
        return replace(run, table=run.table[: len(plan.spans)])

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What was captured so far."""
        return tuple(kind for kind, graph in self._graphs.items() if graph is not None)

    def at_start(self) -> None:
        """Capture the steps of requests that say nothing of their own, greedy and sampled, for every number of them:
        the largest first, and as many as the pool's memory allows."""
        wanted = list(self._expected())
        with bar("capturing steps", len(wanted), "graphs") as advance:
            for kind, like in wanted:
                self._graph(kind, like)
                advance(1)

    def _graph(self, kind: Kind, like: Request) -> Graph | None:
        """The graph for the kind, captured now if it can be."""
        if kind not in self._graphs:
            graph = Graph(self._engine, kind, like, self._pool)
            self._graphs[kind] = graph if graph.is_captured else None
        return self._graphs[kind]

    def _expected(self) -> Iterator[tuple[Kind, Request]]:
        engine = self._engine
        largest = padded_size(min(engine.config.max_num_seqs, REQUESTS[-1]))
        for size in reversed(REQUESTS[: REQUESTS.index(largest) + 1]):
            for temperature, features in ((0.0, Feature(0)), (1.0, Feature.SAMPLED)):
                like = engine.intake.request("", [0], SamplingParams(temperature=temperature, max_tokens=1))
                depth = len(like.ladder) - 1
                kind = Kind(
                    requests=size,
                    real=depth + 1 if like.whole else 1,  # what a trusted window emitted is run again
                    draft=like.ladder[-1],
                    depth=depth,
                    reach=reach_of(1, engine.tokens.tokens.shape[1]),
                    speculation=like.speculation,
                    features=features,
                )
                for straight in (True, False) if like.host_bound else (None,):
                    yield replace(kind, straight=straight), like

    def _kind(self, plan: StepPlan, draft: Draft | None) -> Kind | None:
        engine, spans = self._engine, plan.spans
        if engine.tracer is not None or len(spans) > REQUESTS[-1] or (draft is not None and draft.probs is not None):
            return None
        speculation = spans[0].request.speculation
        features = Feature(0)
        for span in spans:
            request = span.request
            if not span.decides or request.speculation != speculation:
                return None
            if span.real > (window_leftover(request) if request.whole else 1):
                return None  # the end of a prompt: padded to it, all the others would run as many rows
            if request.params.logprobs is not None or request.params.prompt_logprobs is not None:
                return None
            features |= engine.sampling.features(request.slot)
        deepest = max(spans, key=lambda span: span.depth)
        kind = Kind(
            requests=padded_size(len(spans)),
            real=max(span.real for span in spans),
            draft=deepest.draft,
            depth=deepest.depth,
            reach=reach_of(max(span.end for span in spans), engine.tokens.tokens.shape[1]),
            speculation=speculation,
            features=features,
            lists=engine.sampling.generation if features & Feature.LISTED else 0,
            straight=None if draft is None else draft.straight,
        )
        padded = kind.requests * (kind.real + kind.draft)
        return kind if padded <= max(engine.config.max_num_batched_tokens, LEAST_ROWS) else None


def padded_size(requests: int) -> int:
    return next(size for size in REQUESTS if size >= requests)


def _body(
    engine: Engine,
    kind: Kind,
    like: Request,
    inputs: torch.Tensor,
    layout: Frame,
    proposed: Callable[[], Draft] | None,
) -> Run:
    """The step of `kind.requests` requests like the given one, read from `inputs`, and what was `proposed`."""
    slots, reals, drafts = inputs.unbind(0)
    request = replace(like, slot=-1)
    span = Span(request, kind.reach - kind.real, kind.real, kind.depth, kind.draft)
    spans = (span,) * kind.requests
    layout = replace(layout, reals_R=reals, drafts_R=drafts)

    def build(draft: Draft) -> ForwardBatch:
        if draft.width:
            row = torch.arange(draft.width, device=slots.device)
            draft.live = draft.live & (row < drafts[:, None])
        return build_on_bounds(
            spans, layout, draft, engine.tokens, engine.pages, slots, engine.ledger.page_size, kind.reach
        )

    return on_device(engine, spans, slots, build, engine.runner.forward, None if proposed is None else proposed())
