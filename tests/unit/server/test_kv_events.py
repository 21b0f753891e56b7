"""KV events over ZeroMQ have vLLM 0.33's form, and publishing them never waits for who reads them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from stridelm.cache.events import BlockRemoved, CacheEvents
from stridelm.cache.ledger import Ledger
from stridelm.config import EngineConfig
from stridelm.params import SamplingParams, Speculation
from stridelm.server.config import ServerConfig
from stridelm.server.kv_events import END, KVEventPublisher, KVEventsConfig, read_kv_events_config
from stridelm.types import Request, Span
from support.doubles.routers import free_ports

PAGE = 4
WAIT_MS = 10_000


@contextmanager
def publishing(
    kind: type[KVEventPublisher] = KVEventPublisher, **changes: Any
) -> Iterator[tuple[KVEventPublisher, CacheEvents, KVEventsConfig]]:
    ports = free_ports(2)
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        **{"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}", **changes},
    )
    events = CacheEvents(PAGE)
    publisher = kind(config, events)
    try:
        yield publisher, events, config
    finally:
        publisher.close()


@contextmanager
def socket(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as one:
        one.setsockopt(zmq.LINGER, 0)
        if kind == zmq.SUB:
            one.subscribe(b"")
        one.connect(endpoint.replace("*", "127.0.0.1"))
        yield one


def received(one: zmq.Socket[bytes]) -> list[bytes]:
    assert one.poll(WAIT_MS), "nothing came"
    return one.recv_multipart()


def replayed(config: KVEventsConfig, start: int) -> list[tuple[int, bytes]]:
    """What the replay endpoint has from this number on, once the thread has taken what was published."""
    assert config.replay_endpoint is not None
    found: list[tuple[int, bytes]] = []
    with socket(zmq.DEALER, config.replay_endpoint) as one:
        one.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            empty, topic, number, batch = received(one)
            assert empty == b""
            if number == END:
                assert (topic, batch) == (b"", b"")
                return found
            assert topic == config.topic.encode()
            found.append((int.from_bytes(number, "big"), batch))


def removals(events: CacheEvents, publisher: KVEventPublisher, count: int) -> None:
    """Publish so many batches."""
    for number in range(count):
        events._events.append(BlockRemoved([bytes([number % 256])], "GPU"))
        publisher.publish()


def test_batches_have_vllms_form() -> None:
    """[time, events, rank], and each event a map with its type: [topic, number, batch]."""
    with publishing(topic="kv") as (publisher, events, config), socket(zmq.SUB, config.endpoint) as subscriber:
        ledger = Ledger({"main": 2}, PAGE)
        ledger.tell(events)
        while not subscriber.poll(50):  # until it is connected
            events.cleared()
            publisher.publish()
        before = received(subscriber)
        while subscriber.poll(50):
            before = received(subscriber)
        for number, prompt in enumerate(([1] * 9, [2] * 9)):
            one = Request(str(number), prompt, SamplingParams(cache_salt="s"), Speculation())
            ledger.admit(one)
            with ledger.reserve([Span(one, 0, PAGE)]) as transaction:
                transaction.commit([0])
            ledger.release(one)
        one = Request("evicts", [3] * 9, SamplingParams(), Speculation())
        ledger.admit(one)
        with ledger.reserve([Span(one, 0, PAGE)]) as transaction:
            transaction.commit([0])
        publisher.publish()
        topic, number_bytes, packed = received(subscriber)
    assert topic == b"kv" and int.from_bytes(number_bytes, "big") == int.from_bytes(before[1], "big") + 1
    time, told, rank = msgspec.msgpack.decode(packed)
    assert time > 1.7e9 and rank == 0
    assert [event["type"] for event in told] == ["BlockStored", "BlockStored", "BlockRemoved", "BlockStored"]
    salted, _, removed, plain = told
    digest = plain.pop("block_hashes")
    assert isinstance(digest[0], bytes) and plain == {
        "type": "BlockStored",
        "parent_block_hash": None,
        "token_ids": [3] * PAGE,
        "block_size": PAGE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    assert len(salted["extra_keys"]) == 1 and salted["extra_keys"][0] != ["s"]
    assert removed == {"type": "BlockRemoved", "block_hashes": salted["block_hashes"], "medium": "GPU"}


def test_replay() -> None:
    """From a number on, as many batches as are kept; what makes no sense is ignored."""
    with publishing(buffer_steps=3) as (publisher, events, config):
        assert replayed(config, 0) == []
        removals(events, publisher, 5)
        assert [number for number, _ in replayed(config, 0)] == [2, 3, 4]
        assert [number for number, _ in replayed(config, 4)] == [4]
        assert replayed(config, 5) == []
        assert config.replay_endpoint is not None
        with socket(zmq.DEALER, config.replay_endpoint) as one:
            for frames in ([b""], [b"", b"1"], [b"", b"x" * 63], [b"", b"", b"", b""]):
                one.send_multipart(frames)
            assert not one.poll(100)
        assert len(replayed(config, 0)) == 3


class HeldUp(KVEventPublisher):
    """Its thread stands still until it is told to go on."""

    go_on = threading.Event()

    def _run(self) -> None:
        self.go_on.wait()
        super()._run()


def test_what_is_dropped_leaves_a_gap() -> None:
    """While its thread stands still, the publisher keeps as many batches as it may; the next are lost, with their
    numbers, and nobody waits for it."""
    with publishing(HeldUp, max_queue_size=4) as (publisher, events, config):
        removals(events, publisher, 100)
        HeldUp.go_on.set()
        kept = [number for number, _ in replayed(config, 0)]
        assert kept == list(range(len(kept))) and 4 <= len(kept) <= 6
        removals(events, publisher, 1)
        assert [number for number, _ in replayed(config, 0)] == [*kept, 100]


def test_an_endpoint_that_is_taken() -> None:
    with publishing() as (_, _, config), pytest.raises(ValueError, match=r"kv_events_config: endpoint tcp://\*:\d+ "):
        KVEventPublisher(config, CacheEvents(PAGE))


ON: Mapping[str, Any] = {"enable_kv_cache_events": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "kv_events_config: "),
        ("[]", "Expected `object`"),
        (json.dumps({**ON, "trust": 1}), "unknown field `trust`; known keys: enable_kv_cache_events"),
        (json.dumps({**ON, "publisher": "my.module:Publisher"}), "Invalid enum value"),
        (json.dumps({**ON, "hwm": 0}), ">= 1"),
        (json.dumps({**ON, "endpoint": 5557}), r"endpoint"),
        (json.dumps({**ON, "buffer_steps": 5}), "buffer_steps would have no effect without replay_endpoint"),
        (json.dumps({**ON, "publisher": "null", "topic": "a"}), 'topic would have no effect without publisher "zmq"'),
        ('{"endpoint": "tcp://*:5557"}', "endpoint would have no effect without enable_kv_cache_events"),
    ],
)
def test_configs_that_are_refused(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(kv_events_config=given)


def test_configs() -> None:
    """vLLM's defaults; off is off."""
    config = read_kv_events_config(json.dumps(ON))
    assert config is not None and config.endpoint == "tcp://*:5557" and config.buffer_steps == 10_000
    for off in ("{}", '{"enable_kv_cache_events": false}', '{"enable_kv_cache_events": true, "publisher": "null"}'):
        assert read_kv_events_config(off) is None
    with pytest.raises(ValueError, match="no effect without enable_prefix_caching"):
        ServerConfig(kv_events_config=json.dumps(ON)).resolve(EngineConfig(enable_prefix_caching=False))
