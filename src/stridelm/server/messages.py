"""The messages between the HTTP processes and the engine's: msgpack over ZeroMQ, one message per step and front-end
for all of its requests."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import fields
from operator import itemgetter
from typing import Any, Literal

import msgspec

from stridelm.engine.request_metrics import RequestMetrics
from stridelm.engine.stats import EngineStats
from stridelm.params import SamplingParams, Speculation
from stridelm.server.draft_limits import DraftLimits
from stridelm.server.kv_events import KVEventsConfig
from stridelm.text.spans import Span
from stridelm.types import Logprob

# To the engine


class Orders(msgspec.Struct):
    """What the engine's process reads from its standard input, as JSON."""

    config: dict[str, Any]
    """EngineConfig's fields."""
    inbox: str
    """ZeroMQ address to listen at, for all front-ends."""
    outbox: str
    """ZeroMQ address to connect to: the parent's."""
    parent: int
    """Id of the process with which it ends."""
    log_level: int = logging.WARNING
    log_json: bool = False
    limits: DraftLimits | None = None
    kv_events: KVEventsConfig | None = None


class Job(msgspec.Struct, array_like=True):
    """One prompt and all of its samples, so that the prompt and its parameters are sent only once."""

    ids: list[str]
    """Of its samples, in order."""
    prompt_ids: bytes
    """The bytes of a `packed` array, which cost nothing to encode."""
    params: dict[str, Any]
    """From `plain`."""
    seed: int | None = None
    """Shared by the samples of a prompt whose parameters have no seed."""
    tenant: str = ""
    bad_words: list[list[int]] = []
    """Tokens of the words that the parameters forbid."""


class Submit(msgspec.Struct, tag=True, array_like=True):
    """All of these are accepted, or none."""

    group: str
    """Begins with the name of the front-end (`frontend_of`), as do the ids of its samples."""
    jobs: list[Job]
    max_open: int | None = None
    """Refused if more samples would be open, over all front-ends, and its tenant has one; None for no limit."""
    max_own: int | None = None
    """The same for samples of its tenant."""
    rids: list[str] = []
    """Names that the client gave them. Refused if an open request of its tenant has one of them."""

    @property
    def tenant(self) -> str:
        return self.jobs[0].tenant


class Abort(msgspec.Struct, tag=True, array_like=True):
    ids: list[str]


class Cut(msgspec.Struct, tag=True, array_like=True):
    """A sample's text has met a stop string: it ends after `length` output tokens. Ignored if it has ended."""

    id: str
    length: int
    stop_reason: str


class Flush(msgspec.Struct, tag=True, array_like=True):
    """Drop cached prefixes and what drafters have learned, unless a sample is open."""

    id: str
    """Begins with the name of the front-end."""


class Attach(msgspec.Struct, tag=True, array_like=True):
    """From a front-end, before anything else: where it listens. The parent needs none; its name is empty."""

    frontend: str
    outbox: str


class Detach(msgspec.Struct, tag=True, array_like=True):
    """From the parent: the front-end has ended. Its samples are aborted, and what it may still have sent is ignored."""

    frontend: str


class Stop(msgspec.Struct, tag=True, array_like=True):
    """Leave the loop, and the process."""


ToEngine = Submit | Abort | Cut | Flush | Attach | Detach | Stop


def group_of(id: str) -> str:
    """The group of a sample."""
    return id.rpartition(".")[0]


def frontend_of(id: str) -> str:
    """The name of the front-end that gave this id to a group, sample or flush."""
    return id.partition("g")[0]


# From the engine


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The engine is loaded."""

    model: str
    """Directory of the checkpoint."""
    drafter: str
    depth: int
    acceptance: str
    why: str
    """Why this drafter."""
    drafters: list[str]
    """All that requests may choose."""
    context: int
    """Maximum tokens of prompt and output together."""
    vocab_size: int
    hidden_size: int
    device: str
    dtype: str
    pages: int
    page_size: int
    mask_ids: list[int]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The engine could not be loaded; `message` is the reason."""

    message: str
    user_error: bool


class Accepted(msgspec.Struct, tag=True, array_like=True):
    group: str


class Refused(msgspec.Struct, tag=True, array_like=True):
    group: str
    message: str
    kind: Literal["request", "engine", "max_open", "max_own", "rid"] = "request"
    """What stood in the way: the request itself, a fault of the engine, or one of Submit's conditions."""
    open: int = 0
    """Samples that are open and count against the limit."""


