"""All attacks at once for minutes, beside honest streams: `PYTHONPATH=tests python -m attacks.soak --minutes 10`.

Two hostile clients attack, and an honest one streams, each with a key of its own: an attack without one gets 401.
Honest ones also have addresses of their own, because a connection has no key before its first head. Meanwhile the
hostile ones and another honest one compete in turn for everything that they share (shared.py). Reported: whether honest
tokens equal those of an undisturbed run, what of the honest ones failed in competitions, the time to the first token
beside the attacks and alone, memory of each process before and after, and what is held at the end. Fails if a token
differs, if anything honest failed or was turned away, if a first token takes longer than --first-s, if a process has
grown by more than a tenth, or if anything is held.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx2 as httpx
import openai
import psutil

from attacks.attacks import ATTACKS
from attacks.raw import Address, address_of
from attacks.shared import FULL, KEYS, SHARED, Client, Clients, Law
from attacks.shared import OPTIONS as SHARED_OPTIONS
from support.doubles.processes import children_of
from support.doubles.server import PROMPT, Served, gauges, offline, serving, settle

HONEST = Client(KEYS.honest.key, "127.0.0.3")
STREAMING = [Client(f"streaming-{i}", f"127.0.0.{4 + i}") for i in range(4)]
"""One for each stream: while all places are taken, only a client that has none is given one."""
OPTIONS = (
    *SHARED_OPTIONS,
    *("--timeout-head", "3", "--timeout-body-idle", "3", "--timeout-write", "3", "--max-unread-mib", "16"),
    *(option for client in (*KEYS.hostile, HONEST, *STREAMING) for option in ("--api-key", str(client.key))),
    *("--operator-key", "operator"),
)
QUIET_S = 70.0
"""Longer than any timeout, and longer than unused memory is kept."""
KEPT = 1.1
"""Allowed ratio of a process's memory at the end to that before the attacks."""
PROMPTS = (PROMPT, "def fibonacci(n):", "import os\n\n\ndef walk(path):\n")
TOKENS = 24
MIB = 1 << 20


@dataclass
class Honest:
    """Observations of clients whose expected output is known beforehand."""

    expected: dict[str, str]
    first_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    turned_away: list[str] = field(default_factory=list)
    """Told to retry (429, 503), or disconnected to make room."""

    def ask(self, served: Served, prompt: str, client: Client = STREAMING[0]) -> None:
        began, said = time.monotonic(), ""
        try:
            with served.openai(str(client.key), client.address) as connection:
                stream = connection.completions.create(
                    model="built-in", prompt=prompt, temperature=0, max_tokens=TOKENS, stream=True
                )
                for number, event in enumerate(stream):
                    if number == 0:
                        self.first_s.append(time.monotonic() - began)
                    said += event.choices[0].text
        except (openai.RateLimitError, openai.APIConnectionError) as error:
            self.turned_away.append(f"turned away: {type(error).__name__}: {error} ({error.__cause__!r})")
            if said and not self.expected[prompt].startswith(said):
                self.wrong.append(f"{said!r} before {error}")
            time.sleep(0.2)
            return
        except openai.APIError as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
            return
        if said != self.expected[prompt]:
            self.wrong.append(f"{said!r} instead of {self.expected[prompt]!r}")


def repeat(what: Callable[[], None], end: float) -> threading.Thread:
    def run() -> None:
        while time.monotonic() < end:
            what()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def attack(address: Address, names: list[str], done: Counter[str]) -> None:
    name = random.choice(names)
    try:
        ATTACKS[name](address)
        done[name] += 1
    except (OSError, httpx.TransportError):  # refused, reset, too slow: as intended
        done[f"{name}, turned away"] += 1


def compete(served: Served, laws: Iterator[tuple[str, Law]], done: Counter[str], failed: list[str]) -> None:
    """The next competition."""
    name, law = next(laws)
    try:
        law(served, Clients(KEYS.hostile, HONEST))
        done[name] += 1
    except AssertionError as error:
        if error.args == (FULL,):  # other attacks kept the hostile clients from filling it
            done[f"{name}, not filled"] += 1
        else:
            failed.append(f"{name}: {error}")
    except Exception as error:  # reported, and the soak goes on
        failed.append(f"{name}: {type(error).__name__}: {error}")


def memory(served: Served) -> dict[str, float]:
    """MiB of each process."""
    server = psutil.Process(served.process.pid)
    found = {"http": server.memory_info().rss / MIB}
    for child in children_of(server.pid):
        with suppress(psutil.NoSuchProcess):
            line = child.cmdline()
            name = "engine" if "stridelm.server.engine_process" in line else f"workers for {line[-2]}"
            found[name] = child.memory_info().rss / MIB
    return found


