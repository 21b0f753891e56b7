"""All attacks at once for minutes, beside honest streams: `PYTHONPATH=tests python -m attacks.soak --minutes 10`.

Reported: whether honest tokens were those that are said alone, the time to their first token beside the attacks and
alone, memory of each process before and after, and what is held when all is over. Fails if any of it is not as it was.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import openai
import psutil

from attacks.attacks import ATTACKS
from attacks.raw import Address, address_of
from support.server import PROMPT, Served, gauges, offline, serving, settle

OPTIONS = (
    *("--max-connections", "256", "--timeout-head", "3", "--timeout-body-idle", "3", "--timeout-write", "3"),
    *("--max-buffered-mib", "64", "--max-unread-mib", "16", "--max-queue", "64"),
)
PROMPTS = (PROMPT, "def fibonacci(n):", "import os\n\n\ndef walk(path):\n")
TOKENS = 24
MIB = 1 << 20


@dataclass
class Honest:
    """What clients saw that ask for what can be known beforehand."""

    expected: dict[str, str]
    first_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    turned_away: int = 0
    """Told to come again (429, 503), or whose connection made room: no fault, but to be seen."""

    def ask(self, served: Served, prompt: str) -> None:
        began, said = time.monotonic(), ""
        try:
            with served.openai() as client:
                stream = client.completions.create(
                    model="built-in", prompt=prompt, temperature=0, max_tokens=TOKENS, stream=True
                )
                for number, event in enumerate(stream):
                    if number == 0:
                        self.first_s.append(time.monotonic() - began)
                    said += event.choices[0].text
        except (openai.RateLimitError, openai.APIConnectionError) as error:
            self.turned_away += 1
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
    except OSError:  # refused, reset, too slow: as it should be
        done[f"{name}, turned away"] += 1


def memory(served: Served) -> dict[str, float]:
    """MiB of each process."""
    server = psutil.Process(served.process.pid)
    found = {"http": server.memory_info().rss / MIB}
    for child in server.children():
        name = "engine" if "engine_process" in " ".join(child.cmdline()) else "grammars"
        found[name] = child.memory_info().rss / MIB
    return found


def percentile(times: list[float], part: float) -> float:
    return sorted(times)[min(int(len(times) * part), len(times) - 1)] if times else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--attackers", type=int, default=4)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--only", action="append", choices=sorted(ATTACKS), help="repeated: any of them")
    args = parser.parse_args()
    expected = {p: offline([p], temperature=0, max_tokens=TOKENS)[0].text for p in PROMPTS}
    alone, beside, done = Honest(expected), Honest(expected), Counter[str]()
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory), *OPTIONS) as served:
        address = address_of(served.url)
        for _ in range(10):
            for prompt in PROMPTS:
                alone.ask(served, prompt)
        before, end = memory(served), time.monotonic() + 60 * args.minutes
        names = args.only or sorted(ATTACKS)
        threads = [repeat(lambda: attack(address, names, done), end) for _ in range(args.attackers)]
        threads += [repeat(lambda: beside.ask(served, random.choice(PROMPTS)), end) for _ in range(args.streams)]
        for thread in threads:
            thread.join()
        time.sleep(8)  # longer than anything may be waited for
        figures, after = settle(served, 30), memory(served)
        with served.http() as client:
            held = client.get("/get_load").json()[0]["num_reqs"]
        log = served.log.stat().st_size
        restarts = gauges(served)["stride_engine_restarts_total"]
        ended = served.stop()
    report = {
        "attacks": dict(sorted(done.items())),
        "honest": len(beside.first_s),
        "wrong": len(beside.wrong),
        "turned away": beside.turned_away,
        "first token p50, p99 alone": [round(percentile(alone.first_s, part), 3) for part in (0.5, 0.99)],
        "first token p50, p99 beside": [round(percentile(beside.first_s, part), 3) for part in (0.5, 0.99)],
        "MiB before": {name: round(size) for name, size in before.items()},
        "MiB after": {name: round(size) for name, size in after.items()},
        "samples held": held,
        "kv usage": figures["stride_kv_usage_ratio"],
        "engine restarts": restarts,
        "log bytes": log,
        "exit": ended,
    }
    print(json.dumps(report, indent=1))
    for what in [*alone.wrong, *beside.wrong][:10]:
        print(what)
    clean = not (alone.wrong or beside.wrong or held or restarts or ended or figures["stride_kv_usage_ratio"])
    return 0 if clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
