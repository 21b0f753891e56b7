"""The default rule: a candidate is accepted when it equals the token that its parent row draws.

The draw at a row depends on that row's processed logits, the request's seed and the position alone (design of the
noise in kernels/noise.py), so the output is what plain decoding gives, whatever was drafted. "Drafter-invariant
speculative decoding", arXiv 2408.07978. An empty draft is plain decoding.
"""

from __future__ import annotations

import numpy as np
import torch

from stridelm.sample.processors import Rows
from stridelm.types import CANDIDATE, Draft, Verdict
from stridelm.upload import upload
from stridelm.verify.rule import Rule, VerifyInput


class Exact(Rule):
    name = "exact"
    lossless = True
    coupled = True

    def decide(self, inputs: VerifyInput) -> Verdict:
        return walk_and_append(inputs, inputs.draft, draw_nodes(inputs))


def walk_and_append(inputs: VerifyInput, draft: Draft, drawn_RK: torch.Tensor) -> Verdict:
    """Follow the tokens drawn at each node down the draft, and append what is emitted to the token table."""
    nodes, decides, slots, table = inputs.nodes, inputs.decides, inputs.slots, inputs.table
    if drawn_RK.is_cuda:
        from stridelm.kernels.walk import walk as walk_on_gpu

        return walk_on_gpu(draft, drawn_RK, nodes, decides, slots, table.tokens, table.known)
    verdict = walk(draft, drawn_RK, nodes, decides)
    table.append(slots, verdict.tokens, verdict.counts)
    return verdict


def draw_nodes(inputs: VerifyInput) -> torch.Tensor:
    """[R, K] the token drawn at the last real row and at each live candidate; anything at probes and padding."""
    batch, draft = inputs.batch, inputs.draft
    # Counts alone would not do: other rules' spans may have as many decision rows as this one has spans.
    one_each = not draft.width and len(batch.decision_host) == len(batch.spans)
    if inputs.covers_step and (one_each or batch.grid):
        return _draw_all(inputs)
    rows_host, spans_host = _drawn_rows(inputs)
    device = inputs.nodes.device
    rows, spans = upload(rows_host, device), upload(spans_host, device)
    everything = len(rows_host) == len(batch.decision_host)
    logits = inputs.logits_MV if everything else inputs.logits_MV.index_select(0, rows)
    extra = _extra(inputs, spans, batch.decision_draft[rows])
    positions = batch.positions[batch.decisions[rows]] + 1
    slots = [inputs.spans[i].request.slot for i in spans_host.tolist()]
    tokens = inputs.sampler.draw(logits, Rows(inputs.slots[spans], positions, extra, inputs.longest), slots)
    everywhere = inputs.nodes.new_full((len(batch.decision_host) + 1,), -1)
    everywhere.index_copy_(0, rows, tokens)
    return everywhere[inputs.nodes]


def _draw_all(inputs: VerifyInput) -> torch.Tensor:
    """Every decision row of the step drawn at once, nothing looked up on the host: probes too, whose tokens nobody
    reads."""
    batch, columns = inputs.batch, inputs.nodes.shape[1]
    positions = batch.positions[batch.decisions] + 1
    slots = [span.request.slot for span in inputs.spans for _ in range(columns)]
    owners = inputs.slots if columns == 1 else inputs.slots.repeat_interleave(columns)
    rows = Rows(owners, positions, _extra(inputs, batch.decision_span, batch.decision_draft), inputs.longest)
    return inputs.sampler.draw(inputs.logits_MV, rows, slots).view(-1, columns)


def _extra(inputs: VerifyInput, spans: torch.Tensor, own: torch.Tensor) -> torch.Tensor | None:
    """`candidate_history`, where any request's processors look at it."""
    if not inputs.draft.max_depth or not inputs.uses_history:
        return None
    return candidate_history(inputs.draft, spans, own)


def _drawn_rows(inputs: VerifyInput) -> tuple[np.ndarray, np.ndarray]:
    """(decision rows to draw at [m], the inputs' span of each [m]), known on the host."""
    span, row = inputs.batch.decision_host.T
    mine = np.full(len(inputs.batch.spans), -1, dtype=np.int64)
    mine[inputs.places] = np.arange(len(inputs.places))
    local = mine[span]
    drawn = row < 0
    if inputs.draft.width:
        drawn = drawn | inputs.draft.candidates[local, np.maximum(row, 0)]
    chosen = np.nonzero(drawn & (local >= 0))[0]
    return chosen, local[chosen]


def candidate_history(draft: Draft, spans: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[m, E] tokens of each row's path through the draft, itself included, in order; -1 behind the end.

    spans, own: [m] span and draft row (-1: the last real row, whose path is empty).
    """
    width, most = draft.width, draft.max_depth
    masks = torch.where(own >= 0, draft.ancestors[spans, own.clamp(min=0)], 0)
    bits = torch.arange(width, device=own.device)
    member = ((masks[:, None] >> bits) & 1) == 1
    column = torch.where(member, draft.depths[spans] - 1, most)
    path = torch.full((own.shape[0], most + 1), -1, dtype=torch.int64, device=own.device)
    return path.scatter_(1, column.clamp(max=most), draft.tokens[spans])[:, :most]


def walk(draft: Draft, drawn_RK: torch.Tensor, nodes_RK: torch.Tensor, decides: torch.Tensor) -> Verdict:
    """Follow the drawn tokens down the tree from the last real row.

    drawn_RK: token drawn at each node; nodes_RK: decision row of each node. Emits the tokens drawn along the path.
    """
    rows = drawn_RK.shape[0]
    leaf = torch.full((rows,), -1, dtype=torch.int64, device=drawn_RK.device)
    tokens, sources = [drawn_RK[:, 0]], [nodes_RK[:, 0]]
    path: list[torch.Tensor] = []
    kept = reached = torch.zeros_like(leaf)
    going = decides
    candidates = draft.valid & (draft.roles == CANDIDATE)
    for _ in range(draft.max_depth):
        children = candidates & (draft.parents == leaf[:, None])
        match = children & (draft.tokens == tokens[-1][:, None])
        reached = reached + (going & children.any(1))
        going = going & match.any(1)
        step = match.to(torch.uint8).argmax(1)
        leaf = torch.where(going, step, leaf)
        kept = kept + going
        path.append(step)
        tokens.append(drawn_RK.gather(1, step[:, None] + 1)[:, 0])
        sources.append(nodes_RK.gather(1, step[:, None] + 1)[:, 0])
    return Verdict(
        tokens=torch.stack(tokens, 1),
        counts=torch.where(decides, kept + 1, 0),
        rows=torch.stack(sources, 1),
        path=torch.stack(path, 1) if path else leaf.new_zeros(rows, 0),
        kept=kept,
        leaf=leaf,
        drafted=torch.where(decides, candidates.sum(1), 0),
        accepted=kept,
        reached=reached,
    )