def warm_up(served: Served, address: Address, names: list[str]) -> None:
    """Start every process and run everything once, so that permanent allocations are not counted as leaks."""
    for name in names:
        with suppress(OSError, httpx.TransportError):
            ATTACKS[name](address)
    for shared in SHARED:
        if callable(shared.law):
            with suppress(Exception):  # reported when it competes
                shared.law(served, KEYS)
    for length in range(4, 404, 4):  # the engine keeps a bounded number of products, one for each number of rows
        prompt = [(7 * length + n) % 500 for n in range(length)]
        with served.openai("honest") as client:
            client.completions.create(model="built-in", prompt=prompt, temperature=0, max_tokens=1)


def percentile(times: list[float], part: float) -> float:
    return sorted(times)[min(int(len(times) * part), len(times) - 1)] if times else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--attackers", type=int, default=4)
    parser.add_argument("--streams", type=int, default=2, choices=range(1, len(STREAMING) + 1))
    parser.add_argument("--first-s", type=float, default=5.0, help="most seconds that a first token may take")
    parser.add_argument("--only", action="append", choices=sorted(ATTACKS), help="run only this attack; repeatable")
    args = parser.parse_args()
    os.environ["ATTACK_KEYS"] = " ".join(str(client.key) for client in KEYS.hostile)
    expected = {p: offline([p], temperature=0, max_tokens=TOKENS)[0].text for p in PROMPTS}
    alone, beside, done = Honest(expected), Honest(expected), Counter[str]()
    laws = itertools.cycle([(shared.name, shared.law) for shared in SHARED if callable(shared.law)])
    competitions, failed = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory), *OPTIONS) as served:
        address = address_of(served.url)
        names = args.only or sorted(ATTACKS)
        warm_up(served, address, names)
        time.sleep(QUIET_S)
        for _ in range(10):
            for prompt in PROMPTS:
                alone.ask(served, prompt)
        before, end = memory(served), time.monotonic() + 60 * args.minutes
        threads = [repeat(lambda: attack(address, names, done), end) for _ in range(args.attackers)]
        threads += [repeat(lambda: compete(served, laws, competitions, failed), end)]
        for own in STREAMING[: args.streams]:
            threads += [repeat(partial(lambda own: beside.ask(served, random.choice(PROMPTS), own), own), end)]
        for thread in threads:
            thread.join()
        time.sleep(QUIET_S)
        figures, after = settle(served, 30), memory(served)
        with served.http(headers={"authorization": "Bearer operator"}) as client:
            held = client.get("/get_load").json()[0]["num_reqs"]
        log = served.log.read_text(encoding="utf-8", errors="replace")
        restarts = gauges(served)["stride_engine_restarts_total"]
        ended = served.stop()
    report = {
        "attacks": dict(sorted(done.items())),
        "competitions": dict(sorted(competitions.items())),
        "honest failures": len(failed),
        "honest": len(beside.first_s),
        "wrong": len(beside.wrong),
        "turned away": len(beside.turned_away),
        "first token p50, p99 alone": [round(percentile(alone.first_s, part), 3) for part in (0.5, 0.99)],
        "first token p50, p99, max beside": [round(percentile(beside.first_s, part), 3) for part in (0.5, 0.99, 1)],
        "MiB before": {name: round(size) for name, size in before.items()},
        "MiB after": {name: round(size) for name, size in after.items()},
        "samples held": held,
        "kv usage": figures["stride_kv_usage_ratio"],
        "engine restarts": restarts,
        "log bytes": len(log),
        "closed or refused": dict(Counter(re.findall(r"limits: ((?:closed|refused) [a-z ]+)", log))),
        "exit": ended,
    }
    print(json.dumps(report, indent=1))
    for what in [*alone.wrong, *beside.wrong, *beside.turned_away, *failed][:10]:
        print(what)
    grown = {name: size for name, size in after.items() if size > KEPT * before.get(name, 0.0)}
    print("memory grew too much:", {name: round(size) for name, size in grown.items()} or "in no process")
    late = [time for time in beside.first_s if time > args.first_s]
    print(f"first tokens after more than {args.first_s:g} s:", len(late))
    wrong = alone.wrong or beside.wrong or beside.turned_away or failed or restarts or ended
    clean = not (wrong or late or grown or held or figures["stride_kv_usage_ratio"])
    return 0 if clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
