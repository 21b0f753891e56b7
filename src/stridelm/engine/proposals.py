"""Drafts as inputs and outputs of graphs: the host's proposals go into one, a graph's proposals come out.

Even in a step that is not captured whole, because it has prompt rows or several drafters, the drafters' own layers are
captured: they are many small launches, for which the host would need longer than the device.
"""

from __future__ import annotations

import numpy as np
import torch

from stridelm.batch import Draft
from stridelm.engine.device_step import DeviceStep
from stridelm.engine.kinds import Inputs, Kind
from stridelm.engine.ways import Ways
from stridelm.run.graphs import GraphPool
from stridelm.sample.table import SamplingTable
from stridelm.types import Span


def packed(draft: Draft, valid: torch.Tensor) -> torch.Tensor:
    """[6, R, W] int64: all device tensors of a draft except probabilities."""
    skeleton = (draft.tokens, draft.parents, draft.roles, draft.depths, draft.ancestors)
    return torch.stack((*skeleton, valid.to(torch.int64)))


def unpacked(rows: torch.Tensor, candidates: np.ndarray, is_chain: bool, max_depth: int) -> Draft:
    tokens, parents, roles, depths, ancestors, valid = rows.unbind(0)
    return Draft(tokens, parents, roles, depths, ancestors, valid.bool(), candidates, is_chain, max_depth)


class FromHost:
    """The host's proposals, where a captured step reads them."""

    def __init__(self, kind: Kind, device: torch.device) -> None:
        assert kind.is_chain is not None
        self._is_chain = kind.is_chain
        self._rows = torch.zeros(6, kind.requests, kind.draft, dtype=torch.int64, device=device)
        """As made by `packed`."""
        self._candidates = np.ones((kind.requests, kind.draft), dtype=bool)

    def draft(self) -> Draft:
        return unpacked(self._rows, self._candidates, self._is_chain, max_depth=self._rows.shape[2])

    def fill(self, draft: Draft) -> None:
        self._rows.zero_()  # a row of an earlier, wider draft would name ancestors that this one does not have
        self._rows[:, : len(draft.tokens), : draft.width] = packed(draft, draft.valid)


class Proposing:
    """One drafter's captured `propose`, for steps that are not captured whole. Drafts with probabilities are excluded,
    since those are too large to keep a copy of."""

    def __init__(self, device: DeviceStep, sampling: SamplingTable, kind: Kind, ways: Ways, pool: GraphPool) -> None:
        """kind: of one way."""
        where = device.device
        self._inputs = inputs = Inputs(kind.requests, where)
        self._rows = rows = torch.zeros(6, kind.requests, kind.draft, dtype=torch.int64, device=where)
        """As made by `packed`; outside the memory that graphs share, since another runs before the draft is
        verified."""
        self._source = torch.zeros(kind.requests, dtype=torch.int64, device=where)
        spans = kind.stand_ins(ways.likes[0], device.reach, kind.ways[0])

        def body() -> Draft:
            with sampling.assuming(kind.features):
                draft = device.drafters.propose(spans, inputs.slots, bounds=inputs.drafts)
            rows.copy_(packed(draft, inputs.within(draft)))
            if draft.source is not None:
                self._source.copy_(draft.source)
            return draft

        self._graph: torch.cuda.CUDAGraph | None = None
        captured = pool.capture(body, rows.nbytes)
        if captured is not None:
            self._graph, draft = captured
            assert draft.probs is None
            self._facts = (draft.candidates, draft.is_chain, draft.max_depth)
            self._has_sources = draft.source is not None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def replay(self, spans: tuple[Span, ...], ways: Ways) -> Draft:
        assert self._graph is not None
        self._inputs.fill(spans, ways.numbers)
        self._graph.replay()
        candidates, is_chain, max_depth = self._facts
        # Clone at the captured size before slicing: so each tensor starts at an aligned address, for which the kernels
        # are already compiled.
        rows = self._rows.clone()[:, : len(spans)]
        draft = unpacked(rows, candidates[: len(spans)], is_chain, max_depth)
        if self._has_sources:
            draft.source = self._source.clone()[: len(spans)]
        return draft
