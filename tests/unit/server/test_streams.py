"""How output reaches its readers: what waits is put together, nothing is lost, and no request holds up another."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import zmq

from stridelm.engine.request_metrics import RequestMetrics
from stridelm.server.chunk import MAX_CHUNK, TOKEN, Chunk
from stridelm.server.deliveries import Deliveries
from stridelm.server.errors import ApiError
from stridelm.server.generation import FEW, Generation
from stridelm.server.inbox import Inbox
from stridelm.server.messages import Finish, Score
from support.doubles.server import PROMPT, Served, gauges, settle, until

COST = RequestMetrics(1, 0, 0, (), (), 0.1, 0.2, 0, 0, 0, "none", "exact", None, True, False, 0)


class Reader:
    """Keeps what it takes. ready: settable. pieces: how often each call must be repeated."""

    def __init__(self, keeps: bool = False, pieces: int = 0) -> None:
        self.keeps, self.ready = keeps, True
        self.calls: list[list[tuple[int, Chunk]]] = []
        self._pieces, self._left = pieces, 0

    def take(self, arrived: Sequence[tuple[int, Chunk]]) -> bool:
        self.calls.append(list(arrived))
        self._left = self._pieces if arrived else self._left - 1
        return self._left > 0

    def tokens(self, index: int) -> list[int]:
        return [token for call in self.calls for i, chunk in call if i == index for token in chunk.token_ids]


def chunk(*tokens: int, last: bool = False) -> Chunk:
    scores = [[Score(token, -0.5, 1, str(token))] for token in tokens]
    finish = Finish("length", None, COST) if last else None
    steps = [(len(tokens), 1)] if tokens else []
    pieces = [f"<{token}>" for token in tokens]
    return Chunk(list(tokens), pieces, steps, scores, None, [bytes([len(tokens)])], finish, TOKEN * len(tokens))


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


def test_what_waits_is_put_together() -> None:
    """A reader that was not ready gets one chunk per sample, with everything that arrived for it, in order."""

    async def work() -> None:
        generation, reader = Generation("g", 2), Reader()
        reading = asyncio.create_task(generation.read_by(reader))
        await asyncio.sleep(0)
        generation.push(0, chunk(1))
        await asyncio.sleep(0.01)
        assert [[index for index, _ in call] for call in reader.calls] == [[0]]
        reader.ready = False
        for token in range(2, 6):
            generation.push(0, chunk(token))
            generation.push(1, chunk(10 * token, 10 * token + 1))
            await asyncio.sleep(0)
        generation.push(0, chunk(last=True))
        assert len(reader.calls) == 1 and generation.held == 4 * 3 * TOKEN
        reader.ready = True
        generation.wake()
        await asyncio.sleep(0.01)
        [(zero, first), (one, second)] = reader.calls[1]
        assert len(reader.calls) == 2 and (zero, one) == (0, 1) and generation.held == 0
        assert first.token_ids == [2, 3, 4, 5] and first.text == "<2><3><4><5>" and first.finish is not None
        assert first.steps == [(1, 1)] * 4 and first.accepted == 4 and second.steps == [(2, 1)] * 4
        assert [entry[0].token for entry in second.logprobs or ()] == second.token_ids
        assert second.token_ids == [20, 21, 30, 31, 40, 41, 50, 51] and second.finish is None
        assert b"".join(second.hidden_states) == b"\2" * 4
        assert not reading.done()
        generation.push(1, chunk(7, last=True))
        await reading
        assert reader.tokens(1)[-1] == 7

    run(work)


def test_a_chunk_does_not_grow_without_limit() -> None:
    """One event is made in one go, so it is bounded; the rest comes in further ones."""

    async def work() -> None:
        generation, reader = Generation("g", 1), Reader()
        count = 3 * MAX_CHUNK // TOKEN
        for token in range(count):
            generation.push(0, chunk(token))
        generation.push(0, chunk(last=True))
        await generation.read_by(reader)
        assert reader.tokens(0) == list(range(count)) and generation.held == 0
        assert 3 <= len(reader.calls) <= 4
        assert all(taken.held <= MAX_CHUNK + TOKEN for call in reader.calls for _, taken in call)

    run(work)


def test_samples_take_turns() -> None:
    """Few are handed over at once, those that had to wait next, and a reader that keeps everything holds it."""

    async def work() -> None:
        count = 3 * FEW
        generation, reader = Generation("g", count), Reader(keeps=True)
        for _ in range(2):
            for index in range(count):
                generation.push(index, chunk(index))
        for index in range(count):
            generation.push(index, chunk(last=True))
        await generation.read_by(reader)
        assert [len(call) for call in reader.calls] == [FEW] * 3
        assert [index for call in reader.calls for index, _ in call] == list(range(count))
        assert generation.held == 2 * count * TOKEN

    run(work)


def test_long_work_of_one_reader_lets_others_go_first() -> None:
    """Its calls are repeated until it is done, others' in between, and what arrives meanwhile waits."""

    async def work() -> None:
        deliveries = Deliveries()
        slow, quick = (Generation(name, 1, deliveries=deliveries) for name in "ab")
        long, short = Reader(pieces=5), Reader()
        slow.push(0, chunk(1, last=True))
        quick.push(0, chunk(2, last=True))
        order: list[str] = []
        both = asyncio.gather(slow.read_by(long), quick.read_by(short))
        both.add_done_callback(lambda _: order.append("both"))
        while not both.done():
            order += ["quick"] if short.calls and "quick" not in order else []
            await asyncio.sleep(0)
        assert long.calls == [long.calls[0], [], [], [], [], []] and long.tokens(0) == [1]
        assert short.tokens(0) == [2]

    run(work)


