"""How many contexts run at once in the same memory: all layers in one page group, groups with the split of the start,
and groups whose split follows the traffic.

    python benchmarks/contexts_admitted.py --memory 64

No model runs: planner, ledger, the sizes of tensors and the policy are the engine's own, and a request's tokens are
made up. Waves of requests follow each other in one engine, more than can run at once: short contexts, long ones, short
ones again. The figure is how many whole prompts were in memory at once.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from stridelm.cache.backing import rounded
from stridelm.cache.layout import FULL, HeadsKV, LayerStates, windows_of
from stridelm.cache.ledger import Ledger
from stridelm.cache.pool import MemoryBudget
from stridelm.config import EngineConfig
from stridelm.engine.memory import count_pages
from stridelm.engine.resplit import Resplit
from stridelm.params import SamplingParams, Speculation
from stridelm.schedule import Budget, Planner, Queue
from stridelm.schedule.rows import longest
from stridelm.types import Request, StepPlan

DTYPE, CHUNK = torch.bfloat16, 2 << 20
MAX_LENGTH, SEQS, ROWS = 131072, 256, 8192
OUTPUT = 256
"""Tokens that a request may emit."""
IDLE = 64
"""Steps without another admission after which a wave has got what it can."""


@dataclass(frozen=True)
class Shape:
    title: str
    states: LayerStates


def five_to_one(layers: int, window: int, sliding: tuple[int, int], full: tuple[int, int]) -> LayerStates:
    """sliding, full: KV heads and their width."""
    return tuple(
        HeadsKV.of(full[0], *full) if layer % 6 == 5 else HeadsKV.of(sliding[0], *sliding, window)
        for layer in range(layers)
    )


SHAPES = {
    "mistral": Shape("Mistral-7B-v0.1: 32 layers, window 4,096", (HeadsKV.of(32, 8, 128, 4096),) * 32),
    "gemma3": Shape("Gemma-3-27B: 52 sliding (1,024), 10 full", five_to_one(62, 1024, (16, 128), (16, 128))),
    "gemma4": Shape("Gemma4TextConfig: 25 sliding (512), 5 full", five_to_one(30, 512, (4, 256), (4, 512))),
}
"""gemma4: the defaults of transformers' configuration class."""


@dataclass
class Sizes:
    """A pool's sizes on a GPU, without its tensors."""

    states: LayerStates
    page_size: int
    pages: dict[str, int]
    most: Mapping[str, int] | None
    budget: int = 0
    _tensors: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for state in self.states:
            for shape in state.tensors().values():
                page = self.page_size * int(torch.Size(shape).numel()) * DTYPE.itemsize
                self._tensors.setdefault(state.group, []).append(page)
        self.budget = self.bytes_at(self.pages)

    def bytes_at(self, pages: Mapping[str, int]) -> int:
        return sum(rounded((n + 1) * page, CHUNK) for group, n in pages.items() for page in self._tensors[group])

    def move(self, group: str, renamed: Mapping[int, int]) -> None:
        """There are no contents."""

    def resize(self, pages: Mapping[str, int]) -> None:
        self.pages.update(pages)
        assert self.bytes_at(self.pages) <= self.budget


class Server:
    """Everything of an engine that decides who runs."""

    def __init__(self, states: LayerStates, memory: int, moves: bool) -> None:
        config = EngineConfig(max_num_seqs=SEQS, max_num_batched_tokens=ROWS, kv_memory_fraction=1.0)
        room = MemoryBudget(torch.device("cuda"), memory)
        pages, most = count_pages(config, states, MAX_LENGTH, DTYPE, room, elastic=True)
        self.ledger = Ledger(dict(pages), config.page_size, windows=windows_of(states), prefix_caching=False)
        sizes = Sizes(states, config.page_size, pages, most if moves else None)
        self.resplit = Resplit(self.ledger, sizes, MAX_LENGTH, ROWS)
        self.queue, self.planner = Queue(SEQS), Planner(Budget(ROWS, SEQS))
        self.resplits = self.preemptions = self.names = 0

    def wave(self, context: int) -> int | None:
        """Prompts of this length that are in memory at once; None if one alone does not fit."""
        whole = best = idle = 0
        for _ in range(SEQS):
            prompt = random.Random(self.names).choices(range(1000), k=context)
            params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
            one = Request(str(self.names), prompt, params, Speculation(), arrival=self.names)
            need = self.ledger.most_held(longest(one, MAX_LENGTH))
            if not self.resplit.most_pages(need).cover(need):
                return None
            self.names += 1
            self.queue.add(one)
        while idle < IDLE:
            self.step()
            whole = sum(request.computed >= context for request in self.queue.running)
            idle = idle + 1 if whole <= best else 0
            best = max(best, whole)
        for request in list(self.queue):
            self.queue.remove(request.id)
            self.ledger.release(request)
        self.ledger.check([])
        return best

    def step(self) -> None:
        plan = self.planner.plan(self.queue, self.ledger)
        totals = self.resplit.totals(plan, self.queue.running, stuck=not (plan.spans or plan.preempted))
        if totals is not None:
            self.resplit.apply(totals)
            self.resplits += 1
            plan = self.planner.plan(self.queue, self.ledger)
        self.run(plan)

    def run(self, plan: StepPlan) -> None:
        """Enter the plan, and commit what it reads."""
        for request in plan.preempted:
            self.ledger.release(request)
        self.preemptions += len(plan.preempted)
        self.queue.apply(plan)
        for request in plan.admitted:
            self.ledger.admit(request)
        with self.ledger.reserve(plan.spans) as transaction:
            transaction.commit([0] * len(plan.spans))
        for span in plan.spans:
            if span.decides and len(span.request.output_ids) < OUTPUT - 1:
                span.request.output_ids.append(0)


def one_group(states: LayerStates) -> LayerStates:
    """Layers that keep everything, whatever they see of it."""
    changes: dict[str, Any] = {"group": FULL, "window": None}
    return tuple(replace(state, **changes) for state in states)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=64, metavar="GIB", help="GiB of KV (default: %(default)s)")
    parser.add_argument("--contexts", default="2048,32768,2048", help="tokens of each wave's prompts")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    args = parser.parse_args()
    contexts = [int(each) for each in args.contexts.split(",")]
    table = Table("shape", "split", *(f"{context:,}" for context in contexts), "re-splits", "preemptions")
    for name in args.shapes.split(","):
        shape = SHAPES[name]
        for split, states, moves in (
            ("one group", one_group(shape.states), False),
            ("of the start", shape.states, False),
            ("follows traffic", shape.states, True),
        ):
            server = Server(states, int(args.memory * 2**30), moves)
            found = [server.wave(context) for context in contexts]
            table.add_row(shape.title, split, *map(str, found), str(server.resplits), str(server.preemptions))
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
