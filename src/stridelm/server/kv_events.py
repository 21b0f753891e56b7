"""Publishes the prefix cache's events over ZeroMQ, as vLLM 0.33 does, for routers that send a request where its prefix
is.

Subscribers get [topic, sequence number, batch]: 8 bytes, big-endian, and msgpack. A number that is missing was dropped,
because a subscriber or the publisher was slow. The replay endpoint has the last batches again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
import zmq

from stridelm.cache.events import CacheEvents, Event

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""The sequence number that ends a replay."""


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vLLM's fields and defaults."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    """Where subscribers connect; an address without `*` or `::` is one that the publisher connects to."""
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    """Number of batches that can be replayed."""
    hwm: Count = 100_000
    """Number of batches kept for a slow subscriber."""
    max_queue_size: Count = 100_000
    """Number of batches that may wait to be published."""
    topic: str = ""


def read_kv_events_config(text: str) -> KVEventsConfig | None:
    """The config from its JSON; None if events are off. Raises ValueError for one that is invalid, or in part has no
    effect."""
    try:
        given: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        config = msgspec.convert(given, KVEventsConfig)
    except msgspec.MsgspecError as error:
        known = ", ".join(KVEventsConfig.__struct_fields__)
        raise ValueError(f"kv_events_config: {error}; known keys: {known}") from None
    if not config.enable_kv_cache_events:
        unused, needed = given.keys() - {"enable_kv_cache_events"}, "enable_kv_cache_events"
    elif config.publisher == "null":
        unused, needed = given.keys() - {"enable_kv_cache_events", "publisher"}, 'publisher "zmq"'
    else:
        unused, needed = given.keys() & {"buffer_steps"}, "replay_endpoint"
        if config.replay_endpoint is not None:
            return config
    if unused:
        raise ValueError(f"kv_events_config: {', '.join(sorted(unused))} would have no effect without {needed}")
    return config if config.enable_kv_cache_events and config.publisher == "zmq" else None


class Batch(msgspec.Struct, array_like=True):
    ts: float
    """Seconds since the epoch."""
    events: list[Event]
    data_parallel_rank: int = 0


class KVEventPublisher:
    """Publishes on a thread of its own. Raises ValueError for an endpoint that cannot be used."""

    def __init__(self, config: KVEventsConfig, events: CacheEvents) -> None:
        self._events = events
        self._topic = config.topic.encode()
        self._number = 0
        self._sent: deque[list[bytes]] = deque(maxlen=config.buffer_steps)
        """Numbers and batches that can be replayed."""
        self._context = zmq.Context()
        try:
            self._inlet = self._socket(zmq.PUSH, config.max_queue_size)
            self._waiting = self._socket(zmq.PULL, 1)
            self._waiting.bind("inproc://batches")
            self._inlet.connect("inproc://batches")
            self._outlet = self._socket(zmq.PUB, config.hwm)
            binds = any(part in config.endpoint for part in ("*", "::", "ipc://", "inproc://"))
            _attach(self._outlet, "endpoint", config.endpoint, bind=binds)
            self._replay: zmq.Socket[bytes] | None = None
            if config.replay_endpoint is not None:
                self._replay = self._socket(zmq.ROUTER, 2 * (config.buffer_steps + 1))
                self._replay.setsockopt(zmq.MAXMSGSIZE, 64)  # of requests
                _attach(self._replay, "replay_endpoint", config.replay_endpoint, bind=True)
        except ValueError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Publish what has happened since the last call. Never blocks: if too much waits, the batch is dropped, and its
        number with it."""
        events = self._events.take()
        if not events:
            return
        batch = msgspec.msgpack.encode(Batch(time.time(), events))
        with suppress(zmq.Again):
            self._inlet.send_multipart((self._number.to_bytes(NUMBER_BYTES, "big"), batch), zmq.NOBLOCK)
        self._number += 1

    def close(self) -> None:
        """Publish what waits, for a second at most."""
        with suppress(zmq.Again):
            self._inlet.send(b"", zmq.NOBLOCK)
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._context.destroy(linger=0)

    def _socket(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._waiting, self._replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            poller.poll()
            while self._waiting.poll(0):
                message = self._waiting.recv_multipart()
                if not message[0]:
                    return
                self._outlet.send_multipart((self._topic, *message))
                if self._replay is not None:
                    self._sent.append(message)
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send what a subscriber asks for: [its name, empty, the first number]. Numbers compare as their bytes do."""
        client, *rest = replay.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != NUMBER_BYTES:
            return
        for number, batch in self._sent:
            if number >= rest[1]:
                replay.send_multipart((client, b"", self._topic, number, batch))
        replay.send_multipart((client, b"", b"", END, b""))


def _attach(socket: zmq.Socket[bytes], name: str, endpoint: str, *, bind: bool) -> None:
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(
            f"kv_events_config: {name} {endpoint} cannot be used ({error.strerror}); give a free one, such as "
            "tcp://*:5557"
        ) from error
