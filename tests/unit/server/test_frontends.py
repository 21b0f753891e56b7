"""Several front-end processes serve as one: the same answers, limits, metrics and permissions, whichever gets a
connection; and one that dies takes only its own connections with it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import zmq

from stridelm.builtin import builtin_path
from stridelm.config import EngineConfig
from stridelm.options import flat
from stridelm.server.config import ServerConfig
from stridelm.server.frontends import fleet as fleet_module
from stridelm.server.frontends.fleet import Fleet, Member
from stridelm.server.frontends.messages import EngineState, Opening
from stridelm.server.limits import Limits
from stridelm.server.messages import Accepted, Ready, encode
from stridelm.server.outlets import Outlets
from support.doubles.processes import children_of, runs
from support.doubles.server import PROMPT, Served, gauges, offline, serving, settle, until

COUNT = 3
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("three"), "--api-server-count", str(COUNT)) as served:
        yield served
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


@pytest.fixture
def three(several: Served) -> Iterator[Served]:
    """The server with three front-ends; afterwards all of them serve, and nothing runs."""
    yield several
    until("all front-ends are up", lambda: len(frontends(several)) == COUNT)
    settle(several)
    until("no page is held", lambda: held(several) == 0, 10)


def nursery_of(served: Served) -> psutil.Process:
    [nursery] = children_of(served.process.pid, "frontends.nursery")
    return nursery


def frontends(served: Served) -> list[psutil.Process]:
    """Those that run: none while their nursery is being started."""
    nurseries = children_of(served.process.pid, "frontends.nursery")
    return [frontend for nursery in nurseries for frontend in children_of(nursery.pid)]


def held(served: Served) -> float:
    lines = served.http().get("/metrics").text.splitlines()
    lines = [line for line in lines if line.startswith("stride_kv_pages{") and 'state="held"' in line]
    assert lines
    return sum(float(line.split()[-1]) for line in lines)


def connections(served: Served) -> dict[int, int]:
    """Front-end's process id -> its connections to clients."""
    return {
        one.pid: sum(each.status == psutil.CONN_ESTABLISHED for each in one.net_connections("tcp"))
        for one in frontends(served)
    }


@contextmanager
def everywhere(served: Served, **options: Any) -> Iterator[list[httpx.Client]]:
    """A client with an open connection to each front-end. The door hears of a connection's end a moment after it, so
    connections that follow one another may be spread as if it were still open."""
    for _ in range(10):
        until("no connection is open", lambda: not any(connections(served).values()), 10)
        with ExitStack() as stack:
            clients = [stack.enter_context(served.http(**options)) for _ in range(COUNT)]
            for client in clients:
                client.get("/v1/models")
            if list(connections(served).values()) == [1] * COUNT:
                yield clients
                return
    raise AssertionError("connections were not spread evenly in ten tries")


class Stream:
    """A stream of one completion, read on a thread."""

    def __init__(self, served: Served, body: dict[str, Any], key: str = "none") -> None:
        self.text, self.status, self.reasons = "", 0, list[str]()
        self.error: Any = None
        self.broken = False
        self.begun, self._served, self._body, self._key = threading.Event(), served, body, key
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def end(self) -> Stream:
        self._thread.join()
        return self

    def _read(self) -> None:
        try:
            with (
                self._served.http(headers={"authorization": f"Bearer {self._key}"}) as client,
                client.stream("POST", "/v1/completions", json={**self._body, "stream": True}) as answer,
            ):
                self.status = answer.status_code
                if self.status != 200:
                    self.error = json.loads(answer.read())["error"]
                    return
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError:
            self.broken = True
        finally:
            self.begun.set()

    def _take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error", self.error)
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            self.begun.set()


def started(served: Served, body: dict[str, Any], count: int, key: str = "none") -> list[Stream]:
    streams = [Stream(served, body, key) for _ in range(count)]
    for stream in streams:
        assert stream.begun.wait(60)
    return streams


def bodies(count: int) -> list[dict[str, Any]]:
    draw = random.Random(26)
    prompts = (PROMPT, "def fibonacci(n):", "import os\n", "x")
    return [
        {
            "prompt": draw.choice(prompts),
            "seed": draw.randrange(1000),
            "max_tokens": draw.randint(1, 60),
            "temperature": draw.choice((0, 0.7, 1)),
            "n": draw.choice((1, 1, 2, 3)),
            "stream": draw.random() < 0.5,
            "logprobs": draw.choice((None, None, 0, 3)),
            "stop": draw.choice((None, "self", ["\n\n", "return"])),
            "presence_penalty": draw.choice((0, 0.5)),
            "repetition_penalty": draw.choice((1, 1.2)),
        }
        for _ in range(count)
    ]


