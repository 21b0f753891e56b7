"""Plan and draft as one ragged batch, compared with the definition row by row."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stridelm.attention.host_view import HostView
from stridelm.batch import CANDIDATE, PROBE, Draft, ForwardBatch, Verdict
from stridelm.cache.ledger import Ledger
from stridelm.draft.base import TreeShape
from stridelm.kernels.plain_step import append
from stridelm.params import SamplingParams, Speculation
from stridelm.run.batch import build, row_layout, shape_of
from stridelm.run.live_rows import without_padding
from stridelm.run.state import PageTables, TokenTable
from stridelm.types import Request, Span
from support.oracles.attention import random_tree

CPU = torch.device("cpu")
GROUPS = ("main", "other")


class World:
    """A few requests at various stages, and a step over them."""

    def __init__(self, seed: int, page_size: int, draft_rows: int) -> None:
        rng = random.Random(seed)
        count = rng.randint(1, 6)
        self.ledger = Ledger({"main": 300, "other": 310}, page_size)
        self.table = TokenTable(count + 2, 100, CPU)
        self.spans = []
        for slot in range(count):
            prompt = [rng.randrange(50) for _ in range(rng.randint(1, 30))]
            params = SamplingParams(prompt_logprobs=rng.choice((None, 1)))
            request = Request(f"{seed}-{slot}", prompt, params, Speculation(), slot=slot)
            request.output_ids = [rng.randrange(50) for _ in range(rng.randrange(5))]
            self.ledger.admit(request)
            done = rng.randrange(request.known)
            self.table.admit(slot, request.token_ids, done)
            if done:
                with self.ledger.reserve([Span(request, 0, done)]) as transaction:
                    transaction.commit([0])
            real = rng.randint(1, request.known - done)
            decides = done + real == request.known
            self.spans.append(
                Span(request, done, real, draft=rng.randint(0, draft_rows) if decides else 0, decides=decides)
            )
        self.slots = torch.tensor([span.request.slot for span in self.spans])
        self.draft = _draft(rng, self.spans)
        self.transaction = self.ledger.reserve(self.spans)
        self.batch = self._build(page_size)
        self.page_size = page_size

    def _build(self, page_size: int) -> ForwardBatch:
        spans, reach = tuple(self.spans), max(span.end for span in self.spans)
        pages = PageTables(GROUPS, len(spans) + 2, 200, CPU)
        pages.update(spans, self.transaction)
        layout = row_layout(shape_of(spans), self.draft.width, CPU)
        return without_padding(build(spans, layout, self.draft, self.table, pages, self.slots, page_size, reach))

    def rows(self) -> list[dict[str, Any]]:
        """The expected content of each row."""
        out = []
        for index, span in enumerate(self.spans):
            request, base = span.request, span.request.computed + span.real
            for offset in range(span.real):
                at = request.computed + offset
                out.append({"span": index, "draft": -1, "id": request.token_ids[at], "position": at, "storage": at})
            for row in range(span.draft):
                if self.draft.valid[index, row]:
                    depth = int(self.draft.depths[index, row])
                    token = int(self.draft.tokens[index, row])
                    out.append(
                        {"span": index, "draft": row, "id": token, "position": base - 1 + depth, "storage": base + row}
                    )
        return out


def _draft(rng: random.Random, spans: list[Span]) -> Draft:
    width = max(span.draft for span in spans)
    shapes, valid = [], []
    for span in spans:
        parents = random_tree(rng, width)
        shapes.append(TreeShape.of(parents, [rng.choice((CANDIDATE, CANDIDATE, PROBE)) for _ in parents], CPU))
        alive: list[bool] = []
        for row, parent in enumerate(parents):
            alive.append(row < span.draft and rng.random() < 0.9 and (parent < 0 or alive[parent]))
        valid.append(alive)
    tokens = torch.tensor([[rng.randrange(50) for _ in range(width)] for _ in spans], dtype=torch.int64)
    draft = shapes[0].draft(tokens, torch.tensor(valid, dtype=torch.bool).view(len(spans), width))
    for name in ("parents", "roles", "depths", "ancestors"):
        setattr(draft, name, torch.stack([getattr(shape, name) for shape in shapes]))
    import numpy as np

    draft.candidates = np.stack([shape.candidates for shape in shapes])
    draft.is_chain = all(shape.is_chain for shape in shapes)
    draft.max_depth = max(shape.max_depth for shape in shapes)
    return draft


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("draft_rows", [0, 5, 64])
def test_rows(page_size: int, draft_rows: int) -> None:
    """Ids, positions, slots and ancestry of every row; which rows decide; which rows score the prompt."""
    for seed in range(12):
        world = World(seed, page_size, draft_rows)
        batch, rows = world.batch, world.rows()
        assert batch.ids.tolist() == [row["id"] for row in rows]
        assert batch.positions.tolist() == [row["position"] for row in rows]
        assert batch.geometry.draft_rows.clamp(min=-1).tolist() == [row["draft"] for row in rows]
        for group in GROUPS:
            tables = [lease.tables[group] for lease in world.transaction.leases]
            slots = [
                tables[row["span"]][row["storage"] // page_size] * page_size + row["storage"] % page_size
                for row in rows
            ]
            assert batch.slots[group].tolist() == slots and len(set(slots)) == len(slots)
        _check_ancestry(world, rows)
        _check_decisions(world, rows)


def _check_ancestry(world: World, rows: list[dict[str, Any]]) -> None:
    geometry, draft = world.batch.geometry, world.draft
    masks = [int(draft.ancestors[r["span"], r["draft"]]) if r["draft"] >= 0 else 0 for r in rows]
    assert geometry.ancestors.tolist() == masks
    moved = [row["draft"] >= 0 and mask % 2**64 != (2 << row["draft"]) - 1 for row, mask in zip(rows, masks)]
    assert HostView.of(geometry).ordered.tolist() == ([False] * len(rows) if geometry.is_chain else moved)
    assert [rows.index(row) for row in _firsts(rows)] == geometry.firsts.tolist()


def _firsts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [next(row for row in rows if row["span"] == span) for span in sorted({row["span"] for row in rows})]


def _check_decisions(world: World, rows: list[dict[str, Any]]) -> None:
    batch = world.batch
    last = {i: s.request.computed + s.real - 1 for i, s in enumerate(world.spans) if s.decides}
    wanted = [n for n, r in enumerate(rows) if r["draft"] >= 0 or last.get(r["span"]) == r["storage"]]
    assert batch.decisions.tolist() == wanted
    assert batch.decision_host.tolist() == [[rows[n]["span"], rows[n]["draft"]] for n in wanted]
    assert batch.decision_span.tolist() == [rows[n]["span"] for n in wanted]
    assert batch.decision_draft.tolist() == [rows[n]["draft"] for n in wanted]
    for place, n in enumerate(wanted):
        assert int(batch.decision_index[rows[n]["span"], rows[n]["draft"] + 1]) == place
    assert int((batch.decision_index >= 0).sum()) == len(wanted)
    scored = [
        n
        for n, row in enumerate(rows)
        if world.spans[row["span"]].request.params.reads_prompt
        and row["draft"] < 0
        and row["storage"] + 1 < len(world.spans[row["span"]].request.prompt_ids)
    ]
    assert scored == ([] if batch.prompt_rows is None else batch.prompt_rows.tolist())


def test_token_table() -> None:
    """Tokens are appended after the known ones, as many as counted; a reused slot forgets its previous request."""
    table = TokenTable(3, 10, CPU)
    table.admit(0, [1, 2, 3])
    table.admit(2, [4])
    append(table.tokens, table.known, torch.tensor([2, 0]), torch.tensor([[7, 8, 9], [5, 6, -1]]), torch.tensor([0, 2]))
    assert table.known.tolist() == [5, 0, 1, 0]  # the last row belongs to no request
    assert table.tokens[0, :5].tolist() == [1, 2, 3, 5, 6]
    append(table.tokens, table.known, torch.tensor([2]), torch.tensor([[7]]), torch.tensor([1]))
    assert table.tokens[2, :2].tolist() == [4, 7]
    table.admit(0, [9])
    assert table.known.tolist() == [1, 0, 2, 0]
    none = torch.zeros(2, dtype=torch.int64)
    verdict = Verdict(none[:, None], none, none[:, None], none[:, None], torch.tensor([2, 1]), none, none, none, none)
    table.commit(torch.tensor([-1, 2]), verdict, torch.ones_like(none), None)
    assert table.committed.tolist() == [0, 0, 2, 0]
