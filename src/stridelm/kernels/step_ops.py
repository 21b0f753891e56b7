"""What a step does to tensors beyond the model, as one interface with several implementations.

Requests, spans and tables are not known here: a room hands over the tensors of its objects. An operation is the same
one in every implementation, to the bit where it says nothing else, so that a step on a GPU says what a step on a CPU
says. Where a slot is negative the row is padding: nothing of the tables is written for it, and what is returned for it
may be anything.

Legend: R spans or requests, N rows, W draft rows of a span, K = W + 1 nodes of a span (the last real row, then the
draft rows), M = R K decision rows, S slots of the request tables (the last is nobody's), L columns of the token table,
P pages of a table, B spans of a whole step; of logits M rows, V vocabulary, E extra tokens of a row, P stop ids, C
biases, B bad words, T tokens of a slot's bad words in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch

from stridelm.types import Draft, Verdict

Move = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies slots source[i] to target[i], int64 each, in all tensors that it was made for."""
Sureness = tuple[torch.Tensor, torch.Tensor]
"""[R, K] and [R] float32: of each row of the windows, and what it must reach."""


@dataclass(frozen=True, slots=True)
class Past:
    """Rows of logits, and what comes before each of them: `tokens[slots[m], :known]`, then the entries of `extra[m]`
    that are not -1."""

    slots_M: torch.Tensor
    """int64."""
    positions_M: torch.Tensor
    """int64: absolute position of the token to be drawn."""
    extra_ME: torch.Tensor | None
    """int64: tokens behind the known ones that lead to this row, -1 behind their end."""
    tokens_SL: torch.Tensor
    """int64."""
    known_S: torch.Tensor
    """int64: how many of the tokens are real."""
    prompt_len_S: torch.Tensor
    """int64: how many of those are the prompt's. A column of a SamplingTable."""
    longest: int
    """What `known` does not exceed in these slots."""

    def select(self, index: torch.Tensor) -> Past:
        """These rows only."""
        extra = None if self.extra_ME is None else self.extra_ME.index_select(0, index)
        slots, positions = (each.index_select(0, index) for each in (self.slots_M, self.positions_M))
        return replace(self, slots_M=slots, positions_M=positions, extra_ME=extra)


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks for an edit."""

    features_S: torch.Tensor
    """int64: a Feature's bits each. A column of a SamplingTable, any stride."""
    bit: int


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of each row, for sampled rows alone: scaled logits of at least `low` whose depth is under `edge`, or
    at it with an id of at most `last`. A row that asks for nothing has -inf, inf and the last id of all."""

    peak_M: torch.Tensor
    """float32: the largest scaled logit, from which depths are measured."""
    low_M: torch.Tensor
    """float32: min-p and top-k."""
    edge_M: torch.Tensor
    """float32: top-p."""
    last_M: torch.Tensor
    """int64: top-p, of equals."""

    def select(self, index: torch.Tensor) -> Cut:
        """Of these rows only."""
        return Cut(*(getattr(self, field.name).index_select(0, index) for field in fields(self)))

    def drops(self, scaled_MV: torch.Tensor) -> torch.Tensor:
        """bool [M, V]: what is cut off, of the same logits divided by their row's temperature."""
        depth_MV, edge_M1 = self.peak_M[:, None] - scaled_MV, self.edge_M[:, None]
        behind_MV = torch.arange(scaled_MV.shape[1], device=scaled_MV.device) > self.last_M[:, None]
        return (scaled_MV < self.low_M[:, None]) | (depth_MV > edge_M1) | ((depth_MV == edge_M1) & behind_MV)