def told(served: Served, body: dict[str, Any]) -> Any:
    """What a client gets, without what differs from request to request: ids and times. A stream's events are joined,
    since they are as many as steps."""
    with served.http() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return [{**choice, "speculation": None} for choice in answer.json()["choices"]]
    choices: dict[int, list[Any]] = {i: ["", [], None] for i in range(body["n"])}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                said = choices[choice["index"]]
                said[0] += choice["text"]
                said[1] += (choice["logprobs"] or {}).get("token_logprobs", [])
                said[2] = choice["finish_reason"] or said[2]
    return choices


def test_same_answers(served: Served, three: Served) -> None:
    """A random mix gets the same answers from one process, one after the other, as from three, eight at a time."""
    mix = bodies(40)
    expected = [told(served, body) for body in mix]
    before = gauges(three)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda body: told(three, body), mix)) == expected
    figures = gauges(three)
    samples = sum(body["n"] for body in mix)
    assert figures["stride_requests_finished_total"] - before["stride_requests_finished_total"] == samples


def test_connections_are_even(three: Served) -> None:
    """Twelve connections are four for each, and the next goes where one has closed."""
    host, port = three.url.removeprefix("http://").split(":")
    until("no connection is open", lambda: not any(connections(three).values()), 10)
    opened = [socket.create_connection((host, int(port))) for _ in range(12)]
    try:
        until("four each", lambda: list(connections(three).values()) == [4] * COUNT, 10)
        for connection in opened[:3]:  # one of each
            connection.close()
        until("three each", lambda: list(connections(three).values()) == [3] * COUNT, 10)
        opened += [socket.create_connection((host, int(port))) for _ in range(3)]
        until("four each again", lambda: list(connections(three).values()) == [4] * COUNT, 10)
    finally:
        for connection in opened:
            connection.close()


def test_metrics_are_added_up(three: Served) -> None:
    """The tokens of all front-ends together are those that clients received, wherever /metrics is asked for."""
    before = gauges(three)
    with everywhere(three) as clients:
        answers = [
            client.post("/v1/completions", json={**LONG, "max_tokens": 7 + i}) for i, client in enumerate(clients)
        ]
        received = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
        assert received == 7 + 8 + 9
        emitted = before["stride_engine_emitted_tokens_total"] + received
        until("the engine has reported", lambda: gauges(three)["stride_engine_emitted_tokens_total"] == emitted, 10)
        pages = {client.get("/metrics").text for client in clients}
    assert len(pages) == 1
    after = gauges(three)
    for name in ("stride_generation_tokens_total", "vllm:generation_tokens_total", "stride_spec_tokens_total"):
        assert after[name] - before.get(name, 0.0) == received, name  # with labels, it appears with its first count
    assert after["stride_time_to_first_token_seconds_count"] - before["stride_time_to_first_token_seconds_count"] == 3
    assert after["stride_engine_up"] == 1


def test_a_front_end_is_killed(three: Served) -> None:
    """Its clients' streams break; the others' are complete and right; its pages come back; another takes its place, and
    no counter has gone down."""
    [expected] = offline([PROMPT], temperature=0, max_tokens=400, ignore_eos=True)
    until("no connection is open", lambda: not any(connections(three).values()), 10)
    streams = started(three, LONG, 2 * COUNT)
    before, [victim, *others] = gauges(three), frontends(three)
    victim.kill()
    broken = [stream for stream in streams if stream.end().broken]
    assert len(broken) == 2
    assert all(expected.text.startswith(stream.text) for stream in broken)
    assert [stream.text for stream in streams if not stream.broken] == [expected.text] * 4
    until("another front-end serves", lambda: len(frontends(three)) == COUNT)
    settle(three)
    until("its pages are free", lambda: held(three) == 0, 10)
    until("its restart is counted", lambda: restarts(three) == before["stride_api_server_restarts_total"] + 1, 10)
    after = gauges(three)
    down = [name for name in before if name.endswith(("_total", "_count", "_bucket")) and after[name] < before[name]]
    assert not down
    assert {one.pid for one in others} < {one.pid for one in frontends(three)}
    with everywhere(three) as clients:
        for client in clients:
            assert client.post("/v1/completions", json=LONG).json()["choices"][0]["text"] == expected.text


