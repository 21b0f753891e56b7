"""The data types that all packages of the engine exchange. They hold data and do not depend on what produces it.

Nothing here imports torch at run time: the planner, which must stay pure, uses the first half of this file, and the
second half names tensors in annotations only.

Legend for tensor shapes: S slots of the request table, R spans of a step, W width of the widest draft of a step, N rows
of a step, M decision rows of a step (rows from whose logits a token may be drawn), K = W + 1 maximum tokens that a span
can emit.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from stridelm.stats import RequestStats

if TYPE_CHECKING:
    import numpy as np
    import torch

    from stridelm.params import SamplingParams, Speculation

CANDIDATE = 0
"""Role of a draft row that holds a guessed token, to be checked against its parent's verdict."""
PROBE = 1
"""Role of a draft row that holds a mask token: its logits propose tokens, and it is never committed."""
MAX_DRAFT_ROWS = 64
"""Maximum draft rows of one span: the ancestors of a row are one 64-bit mask."""
OVERRUN = 4 * (MAX_DRAFT_ROWS + 1)
"""Tokens by which steps may overrun the context: two of them may be in flight before the host sees that it is full, and
the tokens that a trusted window emitted are run again."""


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class PageCounts(tuple[int, ...]):
    """Pages of each page group, in the ledger's order."""

    __slots__ = ()

    def __add__(self, other: tuple[int, ...]) -> PageCounts:  # type: ignore[override]
        return PageCounts(map(operator.add, self, other))

    def __sub__(self, other: tuple[int, ...]) -> PageCounts:
        return PageCounts(map(operator.sub, self, other))

    def all(self, count: int) -> PageCounts:
        """The same count for each group."""
        return PageCounts((count,) * len(self))

    def cover(self, need: tuple[int, ...]) -> bool:
        """Whether there are at least as many as needed in every group."""
        return all(map(operator.ge, self, need))


@dataclass(frozen=True, slots=True)
class DraftKV:
    """A drafter that keeps KV of its own in the request's pages."""

    name: str
    lookahead: int
    """Tokens after an entry's own that the entry depends on."""
    may_wait: bool = False
    """Whether its entries may be computed some steps later than the target's."""


class Found(NamedTuple):
    """What a drafter has found before a step is planned."""

    levels: int
    """Of the next draft."""
    evidence: int
    """A class: drafts of one class are about as likely to be accepted."""


class Ticket:
    """The place of one request in a table, which is free again once nothing refers to the request any more."""

    __slots__ = ("_free", "index")

    def __init__(self, index: int, free: list[int]) -> None:
        """free: gets the index back."""
        self.index, self._free = index, free

    def __del__(self) -> None:
        self._free.append(self.index)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being completed.

    `computed` counts the leading tokens whose KV is committed. Only the ledger moves it (admit, commit, release).
    `rows_in_flight` counts the rows launched for this request whose verdict the CPU has not read, and
    `tokens_in_flight` the tokens that they are certain to emit. The planner adds them wherever it would otherwise take
    a length for exact. A `host_bound` request (the host must see its tokens before it can go on) is planned only when
    it has nothing in flight.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    speculation: Speculation
    rows_by_depth: tuple[int, ...] = (0,)
    """Draft rows needed at depth 0, 1, ... up to the request's depth; depth 0 needs none."""
    room: int | None = None
    """Tokens of output that the context has room for."""
    all_or_nothing: bool = False
    """The draft determines the output and is not a mere hint: the span is scheduled at full depth or deferred."""
    sample_index: int = 0
    priority: int = 0
    arrival: int = 0
    tenant: str = ""
    """Owner of the request: tenants take turns (schedule/fairness.py)."""
    stop_ids: frozenset[int] = frozenset()
    """Stop ids of its parameters, checked at every token."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that the output may not contain."""
    seed: int = 0
    output_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    slot: int = -1
    computed: int = 0
    rows_in_flight: int = 0
    tokens_in_flight: int = 0
    host_bound: bool = False
    adaptive: bool = False
    """Its drafts may be shallower than its depth, if that makes more tokens per second."""
    draft_kv: DraftKV | None = None
    """The drafter whose KV is stored beside the target's: pages without it are a miss for this request."""
    needs_states: bool = False
    """Nothing can be drafted for it in the step that ends its prompt."""
    sources: tuple[str, ...] = ()
    """Where its drafts may come from, by number (`Draft.source`)."""
    behind: int = 0
    """Its last tokens that this KV lacks, because steps that draft nothing leave it to a later one."""
    rereads: bool = False
    """It found a page that lacks only its drafter's KV: its drafter reads the prompt at once, for those that come after
    it."""
    looks_ahead: bool = False
    """Its drafter says what it has found for the next draft before the step is planned."""
    found: Found | None = None
    """What that is; None: nobody has looked yet, as for a request that waits."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """What went wrong, if the finish reason is "error"."""
    stats: RequestStats = field(default_factory=RequestStats)
    ticket: Ticket | None = None
    """Where the policy that chooses depths keeps what it knows of the request (schedule/known.py)."""

    @property
    def known(self) -> int:
        """Tokens that exist: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: lower priority value first, then first come, first served."""
        return (self.priority, self.arrival)


@dataclass(frozen=True, slots=True)
class Span:
    """What one step runs for one request: `real` rows from `computed` on, and room for `draft` rows after them.

    `decides` means that the real rows reach the last known token, so that the span emits at least one token.
    """

    request: Request
    start: int
    """Storage index of the first real row. For a deciding span with rows in flight before it, an upper bound, as is
    `real`; start + real bounds the known tokens."""
    real: int
    depth: int = 0
    draft: int = 0
    decides: bool = True
    behind: int = 0
    """As of its request, before this step."""
    waits: bool = False
    """The drafter's KV of these rows is left to a later step."""

    @property
    def rows(self) -> int:
        return self.real + self.draft

    @property
    def end(self) -> int:
        """One past the highest storage index that the span may write."""
        return self.start + self.rows


