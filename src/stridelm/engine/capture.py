"""Whole decode steps captured as CUDA graphs, propose to observe, and replayed.

A graph is captured for a kind of step: so many requests, so many rows each, one way of drafting and accepting. Which
requests they are, and how far each may go, comes in through one small tensor, so in steady state a step is one launch.
Prompts, mixtures of drafters and requests whose logits are edited run eagerly, through the same code.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from stridelm.engine.step import Run, on_device
from stridelm.run.padded import Frame, build_on_bounds, frame
from stridelm.sample.table import Feature
from stridelm.types import Draft, ForwardBatch, Request, Span, StepPlan

if TYPE_CHECKING:
    from stridelm.engine.engine import Engine

REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Sizes that a step's requests are padded to."""
MOST_REAL = 16
"""Real rows of a request that a captured step has room for; longer spans are prompts."""
SHORTEST_REACH = 1024
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


class Graph:
    """One captured step with its inputs."""

    def __init__(self, engine: Engine, kind: Kind, like: Request, pool: Any) -> None:
        self._inputs = torch.zeros(3, kind.requests, dtype=torch.int64, device=engine.parts.device)
        """Slot, most real rows and most draft rows of each request."""
        self._staging = [torch.zeros(3, kind.requests, dtype=torch.int64, pin_memory=True) for _ in range(BUFFERS)]
        self._turn = 0
        self._last: list[tuple[int, int, int]] | None = None
        self._inputs[0] = -1  # until it is replayed, nobody's
        self._inputs[1] = 1
        # The graph reads this layout's tensors for as long as it lives.
        self._layout = frame(((kind.real, kind.draft, True),) * kind.requests, kind.draft, engine.parts.device)
        engine.sampling.assume(kind.features)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _body(engine, kind, like, self._inputs, self._layout)  # compiles what is not compiled yet
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.run = _body(engine, kind, like, self._inputs, self._layout)

    def replay(self, rows: list[tuple[int, int, int]]) -> None:
        """rows: slot, real rows and draft rows of each request; what is missing to the captured size is padding."""
        if rows != self._last:
            staged = self._staging[self._turn]
            self._turn = (self._turn + 1) % BUFFERS
            staged[:, : len(rows)] = torch.tensor(rows, dtype=torch.int64).t()
            staged[0, len(rows) :] = -1
            staged[1, len(rows) :] = 1
            staged[2, len(rows) :] = 0
            self._inputs.copy_(staged, non_blocking=True)
            self._last = rows
        self._graph.replay()


class Capture:
    """The graphs of an engine, captured when they are first needed. They share one pool of memory: no two run at
    once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._graphs: dict[Kind, Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, plan: StepPlan) -> Run | None:
        """Replay the step; None if it is not of a kind that can be captured."""
        kind = self._kind(plan)
        if kind is None:
            return None
        if kind not in self._graphs:
            self._graphs[kind] = Graph(self._engine, kind, plan.spans[0].request, self._pool)
        graph = self._graphs[kind]
        graph.replay([(span.request.slot, span.real, span.draft) for span in plan.spans])
        run = graph.run
        return replace(run, table=run.table[: len(plan.spans)])

    def _kind(self, plan: StepPlan) -> Kind | None:
        engine, spans = self._engine, plan.spans
        if engine.tracer is not None or len(spans) > REQUESTS[-1]:
            return None
        speculation = spans[0].request.speculation
        features = Feature(0)
        for span in spans:
            request = span.request
            if request.host_bound or not span.decides or span.real > MOST_REAL or request.speculation != speculation:
                return None
            if request.params.logprobs is not None or request.params.prompt_logprobs is not None:
                return None
            features |= engine.sampling.features(request.slot)
        if features & Feature.EDITED:
            return None
        deepest = max(spans, key=lambda span: span.depth)
        end = max(span.end for span in spans)
        return Kind(
            requests=next(size for size in REQUESTS if size >= len(spans)),
            real=max(span.real for span in spans),
            draft=deepest.draft,
            depth=deepest.depth,
            reach=min(max(SHORTEST_REACH, 4 ** -(-(end - 1).bit_length() // 2)), engine.tokens.tokens.shape[1]),
            speculation=speculation,
            features=features,
        )


def _body(engine: Engine, kind: Kind, like: Request, inputs: torch.Tensor, layout: Frame) -> Run:
    """The step of `kind.requests` requests like the given one, read from `inputs`."""
    pages = engine.pages
    assert pages is not None
    slots, reals, drafts = inputs.unbind(0)
    request = replace(like, slot=-1)
    span = Span(request, kind.reach - kind.real, kind.real, kind.depth, kind.draft)
    spans = (span,) * kind.requests
    layout = replace(layout, reals_R=reals, drafts_R=drafts)

    def build(draft: Draft) -> ForwardBatch:
        if draft.width:
            row = torch.arange(draft.width, device=slots.device)
            draft.live = draft.live & (row < drafts[:, None])
        return build_on_bounds(spans, layout, draft, engine.tokens, pages, slots, engine.ledger.page_size, kind.reach)

    return on_device(engine, spans, slots, build)
