"""Writes every step as JSON lines, so that a wrong token can be traced by eye.

One line per step and request, written after the commit and before stop rules cut the output:

    step         number of the step, from 1
    request      the request's id
    admitted     true in the step that (re)admits it; `computed.before` is then its prefix hit
    drafter, acceptance, depth
    reason       why the draft has this depth, as in `types.Reason`: {cause, levels, most, least, chances, seconds}
    decides      false while prompt rows remain to be computed: such a step emits nothing
    computed     {before, after}: leading tokens whose KV is committed
    rows         the span's live rows, in order:
                   at        storage index: where in the request's KV the row is written
                   position  position in the text; a draft row's is its parent's plus one
                   role      real, candidate (a guess to be checked) or probe (a mask token)
                   token, text
                   parent    `at` of the row before it; null for the request's first row
    proposals    the drafted tokens: {position, token, text}
    source       what made the draft, where the drafter chooses between several; null without a draft
    verdict      emitted   tokens that became output: {position, token, text}
                 drafted, accepted, reached
                              tokens drafted, drafted tokens emitted, draft positions checked
                 kept      draft rows whose KV is kept
                 path      `at` of those rows, before they were compacted
    pages        page group -> {committed: ids of the pages that the request holds after the commit,
                 held: how many it held during the step, up to the bound of its draft,
                 pool: {free, cached, held, total}}

`text` is the text of the token, null without a tokenizer.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, TextIO

import torch

from stridelm.batch import CANDIDATE, Draft, ForwardBatch
from stridelm.cache.ledger import Ledger
from stridelm.engine.outcome import Outcome
from stridelm.engine.stats import EngineStats
from stridelm.text.tokenizer import Tokenizer
from stridelm.types import Span, StepPlan

Line = dict[str, Any]


class JsonTracer:
    """A tracer for `Engine.tracer`. Reads the device at every step, which is slow: for debugging."""

    def __init__(self, ledger: Ledger, stats: EngineStats, tokenizer: Tokenizer | None, out: TextIO) -> None:
        self._ledger = ledger
        self._stats = stats
        self._tokenizer = tokenizer
        self._out = out

    def __call__(self, plan: StepPlan, draft: Draft, batch: ForwardBatch, outcome: Outcome) -> None:
        pools = self._ledger.counts()
        admitted = {request.id for request in plan.admitted}
        first = 0
        for i, span in enumerate(plan.spans):
            rows = self._rows(i, first, draft, batch)
            first += batch.row_counts[i]
            line = self._head(span, span.request.id in admitted, span.start)
            line["reason"] = asdict(plan.reasons[i])
            line["rows"] = rows
            line["proposals"] = _proposals(rows)
            line["source"] = _source(span, outcome.sources[i]) if outcome.drafted[i] else None
            line["verdict"] = self._verdict(i, rows, batch, outcome)
            line["pages"] = self._pages(span, span.start, pools)
            self._out.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._out.flush()

    def _head(self, span: Span, admitted: bool, before: int) -> Line:
        request = span.request
        return {
            "step": self._stats.steps + 1,
            "request": request.id,
            "admitted": admitted,
            "drafter": request.speculation.drafter,
            "acceptance": request.speculation.acceptance,
            "depth": span.depth,
            "decides": span.decides,
            "computed": {"before": before, "after": request.computed},
        }

    def _rows(self, index: int, first: int, draft: Draft, batch: ForwardBatch) -> list[Line]:
        """The span's rows, which begin at row `first` of the batch. Draft rows that are not valid are left out."""
        span = batch.spans[index]
        here = slice(first, first + batch.row_counts[index])
        base = span.start + int(batch.reals[index])
        rows = []
        columns = torch.stack((batch.ids[here], batch.positions[here], batch.geometry.draft_rows[here]), 1)
        for offset, (token, position, own) in enumerate(columns.tolist()):
            if own < 0:
                at = span.start + offset
                role, parent = "real", at - 1 if at else None
            elif own < draft.width and draft.valid[index, own]:
                at, parent = base + own, base + int(draft.parents[index, own])
                role = "candidate" if draft.roles[index, own] == CANDIDATE else "probe"
            else:
                continue
            row = {"at": at, "position": position, "role": role, **self._token(token), "parent": parent}
            rows.append(row)
        return rows

    def _verdict(self, index: int, rows: list[Line], batch: ForwardBatch, outcome: Outcome) -> Line:
        base = batch.spans[index].start + int(batch.reals[index])
        tokens, kept = outcome.tokens[index], outcome.kept[index]
        return {
            "emitted": [{"position": base + n, **self._token(token)} for n, token in enumerate(tokens)],
            "drafted": outcome.drafted[index],
            "accepted": outcome.accepted[index],
            "reached": outcome.reached[index],
            "kept": kept,
            "path": _path(rows, base - 1, tokens[:kept]),
        }

    def _pages(self, span: Span, before: int, pools: dict[str, dict[str, int]]) -> Line:
        """Page groups after the commit; what the span held during the step follows from its bound."""
        ledger, request = self._ledger, span.request
        held = ledger.pages_for(before + span.rows)
        return {
            group: {"committed": list(ledger.table(request, group)), "held": held, "pool": pools[group]}
            for group in pools
        }

    def _token(self, token: int) -> Line:
        return {"token": token, "text": None if self._tokenizer is None else self._tokenizer.token_text(token)}


def _source(span: Span, number: int) -> str | None:
    sources = span.request.sources
    return sources[number] if len(sources) > number else span.request.speculation.drafter


def _proposals(rows: list[Line]) -> list[Line]:
    guessed = [row for row in rows if row["role"] == "candidate"]
    return [{key: row[key] for key in ("position", "token", "text")} for row in guessed]


def _path(rows: list[Line], root: int, tokens: list[int]) -> list[int]:
    """Storage indices of the candidates that hold `tokens`, each a child of the one before, from `root` on.

    Siblings hold different tokens, so there is exactly one such path.
    """
    path: list[int] = []
    for token in tokens:
        parent = path[-1] if path else root
        path += [
            row["at"]
            for row in rows
            if row["role"] == "candidate" and row["parent"] == parent and row["token"] == token
        ]
    return path