def restarts(served: Served) -> float:
    return gauges(served)["stride_api_server_restarts_total"]


def test_the_nursery_is_killed(three: Served) -> None:
    """All front-ends end with it, and all come back."""
    before = {one.pid for one in frontends(three)}
    nursery_of(three).kill()
    until("all have been replaced", lambda: _replaced(three, before))
    assert three.http().get("/health").status_code == 200


def _replaced(served: Served, before: set[int]) -> bool:
    now = {one.pid for one in frontends(served)}
    return len(now) == COUNT and not now & before


def test_the_engine_is_killed(three: Served) -> None:
    """Every front-end's clients are told at once, all report it, and all serve again."""
    with everywhere(three) as clients:
        streams = started(three, LONG, COUNT)
        os.kill(three.engine.pid, signal.SIGKILL)
        for stream in streams:
            assert "engine" in stream.end().error["message"] and not stream.broken
        for client in clients:
            assert client.get("/health").status_code == 503
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and refused.headers["retry-after"]
    until("the engine comes back", lambda: three.http().get("/health").status_code == 200)
    [expected] = offline([PROMPT], temperature=0, max_tokens=20)
    with everywhere(three) as clients:
        until("everywhere", lambda: all(client.get("/health").status_code == 200 for client in clients), 10)
        for client in clients:
            answer = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, "max_tokens": 20})
            assert answer.json()["choices"][0]["text"] == expected.text
    assert gauges(three)["stride_engine_restarts_total"] == 1


def test_the_cache_is_flushed_only_if_nothing_runs(three: Served) -> None:
    """Anywhere: the front-end that is asked has no request of its own."""
    with everywhere(three) as clients:
        [stream] = started(three, LONG, 1)
        assert {client.post("/flush_cache").status_code for client in clients} == {400}
        assert sum(client.get("/get_load").json()[0]["num_reqs"] for client in clients) >= 1
        assert clients[0].post("/flush_cache?timeout=30").status_code == 200
        assert not stream.end().broken


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = ("--api-key", "ann", "--api-key", "ben", "--operator-key", "operator")
    limits = ("--max-queue", "8", "--max-queue-per-key", "6", "--api-server-count", str(COUNT))
    with serving(tmp_path_factory.mktemp("limited"), *keys, *limits) as served:
        yield served
        assert served.stop() == 0, served.log.read_text(encoding="utf-8")


def idle(served: Served) -> None:
    with served.http(headers={"authorization": "Bearer operator"}) as client:
        until("no sample is open", lambda: client.get("/get_load").json()[0]["num_reqs"] == 0, 30)


def test_places_are_exact(limited: Served) -> None:
    """Of thirty streams at once exactly as many are served as one key, and all keys, may have; no front-end sees more
    than a part of them."""
    for key, allowed in (("ann", 6), ("operator", 8)):
        # Long ones: none may end before the last of them has asked.
        streams = [Stream(limited, {**LONG, "max_tokens": 1200, "speculation": "off"}, key) for _ in range(30)]
        counts = Counter(stream.end().status for stream in streams)
        assert counts == {200: allowed, 429: 30 - allowed}
        assert all("max_queue" in stream.error["message"] for stream in streams if stream.status == 429)
        assert all(stream.reasons == ["length"] for stream in streams if stream.status == 200)
        idle(limited)
    body = {**LONG, "max_tokens": 480, "speculation": "off"}
    streams = started(limited, body, 6, "ann")
    assert "max_queue_per_key" in Stream(limited, LONG, "ann").end().error["message"]
    streams += started(limited, body, 2, "ben")
    assert "(max_queue)" in Stream(limited, LONG, "ben").end().error["message"]
    assert all(stream.end().reasons == ["length"] for stream in streams)


