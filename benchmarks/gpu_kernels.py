"""How long the GPU kernels take, one group of kernels after another.

    python benchmarks/gpu_kernels.py [GROUP ...] --json results/gpu_kernels.jsonl

Every figure is the median over replays of a CUDA graph that holds many calls, divided by their number, so that
launches cost nothing. The calls of a graph read different pages, enough of them to exceed the L2 cache.

A group is a function from Settings to a Section. To add one, write it and name it in GROUPS.

attention, shapes of an 8B model (32 query heads, 8 KV heads of size 128, pages of 16, bfloat16):
  decode    spans of 1 to 16 rows (the last real row and a chain of draft rows) after a context, in microseconds.
            GB/s is the KV read once over the time of one row; 8:1 is the time of 8 rows over that of one.
  prefill   one span of many rows without a context, beside torch's flash attention over dense keys.

gemma, a sliding layer (heads of 256, window 512) and a full one (heads of 512) of Gemma-4-E4B, one after the other:
  target    spans of 1 and 4 rows after a context. floor: the entries of both layers that a span sees, read once at the
            given bandwidth.
  assistant spans of one row with the assistant's own heads, over the same entries, as its drafts read them.

experts, shapes of Qwen3-30B-A3B (128 experts of 2,048 x 768, 8 of them chosen, bfloat16), in microseconds:
  router    scores and choice; sort; gate and up; down; sum. `all` is the five in one graph, the router's included.
  floor     the larger of two: reading the chosen experts and reading and writing rows at the given bandwidth, and the
            products at the given rate. `skewed`: half of the rows choose among an eighth of the experts;
            `same`: all choose the same.

shared_experts, the experts' products and those of the MLP that all rows share, in sizes of DeepSeek-V2-Lite and
GLM-4.5-Air, in microseconds: in launches of their own, and in the same two.

latent, attention over rows of 512 + 64 numbers (DeepSeek's; 16, 64 and 128 query heads, pages of 16, bfloat16):
  decode    as above. GB/s is the rows of all contexts read once over the time of one query row; floor is the time to
            read them at the bandwidth that torch copies with.
  prefill   one span of many rows without a context. TFLOP/s counts the products with latents, not with expanded heads.
  absorbed  the products of a layer's heads with their matrices of 128 x 512, as in deterministic mode and by the
            library (torch.bmm), in microseconds; floor as above.

attention_eight_bits, latent_eight_bits, the decode steps of both over KV in e4m3, which has half the bytes.

latent_ways, chunks of prompts over such rows, from heads' queries to heads' values: with absorbed expansions, and with
keys and values expanded from the latents that the rows see (attention/expanded.py), in microseconds.

latent_few, a layer of few rows with 16 heads, from its projections to its values, in microseconds: in launches of their
own, and in shared ones.

latent_shapes, the same decode steps with other block sizes and numbers of programs, as in `shapes`.

expert_tiles, the products of `experts` with other tiles (pairs, outputs, inputs, warps, stages), sorted and unsorted:
the default choice and the five best.

fp8, products with weights in eight bits, scales by block, shapes of Llama-3.1-8B and of Qwen3-30B-A3B, in microseconds:
  dense     the rows' quantisation and the product, gated where the model's is, beside the same in bfloat16 as served.
            given: with rows that are quantised already, and a gate's result quantised. TB/s is the weight's bytes over
            the time of both, and its share of the given bandwidth.
  experts   all launches of a mixture's products but the router's, beside those of `experts` in bfloat16.

parts, products that a layer adds to the stream, each with the norm that comes next, in microseconds: whole and with
sums that are left in parts, in bfloat16 and in eight bits.

fp8_steps, the dense products of the 8B at 1 to 64 rows, for reading old and new ways side by side: with the rows'
quantisation in a launch of its own, with rows that norms and gates have quantised, and these with other tiles (outputs,
rows, inputs, warps, stages) and parts of sums: products of one block, two and four at once. Tiles that do not give the
bits of the first with as many parts are counted and named.

fp8_many, the dense products of many rows, quantised already and without a gate, in microseconds: by our kernel, by the
library, and in bfloat16 by the library; `ratio` is bfloat16 over the library.

fp8_tiles, the dense products of `fp8` with other tiles (outputs, rows, inputs, warps, stages): the default choice and
the five best.

fp8_expert_tiles, both products of the experts of `fp8` with rows that are quantised already and other tiles; the first
leaves rows to be quantised by a launch that is timed with it, or quantises them.

shapes, the launches of `attention` with other block sizes and numbers of programs: the default choice and the five
best. A choice is good if it is near the best everywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attention_kernels import attention, attention_eight_bits, shapes
from expert_kernels import expert_tiles, experts, shared_experts
from fp8_kernels import fp8, fp8_expert_tiles, fp8_many, fp8_steps, fp8_tiles
from gemma_kernels import gemma
from kernel_sections import Section, Settings
from latent_kernels import latent, latent_eight_bits, latent_few, latent_shapes, latent_ways
from parts_kernels import parts
from rich.console import Console

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP

GROUPS: dict[str, Callable[[Settings], Section]] = {
    "attention": attention,
    "experts": experts,
    "shared_experts": shared_experts,
    "latent": latent,
    "gemma": gemma,
    "attention_eight_bits": attention_eight_bits,
    "latent_eight_bits": latent_eight_bits,
    "latent_few": latent_few,
    "latent_ways": latent_ways,
    "fp8": fp8,
    "parts": parts,
    "shapes": shapes,
    "expert_tiles": expert_tiles,
    "latent_shapes": latent_shapes,
    "fp8_steps": fp8_steps,
    "fp8_many": fp8_many,
    "fp8_tiles": fp8_tiles,
    "fp8_expert_tiles": fp8_expert_tiles,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"which kernels (default: all): {', '.join(GROUPS)}")
    parser.add_argument("--quick", action="store_true", help="two contexts and batches")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    unknown = sorted(set(args.groups) - set(GROUPS))
    if unknown:
        parser.error(f"no such group: {', '.join(unknown)}; choose from: {', '.join(GROUPS)}")
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    if not torch.cuda.is_available():
        console.print("benchmarks/gpu_kernels.py times kernels on a GPU, and torch sees no CUDA device here")
        return 1
    settings = Settings()
    if args.quick:
        settings = replace(settings, contexts=(512, 8192), batches=(1, 64), expert_rows=(1, 16, 256, 4096))
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results: dict[str, list[dict[str, Any]]] = {}
    for name in args.groups or GROUPS:
        section = GROUPS[name](settings)
        for table in section.tables:
            console.print(table)
        results[name] = section.rows
        torch.cuda.empty_cache()
    if args.json:
        append_result(args.json, "gpu_kernels", settings, **results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
