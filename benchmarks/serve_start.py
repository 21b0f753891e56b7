"""How long `stride serve` takes until it serves: checkouts of Stride in turns.

    python benchmarks/serve_start.py ../before . --turns 5

Each serves the built-in model, or --model, from its own `src` with this Python, alone on the machine. Reported are the
seconds from its launch to the line that announces it, and the processor seconds of all its processes until then.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import psutil
from rich.console import Console
from server_turns import started


def start(checkout: str, *options: str) -> tuple[float, float]:
    """Seconds until one start serves, and processor seconds."""
    began = time.monotonic()
    process, _ = started(checkout, *options)
    seconds = time.monotonic() - began
    try:
        server = psutil.Process(process.pid)
        spent = sum(sum(each.cpu_times()[:2]) for each in (server, *server.children(recursive=True)))
    finally:
        process.terminate()
        process.wait()
    return seconds, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+")
    parser.add_argument("--model", help="checkpoint directory")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    options = [args.model] if args.model else []
    console = Console(soft_wrap=True, highlight=False)
    for checkout in args.checkouts:
        start(checkout, *options)  # reads files into the system's cache, and compiles what is not yet
    starts: dict[str, list[tuple[float, float]]] = {checkout: [] for checkout in args.checkouts}
    for turn in range(args.turns):
        for checkout in args.checkouts if turn % 2 == 0 else args.checkouts[::-1]:
            starts[checkout].append(start(checkout, *options))
        console.print(f"turn {turn}: " + ", ".join(f"{starts[name][-1][0]:.1f} s" for name in args.checkouts))
    for checkout, found in starts.items():
        seconds, spent = zip(*found, strict=True)
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        console.print(f"{checkout}: {median(seconds):.1f} s ({spread}), {median(spent):.1f} processor seconds")


if __name__ == "__main__":
    main()