def ended(served: Served, rid: str, key: str, act: Sequence[dict[str, Any]], by: str) -> str:
    """The finish reason of a request called `rid`, after each front-end was asked to abort by another key."""
    answers: list[Any] = []

    def ask() -> None:
        sampling = {"max_new_tokens": 1200, "ignore_eos": True, "temperature": 0, "speculation": "off"}
        with served.http(headers={"authorization": f"Bearer {key}"}) as client:
            answers.append(client.post("/generate", json={"text": PROMPT, "rid": rid, "sampling_params": sampling}))

    thread = threading.Thread(target=ask)
    thread.start()
    with served.http(headers={"authorization": "Bearer operator"}) as client:
        until("it runs", lambda: client.get("/get_load").json()[0]["num_reqs"] == 1, 30)
    with ExitStack() as stack:
        clients = [stack.enter_context(served.http(headers={"authorization": f"Bearer {by}"})) for _ in range(COUNT)]
        for client, body in zip(clients, act, strict=True):
            assert client.post("/abort_request", json=body).status_code == 200
        thread.join()
    idle(served)
    reason: str = answers[0].json()["meta_info"]["finish_reason"]["type"]
    return reason


@pytest.mark.parametrize("wanted", [{"rid": "mine"}, {"abort_all": True}], ids=str)
def test_aborted_from_another_connection(limited: Served, wanted: dict[str, Any]) -> None:
    """Whichever front-end gets the abort; with another client's key it has no effect."""
    nothing = {"rid": "other"}
    for at in range(COUNT):
        act = [wanted if i == at else nothing for i in range(COUNT)]
        assert ended(limited, "mine", "ann", act, "ann") == "abort"
    assert ended(limited, "mine", "ann", [wanted] * COUNT, "ben") == "length"
    assert ended(limited, "mine", "ann", [wanted, nothing, nothing], "operator") == "abort"


