"""What a step does to tensors beyond the model, as one interface with several implementations.

This module does not know requests, spans or tables: callers pass the tensors of those objects. All implementations of
an operation give the same result, bit for bit unless its docstring says otherwise, so that a step on a GPU emits what a
step on a CPU emits. A row with a negative slot is padding: nothing is written to the tables for it, and what is
returned for it is unspecified.

Legend: R spans or requests, N rows, W draft rows of a span, K = W + 1 nodes of a span (the last real row, then the
draft rows), M = R K decision rows, S slots of the request tables (the last belongs to no request), L columns of the
token table, P pages of a table, B spans of a whole step; for logits M rows, V vocabulary, E extra tokens of a row, P
stop ids, C biases, B bad words, T tokens of all bad words of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch

from stridelm.batch import Draft, Verdict
from stridelm.kernels.plain_sources import SourceTables

Move = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies slot source[i] to slot target[i], int64 each, in all tensors that it was made for."""
Sureness = tuple[torch.Tensor, torch.Tensor]
"""[R, K] and [R] float32: the confidence of each row of the windows, and the level that it must reach."""


@dataclass(frozen=True, slots=True)
class Past:
    """The history before each row of logits: `tokens[slots[m], :known]`, then the entries of `extra[m]` that are not
    -1."""

    slots_M: torch.Tensor
    """int64."""
    positions_M: torch.Tensor
    """int64: absolute position of the token to be drawn."""
    extra_ME: torch.Tensor | None
    """int64: the tokens after the known ones that lead to this row, padded with -1."""
    tokens_SL: torch.Tensor
    """int64."""
    known_S: torch.Tensor
    """int64: how many of the tokens are real."""
    prompt_len_S: torch.Tensor
    """int64: how many of those belong to the prompt. A column of a SamplingTable."""
    longest: int
    """Upper bound of `known` in these slots."""

    def select(self, index: torch.Tensor) -> Past:
        """These rows only."""
        extra = None if self.extra_ME is None else self.extra_ME.index_select(0, index)
        slots, positions = (each.index_select(0, index) for each in (self.slots_M, self.positions_M))
        return replace(self, slots_M=slots, positions_M=positions, extra_ME=extra)


@dataclass(frozen=True, slots=True)
class Asked:
    """Which requests ask for an edit: those with this bit set."""

    features_S: torch.Tensor
    """int64: the Feature bits of each slot. A column of a SamplingTable, any stride."""
    bit: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Which tokens each row keeps (sampled rows only): scaled logits of at least `low` whose depth is below `edge`, or
    equals it with an id of at most `last`. A row without truncation has -inf, inf and the highest id."""

    peak_M: torch.Tensor
    """float32: the largest scaled logit, from which depths are measured."""
    low_M: torch.Tensor
    """float32: from min-p and top-k."""
    edge_M: torch.Tensor
    """float32: from top-p."""
    last_M: torch.Tensor
    """int64: from top-p, among tokens of equal depth."""

    def select(self, index: torch.Tensor) -> Cut:
        """The cut of these rows only."""
        return Cut(*(getattr(self, field.name).index_select(0, index) for field in fields(self)))

    def drops(self, scaled_MV: torch.Tensor) -> torch.Tensor:
        """bool [M, V]: which tokens are cut off. scaled_MV: the same logits divided by their row's temperature."""
        depth_MV, edge_M1 = self.peak_M[:, None] - scaled_MV, self.edge_M[:, None]
        behind_MV = torch.arange(scaled_MV.shape[1], device=scaled_MV.device) > self.last_M[:, None]
        return (scaled_MV < self.low_M[:, None]) | (depth_MV > edge_M1) | ((depth_MV == edge_M1) & behind_MV)


