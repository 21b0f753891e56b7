"""Where a captured step's time goes: kernels by name, and the gaps between them.

A kernel's time is what it adds to a step: how long it runs after those before it have ended. "us each" is from its
start, which may be long before what it reads is there.

python benchmarks/profile_step.py --batch 1 --decoding plain
python benchmarks/profile_step.py --model qwen3-30b-a3b --batch 16
"""

from __future__ import annotations

import argparse
import collections
import tempfile
from pathlib import Path

from device_trace import Activity, added_us, gap_us, idle_us, trace_steps
from gpu_decode import Settings, decoding_requests, open_engine, write_heads
from model_shapes import SHAPES
from rich.console import Console
from rich.table import Table

STEPS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default=next(iter(SHAPES)), help="whose shape")
    parser.add_argument("--quantization", choices=("fp8",), help="how weights are stored; without it, in bfloat16")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--decoding", default="plain")
    parser.add_argument("--mode", default="captured")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--layers", type=int, help="default: the model's")
    args = parser.parse_args()
    shape = SHAPES[args.model]
    settings = Settings(
        tuple(map(int, args.batch.split(","))),
        args.prompt,
        args.output,
        args.layers or shape.config["num_hidden_layers"],
        1,
        (args.mode,),
        (args.decoding,),
        4.28,
        args.model,
        quantization=args.quantization,
    )
    with tempfile.TemporaryDirectory() as folder:
        shape.write(folder, settings.layers)
        engine = open_engine(folder, write_heads(Path(folder), settings), args.mode, settings)
        console = Console(width=150)
        for batch in settings.batch:
            with decoding_requests(engine, args.decoding, batch, settings):  # the first loads its head
                activities = trace_steps(engine, STEPS)
            console.print(as_table(activities, f"{shape.title}, batch {batch}, {args.decoding}, {args.mode}"))
    return 0


def as_table(activities: list[Activity], title: str) -> Table:
    added: collections.defaultdict[str, float] = collections.defaultdict(float)
    spent: collections.defaultdict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    for activity, us in zip(activities, added_us(activities), strict=True):
        added[activity.name] += us
        spent[activity.name] += activity.end - activity.start
        counts[activity.name] += 1
    whole = max(activity.end for activity in activities) - activities[0].start
    idle, gap = idle_us(activities) / STEPS, gap_us(activities)
    table = Table(title=f"{title}: {whole / STEPS:.0f} us per step")
    for column in ("us/step", "share", "launches", "us added", "us each", "kernel"):
        table.add_column(column, justify="right" if column != "kernel" else "left")
    for name, us in sorted(added.items(), key=lambda each: -each[1])[:28]:
        table.add_row(
            f"{us / STEPS:.1f}",
            f"{us / whole:.1%}",
            f"{counts[name] / STEPS:.1f}",
            f"{us / counts[name]:.2f}",
            f"{spent[name] / counts[name]:.2f}",
            name[:90],
        )
    table.add_row(f"{idle:.1f}", f"{idle * STEPS / whole:.1%}", f"{len(activities) / STEPS:.0f}", "", "", "nothing ran")
    if gap is not None:
        table.add_row(f"{gap:.1f}", f"{gap * STEPS / whole:.1%}", "", "", "", "of that, between captured steps")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