class Flushed(msgspec.Struct, tag=True, array_like=True):
    id: str
    done: bool


class Score(msgspec.Struct, array_like=True):
    """One entry of a position's log-probabilities."""

    token: int
    logprob: float
    rank: int | None
    text: str | None = None
    """The token's name. This and what follows is filled in by the HTTP process."""
    span: Span | None = None
    """The token's part of the text, if the text has this token at this position."""


Scores = list[Score]
"""Of one position: the token at it first, then the most likely, then those requested by id."""


SCORED = 64
"""Positions of a prompt whose log-probabilities are encoded and decoded at a time."""


def top_scores(entry: Scores, top: int) -> Scores:
    """The `top` most likely tokens of a position, in order of rank."""
    ranked = [(one.rank, one) for one in entry if one.rank is not None and one.rank <= top]
    return [one for _, one in sorted(ranked, key=itemgetter(0))][:top]


def span_of(entry: Scores) -> Span:
    """The position's own token's part of the text."""
    span = entry[0].span
    assert span is not None, "the text was not made here"
    return span


class Finish(msgspec.Struct, array_like=True):
    reason: str
    stop_reason: int | str | None
    metrics: RequestMetrics
    error: str | None = None
    """What went wrong, if the reason is "error"."""


class Delta(msgspec.Struct, array_like=True):
    """One step's output for one sample: tokens, which the HTTP process turns into text (sample_text.py)."""

    id: str
    token_ids: list[int]
    accepted: int = 0
    """How many of the tokens were guessed (types.StepOutput)."""
    silent: bool = False
    """The last of the tokens ended the output and is not part of its text."""
    own_first: bool = False
    """The first of the tokens was not guessed, even if some after it were."""
    logprobs: list[Scores] | None = None
    prompt_logprobs: list[bytes] | None = None
    """Lists of SCORED positions each, encoded with `encode`, to be decoded one after another."""
    hidden_states: bytes | None = None
    """float32 in native byte order, Ready.hidden_size numbers per row (types.StepOutput)."""
    finish: Finish | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that came from the prefix cache."""


class Report(msgspec.Struct, array_like=True):
    """A snapshot of the engine's own metrics."""

    stats: EngineStats
    running: int
    waiting: int
    open: int
    """Those that run or wait, and those whose grammar is being compiled."""
    pages: dict[str, dict[str, int]]
    """Page group -> numbers of pages that are free, cached (kept only for their prefix) and held."""
    row_budget: int
    """Maximum rows of a step now."""
    page_size: int = 0
    pending_tokens: int = 0
    """Tokens of requests, running or waiting, that are to be read before they decode, cached ones included while they
    wait."""
    tokens_per_s: float = 0.0
    """Emitted since the previous report; 0 when idle."""


class Outputs(msgspec.Struct, tag=True, array_like=True):
    """A step's output for all samples of a front-end, and at intervals, to the parent, a report."""

    deltas: list[Delta]
    report: Report | None = None


class Beat(msgspec.Struct, tag=True, array_like=True):
    """A heartbeat of the engine's loop."""


FromEngine = Beat | Ready | Failed | Accepted | Refused | Flushed | Outputs

encode = msgspec.msgpack.Encoder().encode
to_engine = msgspec.msgpack.Decoder(ToEngine).decode
unnamed_scores = msgspec.msgpack.Decoder(list[Scores | None]).decode
"""SCORED positions of a prompt, without the tokens' text."""
from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def packed(ids: Iterable[int]) -> array[int]:
    """Token ids in four bytes each. Raises OverflowError for ids that do not fit, which no vocabulary has."""
    return array("i", ids)


def unpacked(prompt_ids: bytes) -> array[int]:
    """Token ids from the bytes of a packed array."""
    ids = array("i")
    ids.frombytes(prompt_ids)
    return ids


def plain(params: SamplingParams) -> dict[str, Any]:
    """The parameters of one sample that are not at their defaults, by name."""
    given = {f.name: v for f in fields(params) if (v := getattr(params, f.name)) != f.default}
    given.pop("n", None)
    speculation = Speculation.of(given.pop("speculation", None)).given
    return {**given, "speculation": speculation} if speculation else given


def scores(entry: Mapping[int, Logprob], token: int) -> Scores:
    """One position's log-probabilities, the token's own first."""
    own = [token] + [other for other in entry if other != token]
    return [Score(t, entry[t].logprob, entry[t].rank) for t in own]
