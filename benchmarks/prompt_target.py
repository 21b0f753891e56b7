"""How long steps may be that read prompts while others decode: targets compared on simulated arrivals and bursts.

    python benchmarks/prompt_target.py
    python benchmarks/prompt_target.py --targets 25,40,0 --waits 0.5,1,2 --longest 1,2,4

The planner, the cost table and the bound are the engine's own. A step takes what two lines say: --base ms and --decode
us for each row where all decode, --prompt-base ms and --prompt us for each row where prompts are read. By default that
is about what an 8B model in bfloat16 takes on an H200. Prompts of 32 to 1,024 tokens, outputs of 16 to 512; at most 256
requests run at once; a step has up to 8,192 rows. `burst` is 384 requests at once, the others are Poisson arrivals per
second.

`longest` is how many targets a step may take if more prompts wait than can be read within `wait` seconds at one; 1 is a
bound that does not follow the queue. Times in milliseconds; `token p99` is of requests' means.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from stridelm.bench.serving.figures import Figures
from stridelm.bench.serving.loads import Load
from stridelm.schedule import Configured, prompt_rows
from stridelm.schedule.step_cost import StepCost
from stridelm.simulate.card import Card, Drafting, Limits
from stridelm.simulate.curve import DecodePoint, PromptPoint
from stridelm.simulate.fleet import Fleet
from stridelm.simulate.table import PLAIN, DrafterCosts
from stridelm.simulate.workload import Job

PROMPT, OUTPUT, BURST, REQUESTS, ROWS = (32, 1024), (16, 512), 384, 256, 8192
COLUMNS = ("tokens/s", "first p50", "first p99", "token p99", "gap p99", "longest gap")


def costs_of(base: float, decode: float, prompt_base: float, prompt: float) -> DrafterCosts:
    """Bases in milliseconds, the others in microseconds."""
    decodes = tuple(DecodePoint(n, n, 0, 0.0, base / 1e3 + decode / 1e6 * n) for n in (1, REQUESTS))
    prompts = tuple(PromptPoint(n, 0.0, prompt_base / 1e3 + prompt / 1e6 * n) for n in (1, ROWS))
    return DrafterCosts((0,), decodes, prompts, 0)


def jobs_of(count: int, seed: int) -> list[Job]:
    draw = random.Random(seed)
    return [Job.drawn(draw.randint(*PROMPT), draw.randint(*OUTPUT), (), seed, number) for number in range(count)]


def measure(costs: DrafterCosts, target: float, rate: float | None, seconds: float) -> dict[str, float]:
    limits = Limits(max_num_seqs=REQUESTS, max_num_batched_tokens=ROWS, itl_target_ms=target, lag=1)
    fleet = Fleet([Card(limits, Drafting(PLAIN), Configured(StepCost()), costs.seconds)])
    fleet.run(jobs_of(64, 1), 16)  # what steps cost is known when an engine is ready
    count = BURST if rate is None else int(rate * seconds)
    load = Load(max_concurrency=BURST) if rate is None else Load(request_rate=rate)
    run = fleet.run(jobs_of(count, 0), load.max_concurrency, load.arrivals(count, 0))
    figures = Figures.of([run])
    gaps = [b - a for each in run.answered for a, b in itertools.pairwise(each.at)]
    values = (figures.tokens_per_s, figures.ttft_ms.p50, figures.ttft_ms.p99, figures.tpot_ms.p99, figures.itl_ms.p99)
    return dict(zip(COLUMNS, (*(value or 0.0 for value in values), 1e3 * max(gaps)), strict=True))


def bounds(targets: Sequence[float], waits: Sequence[float], longest: Sequence[float]) -> list[tuple[float, ...]]:
    """(target, wait, longest), each bound once."""
    fixed = [(target, waits[0], 1.0) for target in targets]
    following = itertools.product((target for target in targets if target), waits, (n for n in longest if n > 1))
    return [*fixed, *following]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="25,40,0", help="milliseconds; 0 for no bound")
    parser.add_argument("--waits", default=str(prompt_rows.PATIENCE), help="seconds")
    parser.add_argument("--longest", default=f"1,{prompt_rows.LONGEST:g}", help="targets")
    parser.add_argument("--rates", default="4,12,24", help="arrivals per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
    parser.add_argument("--base", type=float, default=4.4)
    parser.add_argument("--decode", type=float, default=35.0)
    parser.add_argument("--prompt-base", type=float, default=8.0)
    parser.add_argument("--prompt", type=float, default=22.0)
    options = parser.parse_args()
    targets, waits, longest, rates = (
        [float(each) for each in getattr(options, name).split(",")] for name in ("targets", "waits", "longest", "rates")
    )
    costs = costs_of(options.base, options.decode, options.prompt_base, options.prompt)
    table, rows = Table("load", "target", "longest", "wait", *COLUMNS, box=None), []
    for rate in (None, *rates):
        for target, wait, most in bounds(targets, waits, longest):
            prompt_rows.PATIENCE, prompt_rows.LONGEST = wait, most
            found = measure(costs, target, rate, options.seconds)
            load = "burst" if rate is None else f"{rate:g}/s"
            rows.append({"load": load, "target": target, "longest": most, "wait": wait, **found})
            how = (
                f"{target:g}" if target else "none",
                f"{most:g}" if most > 1 else "",
                f"{wait:g}" if most > 1 else "",
            )
            table.add_row(load, *how, *(f"{value:,.1f}" for value in found.values()))
    console = Console(width=140, highlight=False)
    console.print(table)
    console.print(json.dumps({"benchmark": "prompt_target", "settings": vars(options), "rows": rows}), soft_wrap=True)


if __name__ == "__main__":
    main()
