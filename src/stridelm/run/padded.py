"""Plan and draft become one batch without the host knowing how long the requests are.

The rows are laid out by the plan's bounds. How many of a span's rows are real, where they start and which draft rows
live is found on the device from the token table, so a step can be built while the verdict of the one before it is
still on its way. Rows beyond what a span turns out to have are padding: they write to the null slot and nobody reads
them.

Legend: R spans, N rows, W draft width, K = W + 1 nodes of a span, M = R K decision rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from stridelm.run.state import PageTables, TokenTable
from stridelm.types import DeviceGeometry, Draft, ForwardBatch, Span


@dataclass(frozen=True, eq=False)
class Frame:
    """The layout of a step's rows: a function of the bounds alone, so it is the same in every replay of a step."""

    bounds: tuple[int, ...]
    """Most rows of each span."""
    span_N: torch.Tensor
    offset_N: torch.Tensor
    firsts_R: torch.Tensor
    reals_R: torch.Tensor
    """Most real rows."""
    drafts_R: torch.Tensor
    """Most draft rows."""
    decides_R: torch.Tensor
    """bool."""
    node_M: torch.Tensor
    """Node of each decision row: 0 the last real row, j + 1 draft row j."""
    span_M: torch.Tensor
    host_M2: np.ndarray
    """Span and draft row of each decision row."""


@lru_cache(maxsize=256)
def frame(shape: tuple[tuple[int, int, bool], ...], width: int, device: torch.device) -> Frame:
    """shape: (most real rows, most draft rows, decides) of each span."""
    reals, drafts, decides = (np.array(column) for column in zip(*shape, strict=True))
    bounds = reals + drafts
    firsts = np.cumsum(bounds) - bounds
    span = np.repeat(np.arange(len(shape)), bounds)
    nodes = np.tile(np.arange(width + 1), len(shape))
    span_of_node = np.repeat(np.arange(len(shape)), width + 1)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return Frame(
        bounds=tuple(bounds.tolist()),
        span_N=tensor(span),
        offset_N=tensor(np.arange(len(span)) - firsts[span]),
        firsts_R=tensor(firsts),
        reals_R=tensor(reals),
        drafts_R=tensor(drafts),
        decides_R=tensor(decides.astype(bool)),
        node_M=tensor(nodes),
        span_M=tensor(span_of_node),
        host_M2=np.stack((span_of_node, nodes - 1), 1),
    )


def shape_of(spans: tuple[Span, ...]) -> tuple[tuple[int, int, bool], ...]:
    return tuple((span.real, span.draft, span.decides) for span in spans)


def build_on_bounds(
    spans: tuple[Span, ...],
    layout: Frame,
    draft: Draft,
    table: TokenTable,
    pages: PageTables,
    request_slots: torch.Tensor,
    page_size: int,
    max_keys: int,
) -> ForwardBatch:
    """The batch of one step. request_slots: [R] rows of the tables, -1 for padding; max_keys: a bound on every
    span's end."""
    start_R = table.computed[request_slots]
    real_R = torch.minimum(table.known[request_slots] - start_R, layout.reals_R)
    base_R = start_R + real_R
    span, width = layout.span_N, draft.width
    own = layout.offset_N - real_R[span]
    storage = start_R[span] + layout.offset_N
    owner = request_slots[span]
    ids, positions = table.tokens[owner, storage], storage
    alive = own < 0
    ancestors = torch.zeros_like(storage)
    if width:
        place = (span, own.clamp(0, width - 1))
        drafted = (own >= 0) & (own < torch.minimum(layout.drafts_R, torch.full_like(base_R, width))[span])
        live = drafted & draft.live[place]
        ids = torch.where(drafted, draft.tokens[place], ids)
        positions = torch.where(drafted, base_R[span] - 1 + draft.depths[place], storage)
        ancestors = torch.where(live, draft.ancestors[place], ancestors)
        alive = alive | live
    slots = {}
    for group, pages_SP in pages.tables.items():
        slot = pages_SP[owner, storage // page_size].to(torch.int64) * page_size + storage % page_size
        slots[group] = torch.where(alive, slot, 0)
    node, of = layout.node_M, layout.span_M
    rows_M = (layout.firsts_R + real_R)[of] - 1 + node
    valid = layout.decides_R[of] & (node <= layout.drafts_R[of])
    if width:
        valid &= (node == 0) | draft.live[of, (node - 1).clamp(min=0)]
    index = torch.where(valid, torch.arange(len(node), device=node.device), -1).view(-1, width + 1)
    geometry = DeviceGeometry(
        bounds=layout.bounds,
        firsts=layout.firsts_R.to(torch.int32),
        counts=(real_R + layout.drafts_R).to(torch.int32),
        starts=start_R.to(torch.int32),
        reals=real_R.to(torch.int32),
        draft_rows=own,
        ancestors=ancestors,
        positions=positions,
        tables={group: pages_SP[request_slots] for group, pages_SP in pages.tables.items()},
        page_size=page_size,
        max_keys=max_keys,
        straight=draft.straight,
    )
    return ForwardBatch(
        ids=ids,
        positions=positions,
        slots=slots,
        geometry=geometry,
        spans=spans,
        request_slots=request_slots,
        decisions=rows_M.clamp(0, len(span) - 1),
        decision_span=of,
        decision_draft=node - 1,
        decision_index=index,
        decision_host=layout.host_M2,
        reals=real_R,
        decides=layout.decides_R,
        grid=True,
        prompt_rows=_prompt_rows(spans, layout.bounds, request_slots.device),
    )


def _prompt_rows(spans: tuple[Span, ...], bounds: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    """Where prompts are scored. A prompt's spans are exact: nothing of them depends on what is in flight."""
    if not any(span.request.params.prompt_logprobs is not None for span in spans):
        return None
    rows: list[int] = []
    first = 0
    for span, bound in zip(spans, bounds, strict=True):
        if span.request.params.prompt_logprobs is not None:
            scored = min(span.real, len(span.request.prompt_ids) - 1 - span.start)
            rows += range(first, first + max(0, scored))
        first += bound
    return torch.tensor(rows, dtype=torch.int64, device=device)
