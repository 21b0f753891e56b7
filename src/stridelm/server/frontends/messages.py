"""The messages between the parent and its front-end processes: msgpack, each preceded by its length (channel.py)."""

from __future__ import annotations

from typing import Any

import msgspec

from stridelm.server.callers import Caller
from stridelm.server.messages import Ready, Report
from stridelm.server.metrics import Snapshot


class Opening(msgspec.Struct):
    """What the nursery reads from its standard input, as JSON."""

    server: dict[str, Any]
    """ServerConfig's fields."""
    engine: dict[str, Any]
    """EngineConfig's fields."""
    salt: str
    """For callers.Keys, in hexadecimal digits."""
    log_level: int
    access_level: int


class Loaded(msgspec.Struct):
    """The nursery's answer: why it cannot load what front-ends need, or None."""

    error: str | None = None


# To a front-end


class Start(msgspec.Struct, tag=True, array_like=True):
    """First of all. name: with which its ids begin. directory: for its socket."""

    name: str
    directory: str


class EngineState(msgspec.Struct, tag=True, array_like=True):
    """The engine is up or down; sent whenever that changes."""

    ready: Ready
    """Of its last start."""
    inbox: str | None
    """Where it listens; None while it is down."""
    why: str | None
    """Why it cannot be relied on."""


class Heard(msgspec.Struct, tag=True, array_like=True):
    """The engine has reported."""

    report: Report


class SnapshotWanted(msgspec.Struct, tag=True, array_like=True):
    number: int


class AllMetrics(msgspec.Struct, tag=True, array_like=True):
    """The answer to MetricsWanted: encoded metrics.Snapshots, whose sum is /metrics."""

    number: int
    snapshots: list[bytes]


class Drain(msgspec.Struct, tag=True, array_like=True):
    """Refuse new requests, and report when the running ones have ended."""


class Exit(msgspec.Struct, tag=True, array_like=True):
    """force: without waiting for the last events of streams."""

    force: bool


# In both directions


class AbortSamples(msgspec.Struct, tag=True, array_like=True):
    """End the caller's samples of this name, or all of them: passed on to all other front-ends."""

    rid: str | None
    caller: Caller


# From a front-end


class Hello(msgspec.Struct, tag=True, array_like=True):
    pid: int


class Serving(msgspec.Struct, tag=True, array_like=True):
    """Connections can be handed to it."""


class Closed(msgspec.Struct, tag=True, array_like=True):
    """One of its connections."""


class SnapshotTaken(msgspec.Struct, tag=True, array_like=True):
    """Its metrics: as the answer to SnapshotWanted, and once a second unasked, as a heartbeat (number 0)."""

    number: int
    snapshot: bytes


class MetricsWanted(msgspec.Struct, tag=True, array_like=True):
    number: int


class Drained(msgspec.Struct, tag=True, array_like=True):
    pass


ToFrontend = Start | EngineState | Heard | SnapshotWanted | AllMetrics | AbortSamples | Drain | Exit
FromFrontend = Hello | Serving | Closed | SnapshotTaken | MetricsWanted | AbortSamples | Drained

encode = msgspec.msgpack.Encoder().encode
to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
from_frontend = msgspec.msgpack.Decoder(FromFrontend).decode
snapshot_of = msgspec.msgpack.Decoder(Snapshot).decode
"""The metrics in SnapshotTaken and AllMetrics."""
