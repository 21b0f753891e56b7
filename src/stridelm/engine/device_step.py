"""The device's half of a step: propose to observe. It reads nothing back to the host, so that it can be captured
whole (engine/capture.py); steps that are not captured run through the same code, part by part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from stridelm.batch import Draft, ForwardBatch, Verdict
from stridelm.cache.transaction import Transaction
from stridelm.draft.base import Drafter, Group
from stridelm.draft.dispatch import Drafters
from stridelm.engine.introspect import Readable
from stridelm.engine.step_timer import StepTimer
from stridelm.run.batch import RowLayout, build, row_layout, shape_of
from stridelm.run.eager import EagerRunner, Logits
from stridelm.run.live_rows import without_padding
from stridelm.run.state import PageTables, TokenTable
from stridelm.types import Span, StepPlan
from stridelm.upload import upload
from stridelm.verify.paths import DraftPaths
from stridelm.verify.verifier import Verifier

Forward = Callable[[ForwardBatch], Logits]
Land = Callable[[], None]
"""Lands all steps in flight: called before verification if any request has a grammar, which the host has to match."""


@dataclass(slots=True)
class Detail:
    """What traces are read from."""

    draft: Draft
    batch: ForwardBatch


@dataclass(slots=True)
class Run:
    """Results of the device's half of a step. The table of a captured step must be read before its next replay, which
    overwrites it."""

    rows: int
    table: torch.Tensor
    """As `StepOps.commit` returns it."""
    timer: StepTimer
    readable: Readable | None
    """None for a captured step of which nothing is read."""
    detail: Detail | None
    """None for a captured step, since graphs share their memory."""


class DeviceStep:
    def __init__(
        self,
        runner: EagerRunner,
        drafters: Drafters,
        verifier: Verifier,
        tokens: TokenTable,
        pages: PageTables,
        page_size: int,
    ) -> None:
        self.runner = runner
        self.drafters = drafters
        self.tokens = tokens
        self.pages = pages
        self.page_size = page_size
        self.device = tokens.tokens.device
        self.on_bounds = runner.attention.reads_device
        """The device reads lengths and pages itself, and steps are planned on bounds."""
        self._drops_padding = self.device.type == "cpu" and not self.on_bounds
        self.narrows = runner.model.last_storing + 1 < runner.model.spec.num_layers
        """Whether the model ends with layers that store nothing, through which only some rows go (run/onward.py)."""
        self.reach = tokens.tokens.shape[1]
        """A bound on the end of any span."""
        self.timed = False
        self.verifier = verifier

    def run(self, plan: StepPlan, transaction: Transaction, land: Land, *, detailed: bool = False) -> Run:
        """The device's half of a step, eagerly. detailed: ignored, since the result always has its detail."""
        return self.finish(plan, self.begin(plan, transaction), land)

    def begin(self, plan: StepPlan, transaction: Transaction) -> Draft | None:
        """What the host has to do first: update page tables, and draft for the requests whose drafters run there."""
        self.pages.update(plan.spans, transaction)
        if self.runner.trap is not None:
            self.runner.trap.check_tables(plan.spans, self._slots(plan.spans), self.pages.tables)
        if not self.drafters.on_host(plan.spans):
            return None
        return self.drafters.propose_on_host(plan.spans, self._slots(plan.spans))

    def finish(
        self,
        plan: StepPlan,
        draft: Draft | None,
        land: Land,
        ask: Callable[[Drafter, Group], Draft] | None = None,
        forward: Forward | None = None,
    ) -> Run:
        """The rest. draft: what the host has proposed. ask, forward: faster replacements for `Drafter.propose` and for
        the runner's forward pass, if there are any."""
        spans, slots = plan.spans, self._slots(plan.spans)

        def propose() -> Draft:
            return self.drafters.propose(spans, slots, ask, draft)

        def lay_out(draft: Draft) -> ForwardBatch:
            layout = self.tokens.arena.recent(row_layout, shape_of(spans), draft.width)
            batch = self.on_layout(spans, layout, draft, slots, max(span.end for span in spans))
            batch = without_padding(batch) if self._drops_padding else batch
            return replace(batch, whole=self._whole(spans)) if self.narrows else batch

        def observe(batch: ForwardBatch, logits: Logits, verdict: Verdict) -> None:
            self.drafters.observe(spans, slots, batch, logits, verdict)

        return self.half(spans, slots, propose, lay_out, forward or self.runner.forward, observe, land)

    def _whole(self, spans: tuple[Span, ...]) -> tuple[bool, ...]:
        """Of each span, whether the last states of all its rows are needed."""
        return tuple(span.request.params.reads_prompt or self.drafters.reads_every_row(span) for span in spans)

    def on_layout(
        self, spans: tuple[Span, ...], layout: RowLayout, draft: Draft, slots: torch.Tensor, reach: int
    ) -> ForwardBatch:
        """The batch of spans whose lengths the device reads; reach: an upper bound on every span's end."""
        return build(spans, layout, draft, self.tokens, self.pages, slots, self.page_size, reach)

    def half(
        self,
        spans: tuple[Span, ...],
        slots: torch.Tensor,
        propose: Callable[[], Draft],
        lay_out: Callable[[Draft], ForwardBatch],
        forward: Forward,
        observe: Callable[[ForwardBatch, Logits, Verdict], None],
        land: Land | None = None,
    ) -> Run:
        """Propose, forward, verify, commit, observe. slots: [R] int64 each span's row of the request table."""
        timer = StepTimer(self.timed)
        draft = propose()
        batch = lay_out(draft)
        timer.end("draft")
        paths = None if land is None else DraftPaths.of(spans, draft, self.verifier.sampler.table)
        logits = forward(batch)
        timer.end("forward")
        if land is not None and paths is not None:
            land()
        verdict = self.verifier.verify(batch, draft, logits.decisions, paths)
        self.runner.pool.keep(batch, draft, verdict)
        table = self.tokens.commit(slots, verdict, batch.reals, draft.source)
        timer.end("sampling")
        observe(batch, logits, verdict)
        timer.end("draft")
        return Run(batch.ids.shape[0], table, timer, Readable.of(batch, logits, verdict), Detail(draft, batch))

    def _slots(self, spans: tuple[Span, ...]) -> torch.Tensor:
        return upload([span.request.slot for span in spans], self.device)