class StepOps(Protocol):
    """All integers are int64 if nothing else is said."""

    # Where rows lie

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
        """Find a step's rows: ([5, N] ids, positions, pool slots, ancestors, draft rows; [4, R] int32 firsts, counts,
        starts, reals; [2, M] decision rows, decision index). Fields of ForwardBatch and DeviceGeometry.

        firsts_R, reals_R, drafts_R: where each span's rows begin, and the most real and draft rows that it has.
        decides_R: bool. span_N, offset_N: whose each row is, and its place among those. longest: most rows of a span.
        pages_SP: int32. The draft's rows stand side by side in each of its tensors.
        """
        ...

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
        """Find `counts` rows of each request from storage index `starts` on, 0 if that is below: ([N] storage indices,
        [N] places relative to the end, page group -> [N] pool slots, [2, R] int32 counts and starts, [R] last rows).

        stays_R: bool, whose rows leave entries; None: everybody's. tables: page group -> [S, P] int32. The others as
        for `lay_out`.
        """
        ...

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
        """[N] rows of a step of B requests: of each of the R that are named, behind a tail of rows that stand for none
        (any row is given), its real rows and then those of the path that was accepted."""
        ...

    def advance(self, lengths_S: torch.Tensor, slots_R: torch.Tensor, rows_R: torch.Tensor) -> None:
        """Add to each request's length, in place. slots_R: no two alike but for padding, which adds nothing."""
        ...

    def mover(self, tensors: Sequence[torch.Tensor]) -> Move:
        """What moves entries within tensors [slots, ...] that share their slots. Make it once: a captured launch reads
        what is made here at every replay.

        A move is as if all were read before any is written. No two targets are the same but in pairs (0, 0), which may
        stand anywhere, and no entry may read what one before it writes. Paths that move down keep this rule if each
        request's entries stand in order: entry d comes from storage index base + path[d] >= base + d and goes to base +
        d, and all entries before it went lower.
        """
        ...

    # Drafting

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([R, W] guesses, bool which of them there are): what followed the last time that the text ended like this.

        The longest suffix of the known tokens, between a shortest and a longest length, that occurs earlier in them; of
        several occurrences the latest. The tokens behind it are the guess, at most so many as the bounds say.
        reach: a bound on every request's known tokens.
        """
        ...

    # Editing float32 logits in place, of the rows whose request asks for it: the order of edits is the caller's

    def forbid_words(
        self, logits_MV: torch.Tensor, past: Past, asked: Asked, words_ST: torch.Tensor, ends_SW: torch.Tensor
    ) -> None:
        """Forbid the last token of a bad word where the tokens before it end the row's output so far. As in vLLM a
        match lies within the output: a prompt ending in a bad word's start forbids nothing.

        words_ST: the words' tokens one after the other. ends_SW: where each of them ends there; 0: no word.
        """
        ...

    def add_bias(
        self, logits_MV: torch.Tensor, past: Past, asked: Asked, ids_SC: torch.Tensor, bias_SC: torch.Tensor
    ) -> None:
        """Add each request's biases, float32, to its tokens. Of a slot's ids no two are alike but those to which 0 is
        added."""
        ...

    def forbid_stops(
        self, logits_MV: torch.Tensor, past: Past, asked: Asked, min_tokens_S: torch.Tensor, ids_SP: torch.Tensor
    ) -> None:
        """Forbid every stop id while the output is shorter than min_tokens. A negative id is none."""
        ...

    def penalise(
        self,
        logits_MV: torch.Tensor,
        past: Past,
        asked: Asked,
        repetition_S: torch.Tensor,
        presence_S: torch.Tensor,
        frequency_S: torch.Tensor,
    ) -> None:
        """Repetition over prompt and output (arXiv 1909.05858); presence and frequency over the output only. The three:
        float32 columns of a SamplingTable."""
        ...

    # Drawing

    def truncate(
        self,
        logits_MV: torch.Tensor,
        slots_M: torch.Tensor,
        temperature_S: torch.Tensor,
        sampled_S: torch.Tensor,
        log_min_p_S: torch.Tensor,
        top_k_S: torch.Tensor | None = None,
        top_p_S: torch.Tensor | None = None,
    ) -> Cut:
        """Where min-p, then top-k, then top-p cut each sampled row. Min-p drops tokens less likely than min_p times the
        likeliest; top-k keeps the k likeliest and all that tie with the last of them; top-p keeps the likeliest, lowest
        id first among equals, until those kept hold top_p of the mass.

        top_k_S: nothing asked for outside [1, V). top_p_S: float32, nothing asked for from 1 on. None: no row asks. The
        others as for `draw`.
        """
        ...

    def draw(
        self,
        logits_MV: torch.Tensor,
        slots_M: torch.Tensor,
        positions_M: torch.Tensor,
        temperature_S: torch.Tensor,
        seed_S: torch.Tensor,
        sample_index_S: torch.Tensor,
        sampled_S: torch.Tensor,
        log_min_p_S: torch.Tensor | None = None,
        stream: int | torch.Tensor = 0,
        cut: Cut | None = None,
    ) -> torch.Tensor:
        """[M] the rows' tokens: argmax(logit / temperature + noise) over what is kept of a sampled row, the argmax of
        the raw logits of the others; of equals the lowest id.

        logits_MV: float16, bfloat16 or float32, contiguous along V, left as they are.
        slots_M, positions_M: the row's request in the tables and the absolute position of the token to be drawn.
        temperature_S float32, seed_S, sample_index_S, log_min_p_S float32 (-inf: no min-p; None: no row has it):
        columns of a SamplingTable. Any stride.
        sampled_S: bool, whether the slot samples.
        stream: in [0, 2**32), one number or [M], see noise.py.
        cut: from `truncate` of these logits, where a row may have top-k or top-p. Min-p is in it, log_min_p_S is not
        read.
        """
        ...

    def draw_weighted(
        self,
        logs_MV: torch.Tensor,
        slots_M: torch.Tensor,
        positions_M: torch.Tensor,
        seed_S: torch.Tensor,
        sample_index_S: torch.Tensor,
        stream: int | torch.Tensor,
    ) -> torch.Tensor:
        """[M] a draw for each row by these log-weights, float32, at temperature 1. The others as for `draw`."""
        ...

    def confidence(self, logits_MV: torch.Tensor) -> torch.Tensor:
        """The largest probability of the raw softmax: float32 [M], whatever rows share the call. In implementations
        whose exponentials differ by a unit in the last place, it differs by 2**-23 of it and its own rounding."""
        ...

    # Deciding

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
        """Follow the drawn tokens down each request's tree from the last real row: those drawn along the path are
        emitted, and appended to the token table.

        drawn_RK: token drawn at the last real row and at each live candidate. nodes_RK: decision row of each.
        decides_R: bool. slots_R: no two alike but for padding. L leaves room for K tokens behind the known ones.
        Where nothing is emitted, a verdict's tokens, rows and path may be anything.
        """
        ...

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
        """Emit each window's longest prefix in which every row is sure enough, and always one token; append it.

        drawn_RK: token drawn at each row of the window. nodes_RK: decision row of each, -1 where none. sureness: None:
        the whole windows are emitted. The others as for `walk`.
        """
        ...
