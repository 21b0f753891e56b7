"""The operations of a step in plain torch: the reference, on any device.

Legend: as in step_ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from stridelm.batch import Draft, Verdict
from stridelm.kernels import plain_logits, plain_sources
from stridelm.kernels.entries import as_moved
from stridelm.kernels.step_ops import Move, Sureness


def _places(counts_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] span and [N] offset in it of each row, if spans have so many rows and lie one after another."""
    span_N = torch.repeat_interleave(torch.arange(len(counts_R), device=counts_R.device), counts_R)
    return span_N, torch.arange(len(span_N), device=span_N.device) - (counts_R.cumsum(0) - counts_R)[span_N]


def place_live(
    slots_R: torch.Tensor,
    starts_R: torch.Tensor,
    counts_R: torch.Tensor,
    stays_R: torch.Tensor | None,
    tables: dict[str, torch.Tensor],
    page_size: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    starts_R, ends_R = starts_R.clamp(min=0), counts_R.cumsum(0)
    firsts_R = ends_R - counts_R
    span_N, offset_N = _places(counts_R)
    storage_N, nothing_N = starts_R[span_N] + offset_N, torch.zeros_like(span_N)
    stay_N = nothing_N == 0 if stays_R is None else stays_R[span_N]
    slots = {
        group: pool_slots(pages_SP, slots_R[span_N], storage_N, stay_N, page_size) for group, pages_SP in tables.items()
    }
    laid = torch.stack((span_N, offset_N, storage_N, nothing_N - 1, nothing_N))
    about = torch.stack((firsts_R, starts_R, counts_R)).to(torch.int32)
    return laid, slots, about, (ends_R - 1).clamp(min=0)


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
    column_R, count_R = rows_S[slots_R], torch.where(slots_R < 0, 0, reals_B[indices_R])
    span_N, offset_N = _places(count_R)
    row_N = firsts_B[indices_R][span_N] + offset_N
    taken_NW = torch.cat([source.index_select(0, row_N) for source in sources], dim=-1)
    kept_SPW[slots_R[span_N], column_R[span_N] + offset_N] = taken_NW
    rows_S[slots_R] = torch.where(slots_R < 0, 0, column_R + count_R)  # of padding nothing is kept
    ready_S[slots_R] = column_R < 0  # no number, which would be copied from the host


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
    decision_R = index_BK[indices_R].gather(1, leaf_B[indices_R][:, None] + 1)[:, 0]
    kept_SW[slots_R] = source_NW.index_select(0, decisions_M[decision_R.clamp(min=0)])
    ready_S[slots_R] = decision_R >= -1  # no number, which would be copied from the host


class PlainStepOps:
    forbid_words = staticmethod(plain_logits.forbid_words)
    add_bias = staticmethod(plain_logits.add_bias)
    forbid_stops = staticmethod(plain_logits.forbid_stops)
    penalise = staticmethod(plain_logits.penalise)
    truncate = staticmethod(plain_logits.truncate)
    draw = staticmethod(plain_logits.draw)
    draw_weighted = staticmethod(plain_logits.draw_weighted)
    confidence = staticmethod(plain_logits.confidence)
    choose_sources = staticmethod(plain_sources.choose_sources)
    learn_sources = staticmethod(plain_sources.learn_sources)

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
        start_R = committed_S[slots_R]
        real_R = torch.minimum(known_S[slots_R] - start_R, reals_R)
        own_N = offset_N - real_R[span_N]
        storage_N = start_R[span_N] + offset_N
        owner_N = slots_R[span_N]
        is_real = own_N < 0
        ids = torch.where(is_real, tokens_SL[owner_N, storage_N], 0)
        positions, ancestors, alive = storage_N, torch.zeros_like(storage_N), is_real
        node = torch.arange(draft.width + 1, device=slots_R.device)
        valid_RK = decides_R[:, None] & (node <= drafts_R[:, None])
        if draft.width:
            place = (span_N, own_N.clamp(0, draft.width - 1))
            drafted = (own_N >= 0) & (own_N < drafts_R.clamp(max=draft.width)[span_N])
            valid = drafted & draft.valid[place]
            ids = torch.where(drafted, draft.tokens[place], ids)
            positions = torch.where(drafted, (start_R + real_R)[span_N] - 1 + draft.depths[place], storage_N)
            ancestors = torch.where(valid, draft.ancestors[place], ancestors)
            alive = alive | valid
            valid_RK[:, 1:] &= draft.valid
        pool = pool_slots(pages_SP, owner_N, storage_N, alive, page_size)
        rows_RK = ((firsts_R + real_R)[:, None] - 1 + node).clamp(0, len(span_N) - 1)
        index_M = torch.arange(valid_RK.numel(), device=node.device)
        laid = torch.stack((ids, positions, pool, ancestors, own_N))
        about = torch.stack((firsts_R, real_R + drafts_R, start_R, real_R)).to(torch.int32)
        return laid, about, torch.stack((rows_RK.flatten(), torch.where(valid_RK.flatten(), index_M, -1)))

    def place(
        self,
        slots_R: torch.Tensor,
        starts_R: torch.Tensor,
        counts_R: torch.Tensor,
        stays_R: torch.Tensor | None,
        tables: dict[str, torch.Tensor],
        firsts_R: torch.Tensor,
        span_N: torch.Tensor,
        offset_N: torch.Tensor,
        longest: int,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        starts_R = starts_R.clamp(min=0)
        storage_N, own_N = starts_R[span_N] + offset_N, offset_N - counts_R[span_N]
        live_N = own_N < 0 if stays_R is None else (own_N < 0) & stays_R[span_N]
        slots = {
            group: pool_slots(pages_SP, slots_R[span_N], storage_N, live_N, page_size)
            for group, pages_SP in tables.items()
        }
        about = torch.stack((counts_R, starts_R)).to(torch.int32)
        return storage_N, own_N, slots, about, (firsts_R + counts_R - 1).clamp(min=0)

    place_live = staticmethod(place_live)
    set_aside = staticmethod(set_aside)
    keep_leaves = staticmethod(keep_leaves)

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
        place_N = indices_R[span_N]
        offset = offset_N - tailed_R[span_N]
        real = (offset.clamp(min=0) + firsts_B[place_N]).clamp(max=step_rows - 1)
        if not path_BW.shape[1]:
            return real
        beyond = offset - reals_B[place_N]
        node = path_BW[place_N, beyond.clamp(0, path_BW.shape[1] - 1)]
        decision = index_BK[place_N, node + 1].clamp(min=0)
        return torch.where(beyond < 0, real, decisions_M[decision])

    def commit(
        self,
        lengths_S: torch.Tensor,
        slots_R: torch.Tensor,
        verdict: Verdict,
        reals_R: torch.Tensor,
        sources_R: torch.Tensor | None,
    ) -> torch.Tensor:
        length_R = lengths_S[slots_R] + reals_R + verdict.kept
        lengths_S.index_put_((slots_R,), torch.where(slots_R < 0, 0, length_R))
        sources_R = torch.zeros_like(reals_R) if sources_R is None else sources_R
        columns = (verdict.counts, verdict.kept, verdict.drafted, verdict.accepted, verdict.reached, reals_R, sources_R)
        return torch.cat((torch.stack(columns, 1), verdict.tokens), 1)

    def behind(
        self,
        slots_R: torch.Tensor,
        indices_R: torch.Tensor,
        reals_B: torch.Tensor,
        kept_B: torch.Tensor,
        waiting_S: torch.Tensor,
        committed_S: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        waiting_R, end_R = waiting_S[slots_R], committed_S[slots_R]
        count_R = waiting_R + reals_B[indices_R] + kept_B[indices_R]
        return waiting_R, count_R, end_R - count_R, end_R - 1

    def next_tokens(
        self,
        tokens_SL: torch.Tensor,
        slots_R: torch.Tensor,
        span_N: torch.Tensor,
        positions_N: torch.Tensor,
        ahead: int,
    ) -> torch.Tensor:
        return tokens_SL[slots_R[span_N], positions_N + ahead]

    def side_by_side(self, sources: Sequence[torch.Tensor], rows_N: torch.Tensor) -> torch.Tensor:
        parts = [source.index_select(0, rows_N) for source in sources]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def keep_newest(
        self,
        kept_SW: torch.Tensor,
        ready_S: torch.Tensor,
        slots_R: torch.Tensor,
        newest_RW: torch.Tensor,
        decides_B: torch.Tensor,
        indices_R: torch.Tensor,
        counts_R: torch.Tensor,
        least: int,
    ) -> None:
        kept_SW[slots_R] = newest_RW
        ready_S[slots_R] = decides_B[indices_R] & (counts_R >= least)

    def recall(
        self,
        kept_SW: torch.Tensor,
        ready_S: torch.Tensor,
        known_S: torch.Tensor,
        slots_R: torch.Tensor,
        first: int,
        levels: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        level_L1 = torch.arange(first, first + levels, device=slots_R.device)[:, None]
        return kept_SW[slots_R], ready_S[slots_R], known_S[slots_R] + level_L1

    def mover(self, tensors: Sequence[torch.Tensor]) -> Move:
        def move(source_N: torch.Tensor, target_N: torch.Tensor) -> None:
            for tensor in map(as_moved, tensors):
                tensor.index_copy_(0, target_N, tensor.index_select(0, source_N))

        return move

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
        tokens_RL, known_R1 = tokens_SL[slots_R, :reach], known_S[slots_R][:, None]
        place = torch.arange(reach, device=tokens_RL.device)
        run = (place < known_R1 - 1).to(torch.int64)  # still matching; candidates end before the last token
        matched = torch.zeros_like(tokens_RL)
        for back in range(min(int(longest_R.max()), reach)):
            suffix = tokens_RL.gather(1, (known_R1 - 1 - back).clamp(min=0))
            shifted = torch.roll(tokens_RL, back, 1) == suffix
            run = run * (shifted & (place >= back) & (back < longest_R)[:, None])
            matched += run
        best = (matched * reach + place).argmax(1, keepdim=True)  # longest first, then latest
        offset = torch.arange(width, device=tokens_RL.device)
        index = best + 1 + offset
        matched_R1 = matched.gather(1, best)
        there = (matched_R1 >= shortest_R[:, None]) & (index < known_R1) & (offset < bounds_R[:, None])
        return tokens_RL.gather(1, index.clamp(max=reach - 1)), there, matched_R1[:, 0]

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
        verdict = walk_down(draft, drawn_RK, nodes_RK, decides_R)
        append(tokens_SL, known_S, slots_R, verdict.tokens, verdict.counts)
        return verdict

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
        short = replace(draft, valid=draft.valid & kept_RW)
        verdict = walk_down(short, _agreeing(short, drawn_RK), nodes_RK, decides_R)
        append(tokens_SL, known_S, slots_R, verdict.tokens, verdict.counts)
        candidates = draft.valid_candidates
        tested = decides_R & (candidates & (draft.parents == verdict.leaf[:, None])).any(1)
        drafted = torch.where(decides_R, candidates.sum(1), 0)
        return replace(verdict, drafted=drafted, reached=verdict.kept + tested)

    def cut_windows(
        self,
        drawn_RK: torch.Tensor,
        nodes_RK: torch.Tensor,
        decides_R: torch.Tensor,
        slots_R: torch.Tensor,
        tokens_SL: torch.Tensor,
        known_S: torch.Tensor,
        sureness: Sureness | None = None,
    ) -> Verdict:
        valid = nodes_RK >= 0
        sure = valid if sureness is None else valid & (sureness[0] >= sureness[1][:, None])
        sure[:, 0] = True
        counts = torch.where(decides_R, sure.to(torch.int64).cumprod(1).sum(1), 0)
        drafted = valid[:, 1:].sum(1)
        zero = torch.zeros_like(counts)
        accepted = (counts - 1).clamp(min=0)
        append(tokens_SL, known_S, slots_R, drawn_RK, counts)
        return Verdict(
            tokens=drawn_RK,
            counts=counts,
            rows=nodes_RK,
            path=zero[:, None].expand(-1, drawn_RK.shape[1] - 1),
            kept=zero,
            leaf=zero - 1,
            drafted=drafted,
            accepted=accepted,
            reached=torch.minimum(accepted + 1, drafted),
        )


def walk_down(draft: Draft, drawn_RK: torch.Tensor, nodes_RK: torch.Tensor, decides_R: torch.Tensor) -> Verdict:
    """`walk`'s verdict, without appending its tokens."""
    leaf = torch.full_like(nodes_RK[:, 0], -1)
    tokens, sources = [drawn_RK[:, 0]], [nodes_RK[:, 0]]
    path: list[torch.Tensor] = []
    kept = reached = torch.zeros_like(leaf)
    going = decides_R
    candidates = draft.valid_candidates
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
        counts=torch.where(decides_R, kept + 1, 0),
        rows=torch.stack(sources, 1),
        path=torch.stack(path, 1) if path else leaf.new_zeros(len(leaf), 0),
        kept=kept,
        leaf=leaf,
        drafted=torch.where(decides_R, candidates.sum(1), 0),
        accepted=kept,
        reached=reached,
    )


def _agreeing(draft: Draft, drawn_RK: torch.Tensor) -> torch.Tensor:
    """[R, K] the token drawn at each node; at a node with valid children, the first child's token."""
    width = draft.width
    child = torch.where(draft.valid_candidates, torch.arange(width, device=drawn_RK.device), width)
    first_RK = torch.full_like(drawn_RK, width).scatter_reduce_(1, draft.parents + 1, child, "amin")
    return torch.where(first_RK < width, draft.tokens.gather(1, first_RK.clamp(max=width - 1)), drawn_RK)


def append(
    tokens_SL: torch.Tensor,
    known_S: torch.Tensor,
    slots_R: torch.Tensor,
    tokens_RK: torch.Tensor,
    counts_R: torch.Tensor,
) -> None:
    """Append each request's first `counts` tokens to its known ones. The row that padding uses stays empty."""
    offset = torch.arange(tokens_RK.shape[1], device=tokens_RK.device)
    row, column = slots_R[:, None], known_S[slots_R][:, None] + offset
    # Beyond the count, the old contents are written back.
    counts_R = torch.where(slots_R < 0, 0, counts_R)
    fresh = offset < counts_R[:, None]
    tokens_SL[row, column] = torch.where(fresh, tokens_RK, tokens_SL[row, column])
    known_S.index_put_((slots_R,), known_S[slots_R] + counts_R)


def pool_slots(
    pages_SP: torch.Tensor, owner_N: torch.Tensor, storage_N: torch.Tensor, live_N: torch.Tensor, page_size: int
) -> torch.Tensor:
    """[N] pool slots of the owners' storage indices; the null slot for rows that are not live."""
    page_N = pages_SP[owner_N, storage_N // page_size].to(torch.int64)
    return torch.where(live_N, page_N * page_size + storage_N % page_size, 0)