class StepOps(Protocol):
    """All integers are int64 unless stated otherwise."""

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
        """Lay out a step's rows: ([5, N] ids, positions, pool slots, ancestors, draft rows; [4, R] int32 firsts,
        counts, starts, reals; [2, M] decision rows, decision index). These are fields of ForwardBatch and
        DeviceGeometry.

        firsts_R, reals_R, drafts_R: where each span's rows begin, and the maximum number of its real and draft rows.
        decides_R: bool. span_N, offset_N: each row's span, and its index within that span. longest: maximum rows of a
        span. pages_SP: int32. Each of the draft's tensors is contiguous along its rows.
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
        """Lay out `counts` rows of each request from storage index `starts` on (a negative one counts as 0): ([N]
        storage indices, [N] indices relative to the end, page group -> [N] pool slots, [2, R] int32 counts and starts,
        [R] last rows).

        stays_R: bool, the requests whose rows leave entries in the pool; None: all. tables: page group -> [S, P] int32.
        The others as for `lay_out`.
        """
        ...

    def place_live(
        self,
        slots_R: torch.Tensor,
        starts_R: torch.Tensor,
        counts_R: torch.Tensor,
        stays_R: torch.Tensor | None,
        tables: dict[str, torch.Tensor],
        page_size: int,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """The same rows without padding, as many as the counts add up to, for attention that reads geometry on the
        host: ([5, N] requests, indices within their request's rows, storage indices, -1, 0; page group -> [N] pool
        slots; [3, R] int32 first rows, starts, counts; [R] last rows, arbitrary for a request without any)."""
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
        """[N] row indices into a step of B requests. For each of the R requests in `indices`: first `tailed` rows that
        have no source (any index is returned), then its real rows, then the rows of its accepted path."""
        ...

    def set_aside(
        self,
        kept_SPW: torch.Tensor,
        rows_S: torch.Tensor,
        ready_S: torch.Tensor,
        slots_R: torch.Tensor,
        firsts_B: torch.Tensor,
        reals_B: torch.Tensor,
        indices_R: torch.Tensor,
        sources: Sequence[torch.Tensor],
    ) -> None:
        """Append the real rows of each request's span in a step of B requests to the rows that are kept of it, from
        each of the sources, side by side. The request is not ready then.

        kept_SPW: contiguous; of them the first `rows` [S] of each slot are in use, and there is room. ready_S: bool.
        indices_R: which of the step's requests they are, firsts_B, int32, where the rows of each begin, and reals_B how
        many are real. sources: contiguous, of one shape and of the dtype of `kept`; they have W columns in all.
        """
        ...

    def keep_leaves(
        self,
        kept_SW: torch.Tensor,
        ready_S: torch.Tensor,
        slots_R: torch.Tensor,
        indices_R: torch.Tensor,
        leaf_B: torch.Tensor,
        index_BK: torch.Tensor,
        decisions_M: torch.Tensor,
        source_NW: torch.Tensor,
    ) -> None:
        """Keep of each request the row of the source from which its next step grows: that of node `leaf` of its draft,
        or of the last real row for -1. Then the request is ready.

        kept_SW: contiguous. ready_S: bool. indices_R: which of a step's B requests they are. index_BK, decisions_M: of
        the step, see `lay_out`. A request that decides nothing gets any row.
        """
        ...

    # How a head follows

    def behind(
        self,
        slots_R: torch.Tensor,
        indices_R: torch.Tensor,
        reals_B: torch.Tensor,
        kept_B: torch.Tensor,
        waiting_S: torch.Tensor,
        committed_S: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows that a head has to read of each request once a step of B requests is committed: ([R] how many waited
        before it, [R] how many there are, those included, [R] storage index of the first, [R] of the last).

        indices_R: which of the step's requests they are.
        """
        ...

    def next_tokens(
        self,
        tokens_SL: torch.Tensor,
        slots_R: torch.Tensor,
        span_N: torch.Tensor,
        positions_N: torch.Tensor,
        ahead: int,
    ) -> torch.Tensor:
        """[N] the token `ahead` places behind each row's own. span_N: which of the R requests each is of."""
        ...

    def side_by_side(self, sources: Sequence[torch.Tensor], rows_N: torch.Tensor) -> torch.Tensor:
        """[N, W] these rows of each source, side by side. sources: contiguous, of one shape and dtype."""
        ...

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
        """Keep what each request's next draft grows from. Those are ready that decide in the step of B requests, and
        have at least so many rows.

        kept_SW, newest_RW: contiguous. ready_S, decides_B: bool. indices_R: as for `behind`.
        """
        ...

    def recall(
        self,
        kept_SW: torch.Tensor,
        ready_S: torch.Tensor,
        known_S: torch.Tensor,
        slots_R: torch.Tensor,
        first: int,
        levels: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What drafts grow from: ([R, W] what is kept, [R] bool whether it is ready, [levels, R] the number of known
        tokens plus `first`, plus `first` + 1, and so on)."""
        ...

    # When a step ends

    def commit(
        self,
        lengths_S: torch.Tensor,
        slots_R: torch.Tensor,
        verdict: Verdict,
        reals_R: torch.Tensor,
        sources_R: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add to each request's length, in place, the rows whose entries stay. Returns what the host needs to know of
        the step: [R, 7 + K] counts, kept, drafted, accepted, reached, reals, sources, tokens.

        slots_R: distinct except for padding, which adds nothing. sources: of the drafts; None: all are 0.
        """
        ...

    def mover(self, tensors: Sequence[torch.Tensor]) -> Move:
        """A function that moves entries within tensors [slots, ...] that share their slots. Make it once: a captured
        launch reads what is made here at every replay.

        A move behaves as if all entries were read before any is written. Targets are distinct, except that
        (source, target) = (0, 0) may appear anywhere, and no entry may read what an earlier one writes. Paths that move
        down satisfy this if each request's entries are in order: entry d comes from storage index base + path[d] >=
        base + d and goes to base + d, and all entries before it went lower.
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """([R, W] guesses, bool which of them exist, [R] tokens that match): what followed the previous occurrence of
        the text's end.

        Finds the longest suffix of the known tokens, of a length between `shortest` and `longest`, that occurs earlier
        in them; of several occurrences, the latest. The tokens after it are the guess, at most `bounds` many.
        reach: a bound on every request's known tokens. A match shorter than `shortest` gives no guesses, and its length
        is still returned.
        """
        ...

    def choose_sources(
        self,
        tables: SourceTables,
        slots_R: torch.Tensor,
        bounds_R: torch.Tensor,
        guessed: int,
        looked_RW: torch.Tensor,
        exists_RW: torch.Tensor,
        matched_R: torch.Tensor,
        class_of_length: torch.Tensor,
    ) -> torch.Tensor:
        """[R] bool: the requests of whose drafts more is expected to be accepted if they are looked up than if they are
        guessed. What was looked up is noted in the tables, and of guesses that there are none yet.

        bounds: rows that each request has room for. guessed: levels that would be guessed. looked, exists, matched: as
        `followers` returns them. class_of_length: the class of a match of each length, the last also of longer ones.
        Sums may differ between implementations in their last bits.
        """
        ...

    def learn_sources(
        self, tables: SourceTables, slots_R: torch.Tensor, emitted_RK: torch.Tensor, counts_R: torch.Tensor
    ) -> None:
        """Learn from what each request emitted, `counts` tokens, what became of what both sources proposed."""
        ...

    # Editing float32 logits in place, in rows whose request asks for it. The caller chooses the order of edits

    def forbid_words(
        self, logits_MV: torch.Tensor, past: Past, asked: Asked, words_ST: torch.Tensor, ends_SW: torch.Tensor
    ) -> None:
        """Forbid the last token of a bad word if the row's output so far ends with the word's other tokens. As in vLLM,
        a match lies within the output: a prompt that ends with the start of a bad word forbids nothing.

        words_ST: the words' tokens, concatenated. ends_SW: where each word ends in them; 0: no word.
        """
        ...

    def add_bias(
        self, logits_MV: torch.Tensor, past: Past, asked: Asked, ids_SC: torch.Tensor, bias_SC: torch.Tensor
    ) -> None:
        """Add each request's biases, float32, to its tokens. A slot's ids are distinct, except those whose bias is
        0."""
        ...

    def forbid_stops(
        self, logits_MV: torch.Tensor, past: Past, asked: Asked, min_tokens_S: torch.Tensor, ids_SP: torch.Tensor
    ) -> None:
        """Forbid every stop id while the output is shorter than min_tokens. Negative ids are ignored."""
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
        """Repetition penalty over prompt and output (arXiv 1909.05858); presence and frequency penalties over the
        output only. All three are float32 columns of a SamplingTable."""
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
        """Where min-p, then top-k, then top-p cut each sampled row. Min-p drops tokens whose probability is below min_p
        times the largest; top-k keeps the k most probable and all that tie with the last of them; top-p keeps the most
        probable, lowest id first among equals, until those kept hold top_p of the mass.

        top_k_S: values outside [1, V) mean no top-k. top_p_S: float32, values from 1 on mean no top-p. None: no row has
        it. The others as for `draw`.
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
        """[M] the rows' tokens: for a sampled row, argmax(logit / temperature + noise) over the tokens kept; for
        others, the argmax of the raw logits. Ties go to the lowest id. Padding gets some valid id.

        logits_MV: float16, bfloat16 or float32, contiguous along V, not modified.
        slots_M, positions_M: the row's request in the tables and the absolute position of the token to be drawn.
        temperature_S float32, seed_S, sample_index_S, log_min_p_S float32 (-inf: no min-p; None: no row has it):
        columns of a SamplingTable. Any stride.
        sampled_S: bool, whether the slot samples.
        stream: in [0, 2**32), one number or [M], see noise.py.
        cut: from `truncate` of these logits, if a row may have top-k or top-p. It includes min-p, so log_min_p_S is not
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
        """[M] one token drawn for each row from these log-weights, float32, at temperature 1. The others as for
        `draw`."""
        ...

    def confidence(self, logits_MV: torch.Tensor) -> torch.Tensor:
        """The largest probability of the raw softmax: float32 [M], independent of the rows that share the call. Between
        implementations whose exponentials differ by a unit in the last place, it differs by 2**-23 of itself and its
        own rounding."""
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
        """Follow the drawn tokens down each request's tree from the last real row. The tokens drawn along the path are
        emitted and appended to the token table.

        drawn_RK: token drawn at the last real row and at each valid candidate. nodes_RK: decision row of each.
        decides_R: bool. slots_R: distinct except for padding. L leaves room for K tokens after the known ones.
        Where nothing is emitted, a verdict's tokens, rows and path are unspecified.
        """
        ...

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
        """Follow the first candidate among the kept rows below each node, whatever its token. The drafted tokens along
        the path and the one drawn at its end are emitted and appended to the token table.

        kept_RW: bool. What was drafted and tested is counted over the whole draft. The others as for `walk`.
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
        """Emit and append each window's longest prefix in which every row is confident enough, at least one token.

        drawn_RK: token drawn at each row of the window. nodes_RK: decision row of each, -1 if it has none. sureness:
        None emits whole windows. The others as for `walk`.
        """
        ...
