"""`python -m fuzz`: random cases until the time is up or a fault is found. `make fuzz` runs it."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from fuzz.cases import Case
from fuzz.checks import Tally, check
from fuzz.distribution import Table, check_table
from fuzz.found import Found
from fuzz.kept import KEPT
from fuzz.outputs import check_outputs
from fuzz.random_cases import random_case
from fuzz.random_tables import random_table
from fuzz.shrink import as_test, shrink

GRAMMARS_A_CASE = 4
"""How many schemas, expressions and grammars are played for each case."""
CASES_A_TABLE = 100
"""How many cases are run between two tables of outputs."""


def main() -> int:
    args = _arguments()
    torch.set_num_threads(1)  # the models are tiny
    logging.disable(logging.ERROR)  # planted faults are logged
    console = Console()
    seed = random.SystemRandom().randrange(10**9) if args.seed is None else args.seed
    console.print(f"seeds from {seed} on, {args.device}")
    run = Run(console, args.device, args.shrink)
    end = time.monotonic() + args.seconds if args.seconds else None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("cases", total=args.cases)
        if args.kept:
            for kept in KEPT:
                run.case(kept.case.on(args.device), f"kept case {kept.name}")
        number = 0
        while (args.cases is None or number < args.cases) and (end is None or time.monotonic() < end):
            if run.found and not args.keep_going:
                break
            run.case(random_case(seed + number, args.device), f"seed {seed + number}")
            run.outputs(range((seed + number) * GRAMMARS_A_CASE, (seed + number + 1) * GRAMMARS_A_CASE))
            number += 1
            if args.tables and number % CASES_A_TABLE == 0:
                run.table(random_table(seed + number, args.device))
            progress.update(task, completed=number, description=f"cases, {sum(run.found.values())} found")
    run.summary(time.monotonic() - started)
    return 1 if run.found else 0


class Run:
    """The cases tried and the faults found."""

    def __init__(self, console: Console, device: str, seconds: float) -> None:
        self.console, self.device, self.seconds = console, device, seconds
        self.tally = Tally()
        self.found: Counter[str] = Counter()
        self.tables: list[tuple[Table, float]] = []
        self.judged = 0
        """Outputs under schemas, expressions and grammars."""

    def outputs(self, seeds: range) -> None:
        for seed in seeds:
            try:
                self.judged += check_outputs(seed)
            except Found as found:
                self.console.print(str(found), markup=False, highlight=False, style="red")
                self.found[found.kind] += 1

    def case(self, case: Case, name: str) -> None:
        try:
            check(case, self.tally)
        except Found as found:
            self.console.print(f"[bold red]{name}[/]: ", end="")
            self.console.print(str(found), markup=False, highlight=False)
            self.found[found.kind] += 1
            if self.found[found.kind] == 1 and self.seconds:
                self._print_small(case, found)

    def table(self, table: Table) -> None:
        try:
            self.tables.append((table, check_table(table)))
        except Found as found:
            self.console.print(str(found), markup=False, highlight=False, style="red")
            self.found[found.kind] += 1

    def _print_small(self, case: Case, found: Found) -> None:
        """Print the first fault of its kind, shrunk, as a test."""
        messages = {"": str(found)}

        def fails(candidate: Case) -> bool:
            try:
                check(candidate)
            except Found as other:
                messages[repr(candidate)] = str(other)
                return other.kind == found.kind
            return False

        small = shrink(case, fails, self.seconds)
        message = messages.get(repr(small), str(found))
        self.console.print(message, markup=False, highlight=False)
        self.console.print(as_test(small, message), markup=False, highlight=False, soft_wrap=True)

    def summary(self, seconds: float) -> None:
        tally = self.tally
        rules = sorted({rule for rule, _ in tally.requests})
        grid = Grid("drafter", *rules, title="requests")
        for drafter in sorted({drafter for _, drafter in tally.requests}):
            grid.add_row(drafter, *(str(tally.requests[rule, drafter] or "") for rule in rules))
        self.console.print(grid)
        self.console.print(
            f"{tally.cases} cases in {seconds:.0f} s ({tally.cases / max(seconds, 1e-9):.1f} a second), "
            f"{tally.requests.total()} requests, {tally.tokens} tokens, {tally.accepted} of them guessed, "
            f"{tally.replayed} steps replayed, {tally.preemptions} preemptions, {tally.refused} refused, "
            f"{self.judged} outputs under grammars judged"
        )
        if self.tables:
            least = min(p for _, p in self.tables)
            self.console.print(f"{len(self.tables)} tables of outputs, smallest p = {least:.2g}")
        self.console.print(f"found: {dict(self.found) or 'nothing'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, help="stop after this many; without it and --seconds, run endlessly")
    parser.add_argument("--seconds", type=float, help="stop after this long")
    parser.add_argument("--seed", type=int, help="seed of the first case; random if not given")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first fault")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds for shrinking a failing case; 0 for none")
    parser.add_argument("--no-kept", dest="kept", action="store_false", help="skip the cases of earlier faults")
    parser.add_argument("--no-tables", dest="tables", action="store_false", help="skip the tables of outputs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