Cause = Literal["prompt", "plain", "window", "asked", "behind", "ending", "found", "room", "probe", "chosen"]
"""Why a span has the draft that it has.

prompt: it does not decide, or it ends a prompt that the drafter has to see first. plain: the request drafts nothing.
window: it has all of its window or nothing. asked: the request's own depth. behind: drafters' KV is brought up to date
first. ending: a deeper one could emit no more tokens. found: its drafter has found no more. room: rows or pages were
short. probe: the depth is tried only to learn about it. chosen: it makes the most tokens per second.
"""


@dataclass(frozen=True, slots=True)
class Reason:
    """Of one span. What a depth policy knew when it chose is only there if one did."""

    cause: Cause
    levels: int
    """Most levels that the request's drafts may have."""
    chances: Sequence[float] = ()
    """Of each level to be reached and accepted."""
    least: float | None = None
    """Chance under which a level was not worth its row."""
    seconds: float | None = None
    """Expected time of the whole step."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The spans of one step, in order of service, and which requests enter or leave the running set for it."""

    spans: tuple[Span, ...] = ()
    admitted: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()
    reasons: tuple[Reason, ...] = ()
    """One per span, if somebody asked for them."""
    lacking: PageCounts | None = None
    """If pages were short: how many the first request that got none, or was preempted for them, lacked in each group;
    below 0, those that were left beside. None if pages sufficed."""

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.spans)


@dataclass(slots=True)
class Draft:
    """Rows that fill the spans' bounds: one tree per span, children after their parents.

    Siblings hold different tokens. A row whose parent is not valid is not valid either.
    """

    tokens: torch.Tensor
    """[R, W] int64 token ids."""
    parents: torch.Tensor
    """[R, W] int64 row of the parent in this tree; -1 is the span's last real row."""
    roles: torch.Tensor
    """[R, W] int64, CANDIDATE or PROBE."""
    depths: torch.Tensor
    """[R, W] int64: distance from the last real row; a child of it has depth 1."""
    ancestors: torch.Tensor
    """[R, W] int64 bitmask: bit j is set if row j is the row itself or one of its ancestors."""
    valid: torch.Tensor
    """[R, W] bool."""
    candidates: np.ndarray
    """[R, W] bool, on the host, which knows every tree's shape: the rows that are candidates if they are valid."""
    is_chain: bool = True
    """Every candidate j has depth j + 1 and exactly the ancestors 0..j, so an accepted path is already in place."""
    max_depth: int = 0
    """Host-side bound on the depth of a valid candidate."""
    probs: torch.Tensor | None = None
    """[R, W, V] float32: the distribution that each row's token was drawn from; None: every row is a point mass
    on its token."""
    source: torch.Tensor | None = None
    """[R] int64 which of its drafter's sources each draft comes from; None: the first."""

    @property
    def width(self) -> int:
        return self.tokens.shape[1]


