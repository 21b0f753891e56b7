"""The default rule: a candidate is accepted when it equals the token that its parent row draws.

The draw at a row depends only on that row's processed logits, the request's seed and the position (kernels/noise.py
describes the noise), so the output is that of plain decoding, whatever was drafted. "Drafter-invariant speculative
decoding", arXiv 2408.07978. An empty draft is plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from stridelm.batch import Draft, Verdict
from stridelm.sample.rows import Rows
from stridelm.upload import upload
from stridelm.verify.paths import candidate_history
from stridelm.verify.rule import Rule, VerifyInput


class Exact(Rule):
    name = "exact"
    lossless = True
    coupled = True

    def decide(self, inputs: VerifyInput) -> Verdict:
        return walk_and_append(inputs, inputs.draft, draw_nodes(inputs))


def walk_and_append(inputs: VerifyInput, draft: Draft, drawn_RK: torch.Tensor) -> Verdict:
    """Follow the tokens drawn at each node down the draft, and append what is emitted to the token table."""
    table = inputs.table
    return inputs.sampler.ops.walk(
        draft, drawn_RK, inputs.nodes, inputs.decides, inputs.slots, table.tokens, table.known
    )


def draw_nodes(inputs: VerifyInput) -> torch.Tensor:
    """[R, K] the token drawn at the last real row and at each valid candidate; undefined at probes and padding."""
    batch, draft = inputs.batch, inputs.draft
    # Comparing counts is not enough: other rules' spans may have as many decision rows as this one has spans.
    one_each = not draft.width and len(batch.decision_host) == len(batch.spans)
    if inputs.covers_step and (one_each or (batch.grid and (inputs.nodes.is_cuda or draft.candidates.all()))):
        return _draw_all(inputs)
    rows_host, spans_host = _drawn_rows(inputs)
    device = inputs.nodes.device
    rows, spans = upload(rows_host, device), upload(spans_host, device)
    everything = len(rows_host) == len(batch.decision_host)
    logits = inputs.logits_MV if everything else inputs.logits_MV.index_select(0, rows)
    extra = _extra(inputs, spans, batch.decision_draft[rows])
    positions = batch.positions[batch.decisions[rows]] + 1
    slots = [inputs.spans[i].request.slot for i in spans_host.tolist()]
    path = _path(inputs, batch.decision_host[rows_host])
    tokens = inputs.sampler.draw(logits, Rows(inputs.slots[spans], positions, extra, inputs.longest, path), slots)
    everywhere = inputs.nodes.new_full((len(batch.decision_host) + 1,), -1)
    everywhere.index_copy_(0, rows, tokens)
    return everywhere[inputs.nodes]


def _draw_all(inputs: VerifyInput) -> torch.Tensor:
    """Draw at every decision row of the step at once, without any look-up on the host. On a GPU, probes are drawn
    too, though their tokens are never read."""
    batch, columns = inputs.batch, inputs.nodes.shape[1]
    positions = (batch.positions if batch.every_row else batch.positions[batch.decisions]) + 1
    slots = [span.request.slot for span in inputs.spans for _ in range(columns)]
    owners = inputs.slots if columns == 1 else inputs.slots.repeat_interleave(columns)
    extra = _extra(inputs, batch.decision_span, batch.decision_draft)
    rows = Rows(owners, positions, extra, inputs.longest, _path(inputs, batch.decision_host))
    return inputs.sampler.draw(inputs.logits_MV, rows, slots).view(-1, columns)


def _extra(inputs: VerifyInput, spans: torch.Tensor, own: torch.Tensor) -> torch.Tensor | None:
    """`candidate_history`; None if no request's processors read it."""
    if not inputs.draft.max_depth or not inputs.uses_history:
        return None
    return candidate_history(inputs.draft, spans, own)


def _path(inputs: VerifyInput, nodes_M2: np.ndarray) -> Callable[[int], list[int] | None] | None:
    """`Rows.path` of rows drawn at these nodes: span of the step and draft row of each."""
    paths = inputs.paths
    return None if paths is None else lambda row: paths.to(*nodes_M2[row].tolist())


def _drawn_rows(inputs: VerifyInput) -> tuple[np.ndarray, np.ndarray]:
    """(decision rows to draw at [m], the index of each one's span among the inputs [m]), found on the host."""
    span, row = inputs.batch.decision_host.T
    local_of = np.full(len(inputs.batch.spans), -1, dtype=np.int64)
    local_of[inputs.places] = np.arange(len(inputs.places))
    local = local_of[span]
    drawn = row < 0
    if inputs.draft.width:
        drawn = drawn | inputs.draft.candidates[local, np.maximum(row, 0)]
    chosen = np.nonzero(drawn & (local >= 0))[0]
    return chosen, local[chosen]
