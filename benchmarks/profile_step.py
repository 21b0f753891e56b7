"""Where a captured step's time goes: kernels by name, and the gaps between them.

python benchmarks/profile_step.py --batch 1 --decoding plain
"""

from __future__ import annotations

import argparse
import collections
import random
import tempfile
from pathlib import Path

from device_trace import gap_us, idle_us, trace_steps
from gpu_decode import Settings, open_engine, speculation
from model_shapes import LLAMA_8B, write_eagle3
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from stridelm.params import SamplingParams

STEPS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1")
    parser.add_argument("--decoding", default="plain")
    parser.add_argument("--mode", default="captured")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    args = parser.parse_args()
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**LLAMA_8B, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        batch = int(args.batch)
        settings = Settings((batch,), args.prompt, args.output, 32, 1, (args.mode,), (args.decoding,), 4.28)
        head = write_eagle3(Path(folder) / "eagle3", settings.layers) if "eagle" in args.decoding else None
        engine = open_engine(folder, head, args.mode, settings)
    rng = random.Random(0)
    params = SamplingParams(
        max_tokens=args.output, temperature=0.0, ignore_eos=True, speculation=speculation(args.decoding)
    )
    for i in range(batch):
        engine.add(str(i), [rng.randrange(1000) for _ in range(args.prompt)], params)
    for _ in range(24):
        engine.step()
    activities = trace_steps(engine, STEPS)
    spent: collections.defaultdict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    for activity in activities:
        spent[activity.name] += activity.end - activity.start
        counts[activity.name] += 1
    whole = max(activity.end for activity in activities) - activities[0].start
    idle, gap = idle_us(activities) / STEPS, gap_us(activities)
    table = Table(title=f"batch {batch}, {args.decoding}, {args.mode}: {whole / STEPS:.0f} us per step")
    for column in ("us/step", "share", "launches", "us each", "kernel"):
        table.add_column(column, justify="right" if column != "kernel" else "left")
    for name, us in sorted(spent.items(), key=lambda each: -each[1])[:28]:
        table.add_row(
            f"{us / STEPS:.1f}",
            f"{us / whole:.1%}",
            f"{counts[name] / STEPS:.1f}",
            f"{us / counts[name]:.2f}",
            name[:90],
        )
    table.add_row(f"{idle:.1f}", f"{idle * STEPS / whole:.1%}", f"{len(activities) / STEPS:.0f}", "", "nothing ran")
    if gap is not None:
        table.add_row(f"{gap:.1f}", f"{gap * STEPS / whole:.1%}", "", "", "of that, between captured steps")
    console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