@dataclass(slots=True)
class ForwardBatch:
    """Plan and draft as tensors, as the model and attention see them.

    Rows are ordered by span, a span's real rows before its draft rows.
    """

    ids: torch.Tensor
    """[N] int64."""
    positions: torch.Tensor
    """[N] int64: a draft row's position is its parent's plus one."""
    slots: dict[str, torch.Tensor]
    """Page group -> [N] int64 index into the pool where the row's KV is written (0, the null slot, for padding)."""
    geometry: Geometry
    spans: tuple[Span, ...]
    request_slots: torch.Tensor
    """[R] int64 row of each span's request in the request table."""
    decisions: torch.Tensor
    """[M] int64: rows of the batch from which a token may be drawn."""
    decision_span: torch.Tensor
    """[M] int64 span of each decision row."""
    decision_draft: torch.Tensor
    """[M] int64 draft row of each decision row, -1 for the last real row."""
    decision_index: torch.Tensor
    """[R, K] int64: decision row of the last real row (column 0) and of draft row j (column j + 1); -1 where none."""
    decision_host: np.ndarray
    """[M, 2] host copy of `decision_span` and `decision_draft`."""
    reals: torch.Tensor
    """[R] int64 real rows of each span, exact."""
    decides: torch.Tensor
    """[R] bool."""
    grid: bool = False
    """Every span has K decision rows, in order: decision row r K + j is node j of span r."""
    every_row: bool = False
    """The decision rows are all rows, in order."""
    prompt_rows: torch.Tensor | None = None
    """[P] int64 rows that are followed by another prompt token, for requests that read their prompt's rows."""
    whole: tuple[bool, ...] | None = None
    """Of each span, whether the last states of all its rows are needed, and not only those of its decision rows; None:
    of every span."""

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows of each span in this batch, padding included."""
        return self.geometry.bounds


@dataclass(slots=True)
class Geometry:
    """All that attention may read. Real row i of a span sees storage [0, start + i]; a draft row sees the
    `base = start + real` real entries and the draft rows of its own span that are set in its bitmask."""

    bounds: tuple[int, ...]
    """Maximum rows of each span, which lay out the rows of the batch; without padding, the exact numbers."""
    firsts: torch.Tensor
    """[R] int32 first row of each span."""
    counts: torch.Tensor
    """[R] int32: real rows, and the draft rows that there is room for."""
    starts: torch.Tensor
    """[R] int32 KV entries committed before the span."""
    reals: torch.Tensor
    """[R] int32."""
    draft_rows: torch.Tensor
    """[N] int64 draft row of each row; negative for real rows."""
    ancestors: torch.Tensor
    """[N] int64 bitmask over the span's draft rows; 0 for real rows and padding."""
    positions: torch.Tensor
    """[N] int64."""
    tables: dict[str, torch.Tensor]
    """Page group -> [R, P] int32 page ids of each span's request, enough for what the span may write."""
    page_size: int
    max_keys: int
    """Upper bound on the entries that any row sees."""
    is_chain: bool
    """The ancestors of every draft row are contiguous in storage."""
    ends: tuple[int, ...] = ()
    """Upper bound on the entries that each span's rows see; empty where only `max_keys` is known."""
    kept: dict[Hashable, object] = field(default_factory=dict)
    """Cache for what a backend derives from this geometry. A captured step keeps its geometry, and with it the tensors
    that its graph reads, whereas a shared cache might evict them."""


@dataclass(frozen=True, slots=True)
class Onward:
    """The rows of a step whose last states are needed."""

    rows: torch.Tensor
    """[M] int64, span after span; there may be none."""
    geometry: Geometry
    """What attention reads for these rows alone."""


@dataclass(slots=True)
class States:
    """Hidden states of a step's rows, for drafters that read them. Rows that did not go on are zero where they have no
    state."""

    final: torch.Tensor
    """[N, H] after the final norm: what the head turns into logits."""
    inputs: dict[int, torch.Tensor]
    """Layer -> [N, H] the residual stream that it reads, for the layers that are tapped."""


@dataclass(slots=True)
class Verdict:
    """What verification decided, on the device. `path[r, :kept[r]]` are the draft rows to commit, in order."""

    tokens: torch.Tensor
    """[R, K] int64 emitted tokens."""
    counts: torch.Tensor
    """[R] int64 number of emitted tokens; 0 for spans that do not decide."""
    rows: torch.Tensor
    """[R, K] int64 decision row that each emitted token was drawn from."""
    path: torch.Tensor
    """[R, W] int64 accepted draft rows."""
    kept: torch.Tensor
    """[R] int64 number of draft rows whose KV is kept."""
    leaf: torch.Tensor
    """[R] int64 draft row that the next step grows from, -1 for the last real row."""
    drafted: torch.Tensor
    """[R] int64 number of tokens that were drafted."""
    accepted: torch.Tensor
    """[R] int64 number of drafted tokens that were emitted."""
    reached: torch.Tensor
    """[R] int64 number of draft positions that were checked: the accepted ones, and the rejected one if there is
    any."""


@dataclass(slots=True)
class Logprob:
    """One entry of a position's log-probabilities, in vLLM's shape.

    `rank` counts from 1; None for a token that is neither the position's own nor among the requested most likely ones.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None = None


@dataclass(slots=True)
class StepOutput:
    """What one step emitted for one request."""

    request: Request
    new_token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    hidden_states: torch.Tensor | None = None
    """[T, H] float32 on the CPU: the row that decided each new token, preceded, at the first token, by those of the
    prompt's other positions."""
    pieces: list[str] = field(default_factory=list)
    """The text that each new token made final: filled in by text_engine.py."""
    silent: bool = False
    """The last of the new tokens ended the output and is not part of its text."""
    accepted: int = 0
    """Number of new tokens that were drafted: the first ones, or, under a rule that trusts probes, all but the
    first."""
    finished: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)
