"""Requests, what a step runs of them, and what it emitted: the data types of the planner and of those that ask it.

They hold data and do not depend on what produces it. Nothing here imports torch at run time, since the planner stays
pure; one step's tensors are in batch.py.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from stridelm.stats import RequestStats

if TYPE_CHECKING:
    import torch

    from stridelm.params import SamplingParams, Speculation

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
    renews_noise: bool = False
    """Noise is drawn anew even if the seed comes again: other requests' outcomes may decide how deep its drafts are, so
    its noise must be none that they were decided by."""
    output_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    slot: int = -1
    computed: int = 0
    rows_in_flight: int = 0
    tokens_in_flight: int = 0
    host_bound: bool = False
    resting: bool = False
    """It sits out the next step: its tenant's masks have had their share of the time (grammar/share.py)."""
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


class Follow(enum.Enum):
    """How far a drafter that follows its target goes along with a step's rows."""

    NOW = "now"
    """It computes their entries, and what the next draft grows from."""
    ENTRIES = "entries"
    """Only the entries, since nothing is to be drafted after this step. It counts as a row behind: a step without a
    draft comes before the next one with some, and its newest row gives what that grows from."""
    LATER = "later"
    """Nothing: a later step computes their entries."""


@dataclass(slots=True)
class Span:
    """What one step runs for one request: `real` rows from `computed` on, and room for `draft` rows after them. Never
    changed once made; not frozen, since that makes the hundreds that a plan may have take three times as long.

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
    follow: Follow = Follow.NOW

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
    """Of one span. What a depth policy knew when it chose is only there if one did: unless something else made it less,
    the depth is that of the first `most` levels whose chances are at least `least`."""

    cause: Cause
    levels: int
    """Most levels that the request's drafts may have."""
    most: int | None = None
    """Levels that no request was to exceed, 0 if none was worth its row; None also if a depth was tried."""
    least: float | None = None
    """Chance under which a level was not worth its row to this request."""
    chances: Sequence[float] = ()
    """Of each level to be reached and accepted."""
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
class Logprob:
    """One entry of a position's log-probabilities, in vLLM's shape.

    `rank` counts from 1; None for a token that is neither the position's own nor among the requested most likely ones.
    `decoded_token` is the token's own text, special or not, or `bytes:\\xe6\\x97` if it is only a part of a character.
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
