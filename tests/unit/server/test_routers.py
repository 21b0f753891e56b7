"""Routers from PyPI over two real servers: requests go where their prefix is, and a lost worker is no loss.

What routers read and send besides is in test_worker_routes.py, which needs none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from support.doubles.routers import Router, free_ports, routing, served_by
from support.doubles.server import Served, serving, until

for _module in ("smg", "vllm_router"):
    pytest.importorskip(_module, reason="smg and vllm-router are not installed: make test EXTRAS=dev,harness")

TEXTS = [f"def {name}(items, key):\n    found = {{}}\n" * 12 for name in ("group", "count", "merge", "split")]
"""Prompts of several pages, of which already the first differ."""
POLICIES = {
    "smg": ("--policy", "cache_aware", "--disable-tokenizer-autoload", "--load-monitor-interval", "1"),
    "vllm-router": ("--policy", "cache_aware"),
}
IN_TURN = (
    *("--policy", "round_robin", "--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
)


class Fleet:
    """Two servers that publish KV events, at ports that stay theirs."""

    def __init__(self, stack: ExitStack, path: Path) -> None:
        self._stack, self._path = stack, path
        self.ports = [free_ports(3) for _ in range(2)]
        """Of each server: HTTP, events, replay."""
        self._starts = 0
        with ThreadPoolExecutor() as pool:
            self.servers = list(pool.map(self.start, (0, 1)))

    def start(self, number: int) -> Served:
        http, events, replay = self.ports[number]
        self._starts += 1
        path = self._path / f"{number}-{self._starts}"
        path.mkdir()
        config = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
        options = ("--port", str(http), "--kv-events-config", json.dumps(config))
        return self._stack.enter_context(serving(path, *options))

    def lose(self, number: int) -> None:
        """Without a warning."""
        self.servers[number].process.kill()
        self.servers[number].process.wait()

    def replace(self, number: int) -> None:
        self.servers[number] = self.start(number)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, tmp_path_factory.mktemp("fleet"))


@pytest.fixture
def fleet(started: Fleet) -> Fleet:
    """Nothing is cached."""
    for server in started.servers:
        with server.http() as client:
            client.post("/flush_cache", params={"timeout": 10}).raise_for_status()
    return started


def ask(router: Router, text: str, name: str) -> int:
    """Tokens of the prompt that were cached."""
    body = {"model": "built-in", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    usage = router.post("/v1/chat/completions", body, name)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def ask_round(router: Router, servers: Sequence[Served], name: str) -> set[int]:
    """The numbers of the servers that answered four requests."""
    names = [f"{name}-{number}" for number in range(4)]
    for one in names:
        ask(router, one, one)
    return {served_by(servers, one) for one in names}


@pytest.mark.parametrize("kind", sorted(POLICIES))
def test_a_prefix_stays_with_its_worker(kind: str, fleet: Fleet, tmp_path: Path) -> None:
    """Each later question about a text goes to the worker that has it cached."""
    with routing(kind, tmp_path / "log", fleet.servers, *POLICIES[kind]) as router:
        for number, text in enumerate(TEXTS):
            first = f"{kind}-first-{number}"
            assert ask(router, text, first) == 0
            for turn in range(2):
                later = f"{kind}-later-{number}-{turn}"
                assert ask(router, f"{text}\nquestion {turn}", later) > 0
                assert served_by(fleet.servers, later) == served_by(fleet.servers, first)


@pytest.mark.parametrize("source", ["options", "workers"])
def test_events_say_where_a_prefix_is(source: str, fleet: Fleet, tmp_path: Path) -> None:
    """A router that has seen none of the texts sends each to the worker that was asked about it directly. It learns of
    those before its start by replay; its options say where the events are, or the workers (/kv_event_sources)."""
    options, servers, homes = ["--policy", "kv_aware"], fleet.servers, [0, 1, 1, 0]
    if source == "options":
        options += ["--kv-event-block-size", "16", "--kv-event-model", "built-in"]
        for server, (_, events, replay) in zip(servers, fleet.ports):
            options += ["--kv-event-source", f"{server.url}=tcp://127.0.0.1:{events}"]
            options += ["--kv-event-replay-source", f"{server.url}=tcp://127.0.0.1:{replay}"]

    def ask_directly(*numbers: int) -> None:
        for number in numbers:
            home = Router(servers[homes[number]].url, tmp_path / "log")
            assert ask(home, TEXTS[number], f"{source}-before-{number}") == 0

    def ask_through(router: Router, turn: int, *numbers: int) -> None:
        for number in numbers:
            name = f"{source}-after-{number}-{turn}"
            assert ask(router, f"{TEXTS[number]}\nquestion {turn}", name) > 0
            assert served_by(servers, name) == homes[number]

    ask_directly(0, 1)
    with routing("vllm-router", tmp_path / "log", servers, *options) as router:
        ask_directly(2, 3)  # an event that follows others it has not seen has it ask for those
        for turn in range(2):
            ask_through(router, turn, 0, 1, 2, 3)


def test_loads_are_read(fleet: Fleet, tmp_path: Path) -> None:
    """smg has each worker's load from /v1/loads: with its capacity in tokens, which /metrics does not tell it."""
    with routing("smg", tmp_path / "log", fleet.servers, *POLICIES["smg"]) as router:

        def capacities() -> list[int]:
            return [load["max_total_num_tokens"] for load in router.get("/get_loads")["loads"]]

        until("loads are there", lambda: len(capacities()) == 2 and min(capacities()) > 0, 15)


def test_a_worker_is_lost_and_replaced(fleet: Fleet, tmp_path: Path) -> None:
    """While it is gone the other serves everything; one that starts at its address gets requests again."""
    with ExitStack() as stack:
        routers = {
            kind: stack.enter_context(routing(kind, tmp_path / kind, fleet.servers, *IN_TURN)) for kind in POLICIES
        }
        for kind, router in routers.items():
            assert ask_round(router, fleet.servers, f"{kind}-both") == {0, 1}
        fleet.lose(1)
        for kind, router in routers.items():
            assert ask_round(router, fleet.servers, f"{kind}-alone") == {0}
        fleet.replace(1)
        for kind, router in routers.items():
            uses(router, fleet.servers, 1, f"{kind}-again")


def uses(router: Router, servers: Sequence[Served], number: int, name: str) -> None:
    """Wait until requests get to this server."""
    rounds = count()
    until(
        f"requests get to server {number}", lambda: number in ask_round(router, servers, f"{name}-{next(rounds)}"), 30
    )
