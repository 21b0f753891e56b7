"""`stride explain`: say of each step in a trace why its requests got the rows they got."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Line = dict[str, Any]

CAUSES = {
    "prompt": "reads its prompt",
    "plain": "drafts nothing",
    "window": "runs its whole window or nothing",
    "asked": "its own depth",
    "behind": "its drafter catches up first",
    "ending": "ends too soon to use more",
    "found": "its drafter found no more",
    "room": "rows or pages were short",
    "probe": "tried, to learn what it brings",
    "chosen": "most tokens per second",
}
"""types.Cause -> what it means for the depth."""
NOT_WORTH_IT = "no level is worth its row"
"""What "chosen" means where nothing is drafted for any request."""


HEADINGS = (
    *("request", "real rows", "drafted", "by", "accepted", "depth", "at most", "chances of its levels", "worth from"),
    "why that depth",
)
WORDS = ("request", "by", "why that depth")
"""Those above words."""


def add_parser(subparsers: Any) -> None:
    """Add `explain` to the main command."""
    parser = subparsers.add_parser("explain", help="say why steps drafted as they did", description=__doc__)
    parser.add_argument("trace", type=Path, metavar="FILE", help="written by `stride generate --trace FILE`")
    parser.add_argument("--step", type=int, metavar="N", help="only this step, from 1 (default: all)")


def run(args: argparse.Namespace) -> int:
    """Print a table for each step. Raises ValueError if the file is not a trace, or has no such step."""
    from rich.console import Console

    console, shown = Console(), 0
    for step, lines in groupby(read_trace(args.trace), key=lambda line: line["step"]):
        if args.step in (None, step):
            console.print(explained(step, list(lines)))
            shown += 1
    if not shown:
        wanted = "no steps" if args.step is None else f"no step {args.step}"
        raise ValueError(f"{args.trace} has {wanted}; steps are numbered from 1")
    return 0


def read_trace(path: Path) -> Iterator[Line]:
    """The lines of a trace. Raises ValueError for a file that cannot be read or is none."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                line = json.loads(text)
                if not (isinstance(line, dict) and {"step", "request", "reason", "rows", "verdict"} <= line.keys()):
                    raise ValueError(f"line {number} has no reason")
                yield line
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; name a trace") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a trace ({error}); write one with stride generate --trace FILE") from error


def explained(step: int, lines: list[Line]) -> Table:
    """A row for each request of the step."""
    from rich.table import Table

    expected = next((line["reason"]["seconds"] for line in lines if line["reason"]["seconds"] is not None), None)
    title = f"Step {step}: {sum(len(line['rows']) for line in lines)} rows"
    if expected is not None:
        title += f", expected to take {1e3 * expected:.2f} ms"
    table = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in WORDS else "right")
    for line in lines:
        reason, verdict = line["reason"], line["verdict"]
        most, least = reason["most"], reason["least"]
        table.add_row(
            line["request"],
            str(sum(row["role"] == "real" for row in line["rows"])),
            str(verdict["drafted"]),
            line.get("source") or "",
            str(verdict["accepted"]),
            f"{line['depth']} of {reason['levels']}",
            "" if most is None else str(most),
            " ".join(f"{chance:.2f}" for chance in reason["chances"]),
            "" if least is None else f"{least:.2f}",
            NOT_WORTH_IT if reason["cause"] == "chosen" and most == 0 else CAUSES[reason["cause"]],
        )
    return table
