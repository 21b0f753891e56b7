"""Where a captured step's time goes: kernels by name, and what lies between them.

python benchmarks/profile_step.py --batch 1 --decoding plain
"""

from __future__ import annotations

import argparse
import collections
import random
import tempfile

import torch
from gpu_decode import LLAMA_8B, Settings, open_engine, speculation
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
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
        engine = open_engine(folder, args.mode, settings)
    rng = random.Random(0)
    params = SamplingParams(
        max_tokens=args.output, temperature=0.0, ignore_eos=True, speculation=speculation(args.decoding)
    )
    for i in range(batch):
        engine.add(str(i), [rng.randrange(1000) for _ in range(args.prompt)], params)
    for _ in range(24):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    kernels = sorted(
        (e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start
    )
    spent: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    gap, end = 0.0, kernels[0].time_range.start
    for event in kernels:
        spent[event.name] += event.time_range.elapsed_us()
        counts[event.name] += 1
        gap += max(0.0, event.time_range.start - end)
        end = max(end, event.time_range.end)
    whole = end - kernels[0].time_range.start
    table = Table(title=f"batch {batch}, {args.decoding}, {args.mode}: {whole / STEPS:.0f} us a step")
    for column in ("us a step", "share", "launches", "us each", "kernel"):
        table.add_column(column, justify="right" if column != "kernel" else "left")
    for name, us in spent.most_common(28):
        table.add_row(
            f"{us / STEPS:.1f}",
            f"{us / whole:.1%}",
            f"{counts[name] / STEPS:.1f}",
            f"{us / counts[name]:.2f}",
            name[:90],
        )
    table.add_row(f"{gap / STEPS:.1f}", f"{gap / whole:.1%}", f"{len(kernels) / STEPS:.0f}", "", "between kernels")
    console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
