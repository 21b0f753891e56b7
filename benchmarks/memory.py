"""The cost of `stride generate`: peak resident memory, and time from the start of the process to the first text.

    python benchmarks/memory.py [MODEL] --json results/memory.jsonl

Each run is a separate process, started with a warm disk cache. Memory is the peak resident set that the kernel reports
for that process; the first text is the first byte on its standard output.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from stridelm.bench.prompts import load_prompts
from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP

MAX_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Settings:
    model: str | None
    max_tokens: int
    repeats: int
    drafter: str | None


@dataclass(frozen=True)
class Sample:
    peak_mib: float
    first_text_s: float
    total_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drafter", help="as for stride generate (default: its default)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    settings = Settings(args.model, args.max_tokens, args.repeats, args.drafter)
    samples = [sample(settings) for _ in range(args.repeats)]
    peak = max(one.peak_mib for one in samples)
    first = statistics.median(one.first_text_s for one in samples)
    console = Console(highlight=False)
    console.print(f"peak resident memory {peak:.0f} MiB (maximum of {len(samples)} runs)")
    console.print(f"start to first text {first:.2f} s (median of {len(samples)} runs)")
    if args.json:
        append_result(
            args.json,
            "memory",
            settings,
            peak_mib=peak,
            first_text_s=first,
            runs=[asdict(one) for one in samples],
        )
    return 0


def sample(settings: Settings) -> Sample:
    """One run of `stride generate`. Raises RuntimeError with its error output if it fails."""
    command = [sys.executable, "-m", "stridelm.cli.main", "generate"]
    command += [settings.model] if settings.model else []
    command += ["--prompt", load_prompts().prompts[0].text, "--temperature", "0"]
    command += ["--max-tokens", str(settings.max_tokens)]
    command += ["--drafter", settings.drafter] if settings.drafter else []
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.read(1)
    first_s = time.perf_counter() - start
    process.stdout.read()
    errors = process.stderr.read().decode(errors="replace")
    # wait4 gives this child's own peak; getrusage would give the largest of all children so far.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not first:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {errors.strip()}")
    return Sample(usage.ru_maxrss * MAX_RSS_UNIT / 2**20, first_s, time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
