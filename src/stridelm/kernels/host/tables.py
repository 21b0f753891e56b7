"""A step's look-ups in the tables of running requests on a CPU: laying rows out, prompt lookup, and walking down a
draft. Each is a few numbers per request, for which torch would make up to thirty calls.

Legend: as in kernels/step_ops.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from stridelm.batch import CANDIDATE, Draft, Verdict
from stridelm.compiled import njit
from stridelm.kernels.host.memory import array, arrays, copied
from stridelm.kernels.plain_step import PlainStepOps


class HostTables(PlainStepOps):
    def lay_out(
        self,
        slots_R: torch.Tensor,
        known_S: torch.Tensor,
        committed_S: torch.Tensor,
        tokens_SL: torch.Tensor,
        pages_SP: torch.Tensor,
        firsts_R: torch.Tensor,
        reals_R: torch.Tensor,
        drafts_R: torch.Tensor,
        decides_R: torch.Tensor,
        span_N: torch.Tensor,
        offset_N: torch.Tensor,
        draft: Draft,
        longest: int,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tables = (slots_R, known_S, committed_S, tokens_SL, pages_SP)
        layout = (firsts_R, reals_R, drafts_R, decides_R, span_N, offset_N)
        drafted = (draft.tokens, draft.depths, draft.ancestors, draft.valid)
        laid, about, nodes = _lay_out(*arrays(*tables, *layout, *drafted), page_size)
        return torch.from_numpy(laid), torch.from_numpy(about), torch.from_numpy(nodes)

    @staticmethod
    def place_live(
        slots_R: torch.Tensor,
        starts_R: torch.Tensor,
        counts_R: torch.Tensor,
        stays_R: torch.Tensor | None,
        tables: dict[str, torch.Tensor],
        page_size: int,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        stays = _ALL if stays_R is None else array(stays_R)
        of_rows, groups = (*arrays(slots_R, starts_R, counts_R), stays), iter(tables.items())
        group, pages_SP = next(groups)
        laid, slots_N, about, last_R = map(torch.from_numpy, _place_live(*of_rows, array(pages_SP), page_size))
        slots = {group: slots_N}
        for group, pages_SP in groups:  # page groups differ only in their pool slots
            slots[group] = torch.from_numpy(_place_live(*of_rows, array(pages_SP), page_size)[1])
        return laid, slots, about, last_R

    @staticmethod
    def set_aside(
        kept_SPW: torch.Tensor,
        rows_S: torch.Tensor,
        ready_S: torch.Tensor,
        slots_R: torch.Tensor,
        firsts_B: torch.Tensor,
        reals_B: torch.Tensor,
        indices_R: torch.Tensor,
        sources: Sequence[torch.Tensor],
    ) -> None:
        rows, slots, firsts, reals, indices = arrays(rows_S, slots_R, firsts_B, reals_B, indices_R)
        for number, source in enumerate(sources):
            at = number * source.shape[1]
            _copy_rows(copied(kept_SPW), rows, slots, firsts, reals, indices, copied(source), at)
        _note_rows(rows, array(ready_S), slots, reals, indices)

    def sources(
        self,
        indices_R: torch.Tensor,
        span_N: torch.Tensor,
        offset_N: torch.Tensor,
        tailed_R: torch.Tensor,
        firsts_B: torch.Tensor,
        reals_B: torch.Tensor,
        path_BW: torch.Tensor,
        index_BK: torch.Tensor,
        decisions_M: torch.Tensor,
        step_rows: int,
    ) -> torch.Tensor:
        of_rows, of_step = (indices_R, span_N, offset_N, tailed_R), (firsts_B, reals_B, path_BW, index_BK, decisions_M)
        return torch.from_numpy(_sources(*arrays(*of_rows, *of_step), step_rows))

    @staticmethod
    def keep_leaves(
        kept_SW: torch.Tensor,
        ready_S: torch.Tensor,
        slots_R: torch.Tensor,
        indices_R: torch.Tensor,
        leaf_B: torch.Tensor,
        index_BK: torch.Tensor,
        decisions_M: torch.Tensor,
        source_NW: torch.Tensor,
    ) -> None:
        of_step = arrays(slots_R, indices_R, leaf_B, index_BK, decisions_M)
        _keep_leaves(copied(kept_SW), array(ready_S), *of_step, copied(source_NW))

    def commit(
        self,
        lengths_S: torch.Tensor,
        slots_R: torch.Tensor,
        verdict: Verdict,
        reals_R: torch.Tensor,
        sources_R: torch.Tensor | None,
    ) -> torch.Tensor:
        columns = (verdict.counts, verdict.kept, verdict.drafted, verdict.accepted, verdict.reached, reals_R)
        of_step = arrays(lengths_S, slots_R, verdict.tokens, *columns)
        return torch.from_numpy(_commit(*of_step, _NONE if sources_R is None else array(sources_R.contiguous())))

    def followers(
        self,
        slots_R: torch.Tensor,
        known_S: torch.Tensor,
        tokens_SL: torch.Tensor,
        shortest_R: torch.Tensor,
        longest_R: torch.Tensor,
        bounds_R: torch.Tensor,
        reach: int,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tables = arrays(slots_R, known_S, tokens_SL, shortest_R, longest_R, bounds_R)
        guesses, valid, matched = map(torch.from_numpy, _followers(*tables, width))
        return guesses, valid, matched

    def walk(
        self,
        draft: Draft,
        drawn_RK: torch.Tensor,
        nodes_RK: torch.Tensor,
        decides_R: torch.Tensor,
        slots_R: torch.Tensor,
        tokens_SL: torch.Tensor,
        known_S: torch.Tensor,
    ) -> Verdict:
        drafted = (draft.tokens, draft.parents, draft.roles, draft.valid)
        found = _walk(*arrays(*drafted, drawn_RK, nodes_RK, decides_R, slots_R, tokens_SL, known_S))
        return Verdict(*map(torch.from_numpy, found))

    def follow(
        self,
        draft: Draft,
        kept_RW: torch.Tensor,
        drawn_RK: torch.Tensor,
        nodes_RK: torch.Tensor,
        decides_R: torch.Tensor,
        slots_R: torch.Tensor,
        tokens_SL: torch.Tensor,
        known_S: torch.Tensor,
    ) -> Verdict:
        drafted = (draft.tokens, draft.parents, draft.roles, draft.valid, kept_RW)
        found = _follow(*arrays(*drafted, drawn_RK, nodes_RK, decides_R, slots_R, tokens_SL, known_S))
        return Verdict(*map(torch.from_numpy, found))


_ALL = np.empty(0, bool)
"""Of requests that leave entries."""
_NONE = np.empty(0, np.int64)
"""Sources of drafts that all come from the first."""


@cache
def compile_tables() -> None:
    """Run each once for no request."""
    one, two = np.empty(0, np.int64), np.empty((0, 0), np.int64)
    flags, pages = two.astype(bool), two.astype(np.int32)
    _lay_out(one, one, one, two, pages, one, one, one, flags.ravel(), one, one, two, two, two, flags, 1)
    _place_live(one, one, one, _ALL, pages, 1)
    for kind in (np.uint16, np.uint32, np.uint64):
        _copy_rows(np.empty((0, 0, 0), kind), one, one, pages.ravel(), one, one, two.astype(kind), 0)
        _keep_leaves(two.astype(kind), flags.ravel(), one, one, one, two, one, two.astype(kind))
    _note_rows(one, flags.ravel(), one, one, one)
    _sources(one, one, one, one, pages.ravel(), one, two, two, one, 0)
    _commit(one, one, two, one, one, one, one, one, one, one)
    _followers(one, one, two, one, one, one, 1)
    _walk(two, two, two, flags, two, two, flags.ravel(), one, two, one)
    _follow(two, two, two, flags, flags, two, two, flags.ravel(), one, two, one)


@njit(error_model="numpy")
def _lay_out(
    slots_R,
    known_S,
    committed_S,
    tokens_SL,
    pages_SP,
    firsts_R,
    reals_R,
    drafts_R,
    decides_R,
    span_N,
    offset_N,
    drafted_RW,
    depths_RW,
    ancestors_RW,
    valid_RW,
    page_size,
):
    rows, (spans, width) = len(span_N), drafted_RW.shape
    nodes = width + 1
    about, decisions = np.empty((4, spans), np.int32), np.empty((2, spans * nodes), np.int64)
    for i in range(spans):
        start = committed_S[slots_R[i]]
        real = min(known_S[slots_R[i]] - start, reals_R[i])
        about[0, i], about[1, i], about[2, i], about[3, i] = firsts_R[i], real + drafts_R[i], start, real
        for k in range(nodes):
            valid = decides_R[i] and k <= drafts_R[i] and (k == 0 or valid_RW[i, k - 1])
            decisions[0, i * nodes + k] = min(max(firsts_R[i] + real - 1 + k, 0), rows - 1)
            decisions[1, i * nodes + k] = i * nodes + k if valid else -1
    laid = np.zeros((5, rows), np.int64)
    for n in range(rows):
        i = span_N[n]
        slot, start, real = slots_R[i], np.int64(about[2, i]), np.int64(about[3, i])
        storage, own = start + offset_N[n], offset_N[n] - real
        laid[1, n], laid[4, n] = storage, own
        lives = own < 0
        if lives:
            laid[0, n] = tokens_SL[slot, storage]
        elif own < min(drafts_R[i], width):
            laid[0, n] = drafted_RW[i, own]
            laid[1, n] = start + real - 1 + depths_RW[i, own]
            lives = valid_RW[i, own]
            if lives:
                laid[3, n] = ancestors_RW[i, own]
        if lives:
            laid[2, n] = np.int64(pages_SP[slot, storage // page_size]) * page_size + storage % page_size
    return laid, about, decisions


@njit(error_model="numpy")
def _place_live(slots_R, starts_R, counts_R, stays_R, pages_SP, page_size):
    spans, rows = len(slots_R), counts_R.sum()
    laid, pool_slots = np.zeros((5, rows), np.int64), np.zeros(rows, np.int64)
    about, last = np.empty((3, spans), np.int32), np.empty(spans, np.int64)
    n = 0
    for i in range(spans):
        start = max(starts_R[i], 0)
        about[0, i], about[1, i], about[2, i] = n, start, counts_R[i]
        for offset in range(counts_R[i]):
            storage = start + offset
            laid[0, n], laid[1, n], laid[2, n], laid[3, n] = i, offset, storage, -1
            if not len(stays_R) or stays_R[i]:
                page = np.int64(pages_SP[slots_R[i], storage // page_size])
                pool_slots[n] = page * page_size + storage % page_size
            n += 1
        last[i] = max(n - 1, 0)
    return laid, pool_slots, about, last


@njit(error_model="numpy")
def _copy_rows(kept_SPW, rows_S, slots_R, firsts_B, reals_B, indices_R, source_NH, at):
    """From one source, to these columns on."""
    width = source_NH.shape[1]
    for i in range(len(slots_R)):
        slot, place = slots_R[i], indices_R[i]
        if slot >= 0:
            for n in range(reals_B[place]):
                kept_SPW[slot, rows_S[slot] + n, at : at + width] = source_NH[firsts_B[place] + n]


@njit(error_model="numpy")
def _note_rows(rows_S, ready_S, slots_R, reals_B, indices_R):
    for i in range(len(slots_R)):
        slot = slots_R[i]
        if slot >= 0:
            rows_S[slot] += reals_B[indices_R[i]]
            ready_S[slot] = False


@njit(error_model="numpy")
def _sources(indices_R, span_N, offset_N, tailed_R, firsts_B, reals_B, path_BW, index_BK, decisions_M, step_rows):
    sources = np.empty(len(span_N), np.int64)
    for n in range(len(span_N)):
        place, offset = indices_R[span_N[n]], offset_N[n] - tailed_R[span_N[n]]
        beyond = offset - reals_B[place]
        if beyond >= 0 and path_BW.shape[1]:
            node = path_BW[place, min(beyond, path_BW.shape[1] - 1)]
            sources[n] = decisions_M[max(0, index_BK[place, node + 1])]
        else:
            sources[n] = min(max(0, offset) + firsts_B[place], step_rows - 1)
    return sources


@njit(error_model="numpy")
def _keep_leaves(kept_SW, ready_S, slots_R, indices_R, leaf_B, index_BK, decisions_M, source_NW):
    for i in range(len(slots_R)):
        slot, place = slots_R[i], indices_R[i]
        if slot >= 0:
            kept_SW[slot] = source_NW[decisions_M[max(0, index_BK[place, leaf_B[place] + 1])]]
            ready_S[slot] = True


@njit(error_model="numpy")
def _commit(lengths_S, slots_R, tokens_RK, counts_R, kept_R, drafted_R, accepted_R, reached_R, reals_R, sources_R):
    table = np.zeros((len(slots_R), 7 + tokens_RK.shape[1]), np.int64)
    for i in range(len(slots_R)):
        slot = slots_R[i]
        lengths_S[slot] = 0 if slot < 0 else lengths_S[slot] + reals_R[i] + kept_R[i]
        table[i, 0], table[i, 1], table[i, 2] = counts_R[i], kept_R[i], drafted_R[i]
        table[i, 3], table[i, 4], table[i, 5] = accepted_R[i], reached_R[i], reals_R[i]
        if len(sources_R):
            table[i, 6] = sources_R[i]
        table[i, 7:] = tokens_RK[i]
    return table


@njit(error_model="numpy")
def _followers(slots_R, known_S, tokens_SL, shortest_R, longest_R, bounds_R, width):
    """Searches backwards, so that of equally long matches the latest is found first."""
    requests = len(slots_R)
    guesses, valid = np.zeros((requests, width), np.int64), np.zeros((requests, width), np.bool_)
    matched = np.zeros(requests, np.int64)
    for i in range(requests):
        slot = slots_R[i]
        if slot < 0:
            continue
        last, limit, end = known_S[slot] - 1, min(longest_R[i], known_S[slot]), -1
        for place in range(last - 1, -1, -1):
            if matched[i] == limit or place < matched[i]:
                break
            length = 0
            while (
                length < limit and length <= place and tokens_SL[slot, place - length] == tokens_SL[slot, last - length]
            ):
                length += 1
            if length > matched[i]:
                matched[i], end = length, place
        if matched[i] >= shortest_R[i]:
            for column in range(min(bounds_R[i], width, last - end)):
                guesses[i, column], valid[i, column] = tokens_SL[slot, end + 1 + column], True
    return guesses, valid, matched


@njit(error_model="numpy")
def _walk(drafted_RW, parents_RW, roles_RW, valid_RW, drawn_RK, nodes_RK, decides_R, slots_R, tokens_SL, known_S):
    """The fields of a Verdict, in their order."""
    spans, width = drafted_RW.shape
    tokens, sources = np.zeros((spans, width + 1), np.int64), np.zeros((spans, width + 1), np.int64)
    path = np.zeros((spans, width), np.int64)
    counts, kept, leaf = np.zeros(spans, np.int64), np.zeros(spans, np.int64), np.full(spans, -1)
    drafted, reached = np.zeros(spans, np.int64), np.zeros(spans, np.int64)
    for i in range(spans):
        slot = slots_R[i]
        if slot < 0 or not decides_R[i]:
            continue
        node = 0
        while True:
            emitted = counts[i]
            tokens[i, emitted], sources[i, emitted] = drawn_RK[i, node], nodes_RK[i, node]
            tokens_SL[slot, known_S[slot] + emitted] = drawn_RK[i, node]
            counts[i] = emitted + 1
            chosen, checked = -1, False
            for row in range(width):
                if valid_RW[i, row] and roles_RW[i, row] == CANDIDATE and parents_RW[i, row] == leaf[i]:
                    checked = True
                    if drafted_RW[i, row] == drawn_RK[i, node]:
                        chosen = row
                        break
            reached[i] += checked
            if chosen < 0:
                break
            leaf[i], path[i, kept[i]], node = chosen, chosen, chosen + 1
            kept[i] += 1
        known_S[slot] += counts[i]
        for row in range(width):
            drafted[i] += valid_RW[i, row] and roles_RW[i, row] == CANDIDATE
    return tokens, counts, sources, path, kept, leaf, drafted, kept.copy(), reached


@njit(error_model="numpy")
def _follow(
    drafted_RW, parents_RW, roles_RW, valid_RW, kept_RW, drawn_RK, nodes_RK, decides_R, slots_R, tokens_SL, known_S
):
    """The fields of a Verdict, in their order. Children come after their parents, so one pass finds the path."""
    spans, width = drafted_RW.shape
    tokens, sources = np.zeros((spans, width + 1), np.int64), np.zeros((spans, width + 1), np.int64)
    path = np.zeros((spans, width), np.int64)
    counts, kept, leaf = np.zeros(spans, np.int64), np.zeros(spans, np.int64), np.full(spans, -1)
    drafted, reached = np.zeros(spans, np.int64), np.zeros(spans, np.int64)
    for i in range(spans):
        slot = slots_R[i]
        if slot < 0 or not decides_R[i]:
            continue
        sources[i, 0], tested = nodes_RK[i, 0], False
        for row in range(width):
            if valid_RW[i, row] and roles_RW[i, row] == CANDIDATE:
                drafted[i] += 1
                if parents_RW[i, row] == leaf[i]:
                    tested = True
                    if kept_RW[i, row]:
                        leaf[i], path[i, kept[i]], tokens[i, kept[i]] = row, row, drafted_RW[i, row]
                        kept[i] += 1
                        sources[i, kept[i]], tested = nodes_RK[i, row + 1], False
        tokens[i, kept[i]] = drawn_RK[i, leaf[i] + 1]
        counts[i], reached[i] = kept[i] + 1, kept[i] + tested
        for place in range(counts[i]):
            tokens_SL[slot, known_S[slot] + place] = tokens[i, place]
        known_S[slot] += counts[i]
    return tokens, counts, sources, path, kept, leaf, drafted, kept.copy(), reached
