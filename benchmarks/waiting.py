"""How OpenMP's spin count affects speed on a CPU, alone and beside other busy processes.

    python benchmarks/waiting.py --loops 0,1 --streams 1,8,64 --seconds 60

Every setting has its own process with the built-in model, which sleeps until its turn; they take turns, so that
whatever else the machine does affects all of them. `--loops` is how many busy processes run beside them all the while.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median

from rich.console import Console

from stridelm.threads import THEIRS, WAITING

WAYS: dict[str, dict[str, str]] = {
    "300,000 spins (GNU's default)": {"GOMP_SPINCOUNT": "300000"},
    "30,000 spins": {"GOMP_SPINCOUNT": "30000"},
    f"{int(WAITING['GOMP_SPINCOUNT']):,} spins (Stride's default)": WAITING,
    "3,000 spins": {"GOMP_SPINCOUNT": "3000"},
    "none (OMP_WAIT_POLICY=passive)": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
WORKER = """
import sys, time
from stridelm import LLM, SamplingParams
llm = LLM()
def speed(streams, tokens):
    began = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate(["def fibonacci(n):"] * streams, params)
    return streams * tokens / (time.perf_counter() - began)
speed(1, 20)
print("ready", flush=True)
for line in sys.stdin:
    print(speed(*map(int, line.split())), flush=True)
"""


def start(settings: dict[str, str]) -> subprocess.Popen[str]:
    unset = (*THEIRS, "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | settings
    command = [sys.executable, "-c", WORKER]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def ask(worker: subprocess.Popen[str], streams: int, tokens: int) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(f"{streams} {tokens}\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", default="0,2", help="busy processes beside them, one measurement for each number")
    parser.add_argument("--streams", default="1", help="concurrent streams, one measurement for each number")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--tokens", type=int, default=40, help="of each turn")
    args = parser.parse_args()
    workers = {}
    for name, settings in WAYS.items():
        workers[name] = start(settings)
        stdout = workers[name].stdout
        assert stdout is not None and stdout.readline() == "ready\n"
    try:
        for count in map(int, args.loops.split(",")):
            for streams in map(int, args.streams.split(",")):
                measure(workers, count, streams, args.seconds, args.tokens)
    finally:
        for worker in workers.values():
            worker.kill()


def measure(workers: dict[str, subprocess.Popen[str]], count: int, streams: int, seconds: float, tokens: int) -> None:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    speeds: dict[str, list[float]] = {name: [] for name in workers}
    try:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            for name, worker in workers.items():
                speeds[name].append(ask(worker, streams, tokens))
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{count} beside, {streams} streams, load average {os.getloadavg()[0]:.1f}")
    for name, found in speeds.items():
        console.print(
            f"  {name:36} {median(found):7.1f} tokens/s ({min(found):.1f} to {max(found):.1f}, {len(found)} turns)"
        )


if __name__ == "__main__":
    main()
