"""The default rule: a candidate is accepted when it equals the token that its parent row draws.

The draw at a row depends on that row's processed logits, the request's seed and the position alone (design of the
noise in sample/noise.py), so the output is what plain decoding gives, whatever was drafted. "Drafter-invariant
speculative decoding", arXiv 2408.07978. An empty draft is plain decoding.
"""

from __future__ import annotations

import numpy as np
import torch

from stridelm.sample.processors import Rows
from stridelm.types import CANDIDATE, Draft, Verdict
from stridelm.upload import upload
from stridelm.verify.rule import Hearing, Rule


class Exact(Rule):
    name = "exact"
    lossless = True
    coupled = True

    def decide(self, hearing: Hearing) -> Verdict:
        return walk_and_append(hearing, hearing.draft, draw_nodes(hearing))


def walk_and_append(hearing: Hearing, draft: Draft, drawn_RK: torch.Tensor) -> Verdict:
    """Follow the tokens drawn at each node down the draft, and append what is emitted to the token table."""
    nodes, decides, slots, table = hearing.nodes, hearing.decides, hearing.slots, hearing.table
    if drawn_RK.is_cuda:
        from stridelm.kernels.walk import walk as walk_on_gpu

        return walk_on_gpu(draft, drawn_RK, nodes, decides, slots, table.tokens, table.known)
    verdict = walk(draft, drawn_RK, nodes, decides)
    table.append(slots, verdict.tokens, verdict.counts)
    return verdict


def draw_nodes(hearing: Hearing) -> torch.Tensor:
    """[R, K] the token drawn at the last real row and at each live candidate; anything at probes and padding."""
    batch, draft = hearing.batch, hearing.draft
    # Counts alone would not do: other rules' spans may have as many decision rows as this one has spans.
    one_each = not draft.width and len(batch.decision_host) == len(batch.spans)
    if hearing.whole and (one_each or batch.grid):
        return _draw_all(hearing)
    rows_host, spans_host = _drawn_rows(hearing)
    device = hearing.nodes.device
    rows, spans = upload(rows_host, device), upload(spans_host, device)
    everything = len(rows_host) == len(batch.decision_host)
    logits = hearing.logits_MV if everything else hearing.logits_MV.index_select(0, rows)
    extra = _extra(hearing, spans, batch.decision_draft[rows])
    positions = batch.positions[batch.decisions[rows]] + 1
    slots = [hearing.spans[i].request.slot for i in spans_host.tolist()]
    tokens = hearing.sampler.draw(logits, Rows(hearing.slots[spans], positions, extra, hearing.longest), slots)
    everywhere = hearing.nodes.new_full((len(batch.decision_host) + 1,), -1)
    everywhere.index_copy_(0, rows, tokens)
    return everywhere[hearing.nodes]


def _draw_all(hearing: Hearing) -> torch.Tensor:
    """Every decision row of the step drawn at once, nothing looked up on the host: probes too, whose tokens nobody
    reads."""
    batch, columns = hearing.batch, hearing.nodes.shape[1]
    positions = batch.positions[batch.decisions] + 1
    slots = [span.request.slot for span in hearing.spans for _ in range(columns)]
    owners = hearing.slots if columns == 1 else hearing.slots.repeat_interleave(columns)
    rows = Rows(owners, positions, _extra(hearing, batch.decision_span, batch.decision_draft), hearing.longest)
    return hearing.sampler.draw(hearing.logits_MV, rows, slots).view(-1, columns)


def _extra(hearing: Hearing, spans: torch.Tensor, own: torch.Tensor) -> torch.Tensor | None:
    """`candidate_history`, where any request's processors look at it."""
    if not hearing.draft.max_depth or not hearing.uses_history:
        return None
    return candidate_history(hearing.draft, spans, own)


def _drawn_rows(hearing: Hearing) -> tuple[np.ndarray, np.ndarray]:
    """(decision rows to draw at [m], the hearing's span of each [m]), known on the host."""
    span, row = hearing.batch.decision_host.T
    mine = np.full(len(hearing.batch.spans), -1, dtype=np.int64)
    mine[hearing.places] = np.arange(len(hearing.places))
    local = mine[span]
    drawn = row < 0
    if hearing.draft.width:
        drawn = drawn | hearing.draft.candidates[local, np.maximum(row, 0)]
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
    candidates = draft.live & (draft.roles == CANDIDATE)
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
