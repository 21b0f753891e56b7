"""Trusted mask-token decoding (arXiv 2602.06019): the probes' tokens are emitted unchecked. Lossy.

The window of a span is its last real row and its probes. It is drawn left to right, each row's processors seeing the
tokens just drawn. Static k emits the whole window; with `confidence` tau, its longest prefix in which every row's
largest raw softmax is at least tau, and at least one token. Probes are never committed: the emitted tokens are run
again as real rows.
"""

from __future__ import annotations

import torch

from stridelm.batch import Verdict
from stridelm.kernels.step_ops import Sureness
from stridelm.params import Speculation
from stridelm.sample.rows import Rows
from stridelm.verify.rule import Rule, VerifyInput
from stridelm.verify.trust import TrustOptions


class Trust(Rule):
    name = "trust"
    lossless = False
    all_or_nothing = True
    trusts_probes = True

    def decide(self, inputs: VerifyInput) -> Verdict:
        table = inputs.table
        return inputs.sampler.ops.cut_windows(
            _draw_window(inputs),
            inputs.nodes,
            inputs.decides,
            inputs.slots,
            table.tokens,
            table.known,
            self.sureness(inputs),
        )

    def sureness(self, inputs: VerifyInput) -> Sureness | None:
        """Confidence of each row of the windows, and the least at which a row is emitted; None: emit all rows."""
        if not any(_level(span.request.speculation) for span in inputs.spans):
            return None
        rows = inputs.nodes.clamp(min=0)
        logits = inputs.logits_MV.index_select(0, rows.flatten())
        return inputs.sampler.ops.confidence(logits).view(rows.shape), inputs.asked(_level)


def _level(speculation: Speculation) -> float:
    """The confidence that a request's tokens must have; 0 for whole windows."""
    return speculation.read(TrustOptions).confidence or 0.0


def _draw_window(inputs: VerifyInput) -> torch.Tensor:
    """[R, K] tokens drawn at each row of the window; padding draws from row 0 of the step."""
    spans, columns = inputs.nodes.shape
    rows = inputs.nodes.clamp(min=0)
    if not inputs.uses_history:
        return _draw(inputs, rows.flatten(), columns, None).view(spans, columns)
    drawn = torch.full((spans, columns), -1, dtype=torch.int64, device=rows.device)
    for column in range(columns):
        extra = drawn[:, :column] if column else None
        drawn[:, column] = _draw(inputs, rows[:, column], 1, extra)
    return drawn


def _draw(inputs: VerifyInput, rows: torch.Tensor, columns: int, extra: torch.Tensor | None) -> torch.Tensor:
    """Draw at decision rows, `columns` of them for each span."""
    batch = inputs.batch
    slots = [span.request.slot for span in inputs.spans for _ in range(columns)]
    positions = batch.positions[batch.decisions[rows]] + 1
    picked = Rows(inputs.slots.repeat_interleave(columns), positions, extra, inputs.longest)
    return inputs.sampler.draw(inputs.logits_MV.index_select(0, rows), picked, slots)
