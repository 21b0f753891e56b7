"""Drafters whose layers follow the target: they read its hidden states and keep KV of their own in the same pages.

An entry of a head's KV at storage index i is computed from the target's hidden state at position i and token i + 1, and
its output guesses token i + 2. So for a request with n known tokens, entries 0 .. n - 2 can be computed, and the last
of them gives the first guess:

    token        0   1   2  ...  n-2   n-1 | g0     g1
    state        0   1   2  ...  n-2       |
    entry        0   1   2  ...  n-2       | n-1    n
    guesses      2   3   4  ...  n = g0    | n+1 = g1

A head catches up when a step is observed: the step's hidden states are available then, and every row that is kept has
its next token. The last entry's output gives the first guess, so catching up is the first forward pass of a chain and
not an extra one. Guesses get entries too, after those of known tokens; the next catch-up overwrites them. While nothing
is drafted what a row's features are made of is kept instead (tail.py), and one pass makes the entries of several.

A head is one module applied repeatedly, or several applied in turn: module k computes its entry i from module k - 1's
output there and token i + k. Its entries end k - 1 tokens earlier; those computed from guesses are computed again when
the tokens are known, for which the same is kept of the last rows.

Legend: R requests of the group, N rows of a catch-up, H hidden width, S slots, T modules.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from stridelm.batch import Draft, ForwardBatch, Verdict
from stridelm.draft.base import Group, TargetInfo
from stridelm.draft.expand import Branching, Sprout
from stridelm.draft.guess import Chain, Guessing, Shape, branching_rows, chain_depth, scores_of, shape_of
from stridelm.draft.head_weights import HeadWeights
from stridelm.draft.tail import Tail
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.run.heads import (
    HeadRows,
    HeadRunner,
    LastRows,
    TargetRuntime,
    head_layout,
    last_of,
    none_of,
    place,
    place_nodes,
)
from stridelm.run.state import Tables
from stridelm.sample.sampler import Sampler
from stridelm.types import DraftKV, Follow, Request, Span


class HeadDrafter(HeadWeights):
    """Base of drafters with such a head; subclasses load it."""

    keeps_kv: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    default_depth = 3

    def __init__(self, target: TargetInfo, sampler: Sampler, runtime: TargetRuntime | None = None) -> None:
        super().__init__(target, sampler, runtime)
        assert runtime is not None
        self.runtime = runtime
        self.head = self.load(self._on_meta(target, runtime.model), runtime)
        self._runner = HeadRunner(self.head, runtime)
        runtime.runner.tap(self.head.taps)
        self.head.spec.prepare(self.head.ops, runtime.dtype)
        slots, width = target.max_num_seqs + 1, self.head.spec.hidden_size
        num_modules = self.head.num_modules
        self._hidden = torch.zeros(slots, max(1, num_modules - 1), width, dtype=runtime.dtype, device=target.device)
        """[S, max(1, T - 1), H] each module's output at its newest entry; with T > 1 without the last module's."""
        self._ready = torch.zeros(slots, dtype=torch.bool, device=target.device)
        """[S] whether `_hidden` is set."""
        self._tail = Tail(slots, num_modules - 1, runtime.patience, self.head.taken_width, runtime.dtype, target.device)

    @property
    def reads_every_row(self) -> bool:
        return True

    @property
    def draft_kv(self) -> DraftKV:
        return DraftKV(self.name, self.head.num_modules, may_wait=True)

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        depth, num_modules = self.depth_of(speculation), self.head.num_modules
        if num_modules > 1 and depth > num_modules:
            raise ValueError(f"depth {depth} is over {num_modules}, the modules that the checkpoint has; lower it")
        rows = branching_rows(speculation, depth)
        if num_modules > 1 and Branching.of(speculation, depth) != Branching():
            raise ValueError("modules that are applied in turn draft only chains; leave draft_topk and token_tree out")
        return rows

    def kind(self, span: Span) -> Shape:
        return shape_of(span)

    def admit(self, request: Request) -> None:
        self._ready[request.slot].fill_(False)
        self._tail.clear(request.slot)

    # Drafting

    def propose(self, group: Group) -> Draft:
        kind = self.kind(group.spans[0])
        return self._tree(group, *kind) if isinstance(kind, tuple) else self._chain(group)

    def _tree(self, group: Group, branching: Branching, depth: int, guessing: Guessing) -> Draft:
        slots = group.slots
        hidden_RH, ready, known_LR = self._recall(group, 0, 1)
        known = known_LR[0]
        max_end = max(span.end for span in group.spans)
        scores = scores_of(group, self.sampler, self.head.logits, guessing)

        def grow(sprout: Sprout) -> torch.Tensor:
            nodes = sprout.tokens.shape[1]
            layout, base = head_layout((nodes,) * len(known), group.arena), (known - 1).clamp(min=0)
            rows = place_nodes(
                layout, slots, base, sprout.first, sprout.level, sprout.ancestors, self.runtime, max_end
            ).only(ready.repeat_interleave(nodes))
            hidden_NH = sprout.hidden_REH.flatten(0, 1)
            out = self.head.forward(0, sprout.tokens.flatten(), hidden_NH, rows.position_N, self._runner.mix(rows))
            return out.view_as(sprout.hidden_REH)

        return branching.grow(hidden_RH, depth, scores, grow, ready, group.arena)

    def _chain(self, group: Group) -> Draft:
        depth, back = chain_depth(group), self.head.num_modules
        hidden_RI, ready, place_LR = self._recall(group, -back, back + depth)
        hidden_RTH = hidden_RI.view(len(hidden_RI), *self._hidden.shape[1:])
        guesses = Chain(group, self.sampler, place_LR[back:])
        tables = self.runtime.tables.of(group.slots)
        last, states = hidden_RTH[:, 0], hidden_RTH[:, :0]
        for level in range(depth):
            if level and self.head.num_modules == 1:
                starts = place_LR[level - 1]  # one entry, behind those of the last known token and the guesses before
                last = self._grow(group, 0, starts, guesses.tokens[-1], last[:, None], ready, tables)[:, -1]
            elif level:
                # Module `level` reads module `level` - 1's outputs: that of its newest known entry, then of guesses.
                states = torch.cat((hidden_RTH[:, level - 1 : level], states), 1)
                ids_N = torch.stack(guesses.tokens, 1).flatten()
                states = self._grow(group, level, place_LR[back - 1 - level], ids_N, states, ready, tables)
                last = states[:, -1]
            guesses.draw(self.head.logits(last, min(level, self.head.num_modules - 1)))
        return guesses.draft(ready)

    def _recall(self, group: Group, first: int, levels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.runtime.ops.recall(
            self._hidden.flatten(1), self._ready, group.table.known, group.slots, first, levels
        )

    def _grow(
        self,
        group: Group,
        module: int,
        starts: torch.Tensor,
        ids_N: torch.Tensor,
        hidden_REH: torch.Tensor,
        ready: torch.Tensor,
        tables: Tables,
    ) -> torch.Tensor:
        """[R, E, H] a module's outputs for the E newest guesses, whose entries begin at storage index `starts` [R]. A
        request that is not ready has not caught up since it was admitted: what is stored there is another request's.
        tables: of these requests."""
        requests, entries, width = hidden_REH.shape
        # All requests run to the same depth: after its own rows a request has null pages.
        max_end = max(span.start + span.real for span in group.spans) + max(span.draft for span in group.spans)
        rows = place(
            head_layout((entries,) * requests, group.arena),
            group.slots,
            starts,
            None,
            self.runtime,
            max_end,
            ready,
            tables=tables,
        )
        hidden_NH = hidden_REH.reshape(-1, width)
        return self.head.forward(module, ids_N, hidden_NH, rows.position_N, self._runner.mix(rows)).view_as(hidden_REH)

    # Following

    def observe(self, group: Group, batch: ForwardBatch, logits: Logits, verdict: Verdict) -> None:
        if group.spans[0].follow is Follow.LATER:
            # What is taken of all real rows is kept: of most requests there is one.
            where = self._ready, group.slots, batch.geometry.firsts, batch.reals, group.indices
            self.runtime.ops.set_aside(*self._tail.all, *where, self.head.read(logits.states))
            return
        ops, table = self.runtime.ops, group.table
        bounds = tuple(self._tail.again + span.behind + span.real + min(span.draft, span.depth) for span in group.spans)
        tail_rows, counts, starts, ends = ops.behind(
            group.slots, group.indices, batch.reals, verdict.kept, self._tail.all[1], table.committed
        )
        max_end, tables = max(span.end for span in group.spans), self.runtime.tables.of(group.slots)
        rows = place(
            head_layout(bounds, group.arena), group.slots, starts, counts, self.runtime, max_end, tables=tables
        )
        taken_NW = ops.side_by_side(
            self.head.read(logits.states), self._sources(group, batch, verdict, rows, tail_rows)
        )
        if self._tail.again or any(span.behind for span in group.spans):
            taken_NW = self._tail.first(group.slots, rows, taken_NW)
            self._tail.keep(group.slots, rows, taken_NW, counts)
        # The last module's output at a row is not read by another module: only its KV entries are needed, and with one
        # module its output at the row that the next draft grows from.
        features_NH, back = self.head.features(taken_NW), self.head.num_modules - 1
        if group.spans[0].follow is Follow.ENTRIES:
            self._catch_up(group, rows, none_of(rows), features_NH)
            self._ready.index_fill_(0, group.slots, False)
            return
        last_rows = last_of(rows, back, group.slots, ends, self.runtime, max_end, tables)
        newest_RW = self._catch_up(group, rows, last_rows, features_NH)
        # Each module's newest entry lies one row before that of the module before it: a draft needs that many rows.
        ops.keep_newest(
            self._hidden.flatten(1), self._ready, group.slots, newest_RW, batch.decides, group.indices, counts, back
        )

    def _sources(
        self, group: Group, batch: ForwardBatch, verdict: Verdict, rows: HeadRows, tail_rows: torch.Tensor
    ) -> torch.Tensor:
        """[N] the row of the step that each row of the catch-up corresponds to."""
        return self.runtime.ops.sources(
            group.indices,
            rows.span_N,
            rows.offset_N,
            tail_rows,
            batch.geometry.firsts,
            batch.reals,
            verdict.path,
            batch.decision_index,
            batch.decisions,
            batch.ids.shape[0],
        )

    def _catch_up(self, group: Group, rows: HeadRows, last_rows: LastRows, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Compute every module's entries, as far as tokens are known. Returns [R, max(1, T - 1) H] the output at the
        newest entry of each."""
        table, head = group.table, self.head
        outputs = []
        for module in range(head.num_modules):
            within = rows
            if module:
                known_N = table.known[group.slots[rows.span_N]]
                within = rows.only(rows.position_N + module + 1 < known_N)
            ids_N = self.runtime.ops.next_tokens(table.tokens, group.slots, rows.span_N, rows.position_N, module + 1)
            if module == head.num_modules - 1:
                mix = self._runner.mix(within, last_rows)
                wanted = None if last_rows.geometry is None else last_rows.rows_R
                out = head.forward(module, ids_N, hidden_NH, rows.position_N, mix, wanted)
                outputs.append(out[last_rows.rows_R] if wanted is None else out)
            else:
                hidden_NH = head.forward(module, ids_N, hidden_NH, rows.position_N, self._runner.mix(within))
                outputs.append(hidden_NH[(rows.last_R - module).clamp(min=0)])
        kept = outputs[: self._hidden.shape[1]]
        return kept[0] if len(kept) == 1 else torch.cat(kept, 1)