def test_a_rid_is_in_use_everywhere(limited: Served) -> None:
    """For the same key only, and until its request has ended."""
    sampling = {"max_new_tokens": 1, "temperature": 0}
    length = {"max_new_tokens": 1200, "ignore_eos": True, "speculation": "off"}
    long = {"text": [PROMPT, "x"], "rid": "mine", "sampling_params": length}

    def ask(key: str, rid: str) -> int:
        with limited.http(headers={"authorization": f"Bearer {key}"}) as client:
            body = {"text": "x", "rid": rid, "sampling_params": sampling}
            status: int = client.post("/generate", json=body).status_code
            return status

    with (
        limited.http(headers={"authorization": "Bearer ann"}) as client,
        client.stream("POST", "/generate", json={**long, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        for rid in ("mine", "mine_1"):
            assert [ask("ann", rid) for _ in range(COUNT)] == [400] * COUNT
        assert [ask("ann", "mine_2"), ask("ben", "mine")] == [200, 200]
        assert list(lines)[-2] == "data: [DONE]"
    assert [ask("ann", "mine") for _ in range(COUNT)] == [200] * COUNT
    idle(limited)


def test_ending(tmp_path: Path) -> None:
    """After SIGTERM every front-end refuses new requests while one of them still has a stream; the streams get time to
    finish, and at the deadline the rest end with a reason. No process is left."""
    options = ("--api-server-count", str(COUNT), "--drain-timeout", "3", "--max-num-seqs", "32")
    with serving(tmp_path, *options) as served:
        processes = children_of(served.process.pid, recursive=True)
        assert len(processes) == 2 + COUNT
        with everywhere(served) as clients:
            [short] = started(served, {**LONG, "max_tokens": 30}, 1)
            long = started(served, {**LONG, "n": 8, "max_tokens": 480, "speculation": "off", "logprobs": 5}, COUNT)
            served.process.send_signal(signal.SIGTERM)
            for client in clients:
                until("new requests are turned away", lambda: client.get("/health").status_code == 503, 2)  # noqa: B023
                assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        assert short.end().reasons == ["length"]
        with served.standing_still():
            until("the deadline has passed", lambda: "still ran after" in served.log.read_text(encoding="utf-8"))
        reasons = [reason for stream in long for reason in stream.end().reasons]
        assert len(reasons) == 8 * COUNT and set(reasons) <= {"abort", "length"} and "abort" in reasons
        assert served.process.wait(30) == 0, served.log.read_text(encoding="utf-8")
        until("all end", lambda: not any(map(runs, processes)), 10)


def test_what_a_frontend_loads() -> None:
    """No compiler: there are many front-ends, and only the engine computes."""
    code = "import sys, stridelm.server.frontends.frontend; print({'numba', 'triton'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_no_process_outlives_the_parent(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-server-count", str(COUNT)) as served:
        processes = children_of(served.process.pid, recursive=True)
        served.process.kill()
        until("all end", lambda: not any(map(runs, processes)), 15)


def test_a_front_end_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed, and another serves in its place; one that sends its heartbeat is left alone."""
    monkeypatch.setattr(fleet_module, "LOOK_S", 0.1)
    monkeypatch.setattr(fleet_module, "LOOKS", 60)
    ready = Ready("model", "none", 0, "exact", "", [], 512, 512, 64, "cpu", "float32", 8, 16, [])
    joined: list[Member] = []
    processes: list[psutil.Process] = []

    def join(member: Member) -> None:
        joined.append(member)
        member.channel.send(EngineState(ready, None, "there is none"))

    async def go() -> None:
        opening = Opening(asdict(ServerConfig(api_server_count=1)), flat(EngineConfig()), "00" * 16, 30, 30)
        fleet = Fleet(1, opening, str(tmp_path), join, lambda *_: None, lambda _: None, lambda: None)
        await fleet.load()
        await fleet.start()
        await asyncio.sleep(7)
        [first] = joined
        assert first.serving
        processes.append(psutil.Process(first.pid))
        os.kill(first.pid, signal.SIGSTOP)
        await asyncio.wait_for(fleet.until(lambda: first.ended and len(fleet.serving) == 1), 30)
        assert [member.pid for member in fleet.serving] == [joined[1].pid] != [first.pid]
        processes.append(psutil.Process(joined[1].pid))
        await fleet.stop(force=False, seconds=10)

    asyncio.run(go())
    until("none is left", lambda: not any(map(runs, processes)), 10)


def test_limits_are_divided() -> None:
    limits = Limits.of(ServerConfig(max_connections=10, max_buffered_mib=3.0), processes=3)
    assert (limits.connections, limits.buffered) == (3, 1 << 20)


def test_the_model_has_no_tokenizer(tmp_path: Path) -> None:
    """What only the front-ends load is reported as in one process."""
    copy = tmp_path / "model"
    shutil.copytree(builtin_path(), copy, ignore=shutil.ignore_patterns("tokenizer*"))
    said = []
    for count in ("1", "2"):
        command = (sys.executable, "-m", "stridelm.cli.main", "serve", str(copy), "--port", "0")
        done = subprocess.run([*command, "--api-server-count", count], capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and "no tokenizer" in done.stderr and "Traceback" not in done.stderr, done
        said.append(done.stderr)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("engine", "cores", "chosen"),
    [
        ({"device": "cpu", "max_num_seqs": 512}, 64, 1),
        ({"device": "cuda", "max_num_seqs": 32}, 64, 1),
        ({"device": "cuda", "max_num_seqs": 65}, 64, 2),
        ({"device": "cuda", "max_num_seqs": 512}, 13, 3),
        ({"device": "cuda:0", "max_num_seqs": 4096}, 128, 8),
        ({"device": "cuda", "max_num_seqs": 512}, 2, 1),
    ],
)
def test_chosen_count(engine: dict[str, Any], cores: int, chosen: int) -> None:
    assert ServerConfig().resolve(EngineConfig(**engine), cores).api_server_count == chosen
    assert ServerConfig(api_server_count=5).resolve(EngineConfig(**engine), cores).api_server_count == 5


def test_counts_that_will_not_do() -> None:
    for count in (0, 65, 1.5, True):
        with pytest.raises(ValueError, match="api_server_count"):
            ServerConfig(api_server_count=count)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_connections"):
        ServerConfig(api_server_count=4, max_connections=3)


def test_a_front_end_that_has_ended_is_not_attached_again(tmp_path: Path) -> None:
    """Its first message may arrive after the parent's message that it has ended."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        outlets = Outlets(context, f"ipc://{tmp_path}/parent")
        receiver = context.socket(zmq.PULL)
        receiver.bind(f"ipc://{tmp_path}/one")
        outlets.attach("1", f"ipc://{tmp_path}/one")
        outlets.send("1", Accepted("1g0"))
        assert receiver.recv() == encode(Accepted("1g0"))
        outlets.detach("1")
        outlets.attach("1", f"ipc://{tmp_path}/one")
        assert "1" not in outlets and "" in outlets
        outlets.send("1", Accepted("1g1"))
        assert not receiver.poll(50)
    finally:
        context.destroy(linger=0)