@pytest.mark.parametrize("waiting", [False, True])
def test_how_reading_ends(waiting: bool) -> None:
    """With the error of the generation, after what arrived before; with the reader's own; or not at all, for a reader
    that has left."""

    async def work() -> None:
        generation, reader = Generation("g", 1), Reader()
        if waiting:
            generation.push(0, chunk(1))
        generation.fail(ApiError(503, "gone"))
        with pytest.raises(ApiError, match="gone"):
            await generation.read_by(reader)
        assert reader.tokens(0) == [1] * waiting

        class Broken(Reader):
            def take(self, arrived: Sequence[tuple[int, Chunk]]) -> bool:
                raise LookupError("broken")

        other = Generation("h", 1)
        reading = asyncio.create_task(other.read_by(Broken()))
        await asyncio.sleep(0)
        other.push(0, chunk(1))
        with pytest.raises(LookupError, match="broken"):
            await reading
        left = Generation("i", 1)
        reading = asyncio.create_task(left.read_by(reader))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        left.push(0, chunk(5))
        await asyncio.sleep(0.01)
        assert 5 not in reader.tokens(0)

    run(work)


def test_an_inbox_reads_everything(tmp_path: Any) -> None:
    """However many messages are there at once, before it was made or after; each one's work is done before the next
    one's, and an error ends it with that error."""

    async def work() -> None:
        with zmq.Context() as context, context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
            for each in (receiver, sender):
                each.set_hwm(0)
                each.setsockopt(zmq.LINGER, 0)
            receiver.bind(f"ipc://{tmp_path}/in")
            sender.connect(f"ipc://{tmp_path}/in")
            done: list[tuple[int, int]] = []

            def take(message: bytes) -> Any:
                for step in range(3):
                    done.append((int(message), step))
                    yield
                if message == b"7777":
                    raise LookupError("broken")

            for number in range(2000):
                sender.send(b"%d" % number)
            inbox = Inbox(receiver, take)
            for number in range(2000, 4000):
                sender.send(b"%d" % number)
                if number % 100 == 0:
                    await asyncio.sleep(0.002)
            while len(done) < 12_000:
                await asyncio.sleep(0.001)
            assert done == [(number, step) for number in range(4000) for step in range(3)]
            sender.send(b"7777")
            with pytest.raises(LookupError):
                await inbox.reading
            inbox.close()

    run(work)


LONG: dict[str, Any] = {"max_tokens": 430, "ignore_eos": True, "seed": 3, "n": 3, "speculation": "off"}
USER = [{"role": "user", "content": PROMPT}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "logprobs": 20, "return_token_ids": True, **LONG},
    "/v1/chat/completions": {
        "messages": USER,
        "logprobs": True,
        "top_logprobs": 20,
        "return_token_ids": True,
        **LONG,
    },
}


def lagging(served: Served, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that a client gets which reads nothing until the engine is done."""
    data = json.dumps({**body, "stream": True}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the server's buffer grows with it
        connection.connect((host, int(port)))
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        received = bytearray(connection.recv(1))
        until("it runs", lambda: gauges(served)["stride_requests_running"] > 0, 20)
        settle(served, 60)
        connection.settimeout(20)
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 20)
    lines = [line for line in received.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("route", ROUTES)
def test_a_reader_that_lags(served: Served, route: str) -> None:
    """It gets fewer, larger events, each of one choice; together they are the answer: text, ids, log-probabilities,
    usage."""
    body = ROUTES[route]
    with served.http() as client:
        whole = client.post(route, json=body).json()
    events = lagging(served, route, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    usages = [event["usage"]["completion_tokens"] for event in events if "usage" in event]
    assert usages == sorted(usages) and usages[-1] == whole["usage"]["completion_tokens"] == 3 * 430
    assert all(len(event["choices"]) == 1 for event in events[:-1]) and events[-1]["choices"] == []
    parts = [event["choices"][0] for event in events[:-1]]
    for expected in whole["choices"]:
        own = [part for part in parts if part["index"] == expected["index"]]
        scored = [part["logprobs"] for part in own if part.get("logprobs")]
        sizes = [len(part.get("token_ids", ())) for part in own]
        assert sum(sizes) == 430 and len(own) < 400 and max(sizes) > 8
        assert [token for part in own for token in part.get("token_ids", ())] == expected["token_ids"]
        if route == "/v1/completions":
            assert "".join(part["text"] for part in own) == expected["text"]
            texts = [text for part in own for text in part.get("token_texts", ())]
            offsets = [offset for part in scored for offset in part["text_offset"]]
            assert offsets == [len("".join(texts[:count])) for count in range(430)]
            assert all(sum(tokens for tokens, _ in part["steps"]) == len(part["token_ids"]) for part in own)
        else:
            assert "".join(part["delta"]["content"] for part in own) == expected["message"]["content"]
        for name in expected["logprobs"].keys() - {"text_offset"}:
            assert [value for part in scored for value in part[name]] == expected["logprobs"][name]
        assert [part["finish_reason"] for part in own if part["finish_reason"]] == ["length"]


def test_a_reader_that_lags_behind_repeats(served: Served) -> None:
    """Streams whose events repeat everything: fewer of them, and the last has all."""
    settings = {"max_new_tokens": 430, "ignore_eos": True, "sampling_seed": 3, "speculation": "off"}
    body = {"text": PROMPT, "sampling_params": settings, "return_logprob": True, "top_logprobs_num": 8}
    with served.http() as client:
        whole = client.post("/generate", json=body).json()
    events = lagging(served, "/generate", body)
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(set(counts)) and counts[-1] == 430 and len(counts) < 400
    for event in (events[-1], whole):
        del event["meta_info"]["id"], event["meta_info"]["e2e_latency"]
    assert events[-1] == whole
