"""Time from start to first token on a GPU, prefill speed, and the memory that captured steps take.

    python benchmarks/gpu_start.py --json results/gpu_start.jsonl

Llama-3.1-8B's shape in bfloat16, weights random. Each start is a separate process, timed from before Python imports
anything to the first token of a prompt of 512 tokens. Kernels that this machine has already compiled are reused, except
where the name of the start says that there are none: then Triton's cache is an empty directory.
Prefill is 64 prompts of 512 random tokens at once, without prefix cache, until the last has its first token.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from stridelm.bench.settings import JSON_HELP

STARTS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "captured when needed": {"capture": "lazy"},
    "captured at start": {},
    "deterministic": {"deterministic": True},
    "no kernels": {},
    "no kernels, compiled one by one": {},
}
NO_KERNELS, ONE_BY_ONE = list(STARTS)[-2:]
PROMPTS, PROMPT = 64, 512


@dataclass(frozen=True)
class Settings:
    max_num_seqs: int
    max_num_batched_tokens: int = 8192


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument(
        "--starts", nargs="+", choices=STARTS, default=list(STARTS), metavar="NAME", help="default: all"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--one-by-one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        logging.basicConfig(level=logging.INFO)
        sys.stdout.write(json.dumps(start(json.loads(args.one), args.began, args.one_by_one)) + "\n")
        return 0
    import torch
    from model_shapes import LLAMA_8B

    from stridelm.bench.results import append_result

    console = Console(width=140)
    if not torch.cuda.is_available():
        console.print("this benchmark needs a GPU, and torch sees no CUDA device here")
        return 1
    settings = Settings(args.max_num_seqs)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**LLAMA_8B, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        for name in args.starts:
            config = {
                "model": folder,
                "load_format": "dummy",
                "dtype": "bfloat16",
                "skip_tokenizer_init": True,
                "enable_prefix_caching": False,
                "drafter": "none",
                "max_num_seqs": settings.max_num_seqs,
                "max_num_batched_tokens": settings.max_num_batched_tokens,
                "max_model_len": 8192,
                **STARTS[name],
            }
            found.append({"start": name, **_in_a_process(config, name)})
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, 8B shape, room for {settings.max_num_seqs}"
    table = Table(title=title)
    for column in (
        "start",
        "ready s",
        "first token s",
        "compiled",
        "graphs",
        "graphs GiB",
        "prefill tokens/s",
        "KV GiB",
    ):
        table.add_column(column, justify="left" if column == "start" else "right")
    for row in found:
        table.add_row(
            row["start"],
            f"{row['ready_s']:.1f}",
            f"{row['first_token_s']:.1f}",
            str(row["compiled"]),
            str(row["graphs"]),
            f"{row['graph_gib']:.2f}",
            f"{row['prefill_per_s']:,.0f}",
            f"{row['kv_gib']:.1f}",
        )
    console.print(table)
    if args.json:
        append_result(args.json, "gpu_start", settings, rows=found)
    return 0


def _in_a_process(config: dict[str, Any], name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", json.dumps(config), "--began", str(time.time())]
    if name == ONE_BY_ONE:
        command.append("--one-by-one")
    with tempfile.TemporaryDirectory() as empty:
        cache = {"TRITON_CACHE_DIR": empty} if name in (NO_KERNELS, ONE_BY_ONE) else {}
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **cache})
    return json.loads(run.stdout.splitlines()[-1])


def start(options: dict[str, Any], began: float, one_by_one: bool) -> dict[str, Any]:
    """One start, in a process that has done nothing else. began: `time.time()` before the process was created.
    one_by_one: compile nothing ahead."""
    import torch

    from stridelm.config import EngineConfig
    from stridelm.engine.engine import Engine
    from stridelm.engine.start import start as start_engine
    from stridelm.kernels import compilations
    from stridelm.params import SamplingParams

    engine = (Engine if one_by_one else start_engine)(EngineConfig(**options))
    ready = time.time() - began
    rng = random.Random(0)

    def prompt() -> list[int]:
        return [rng.randrange(engine.loaded.target.vocab_size) for _ in range(PROMPT)]

    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    request = engine.add("first", prompt(), params)
    while not request.output_ids:
        engine.step()
    first = time.time() - began
    rates = []
    for turn in range(3):
        requests = [engine.add(f"{turn}-{i}", prompt(), params) for i in range(PROMPTS)]
        torch.cuda.synchronize()
        started = time.perf_counter()
        while any(not request.output_ids for request in requests):
            engine.step()
        torch.cuda.synchronize()
        rates.append(PROMPTS * PROMPT / (time.perf_counter() - started))
        while engine.busy:
            engine.step()
    engine.check()
    graphs = None if engine.capture is None else engine.capture.pool
    kv = sum(tensor.nbytes for tensor in engine.loaded.pool.tensors)
    return {
        "ready_s": ready,
        "first_token_s": first,
        "compiled": compilations.count(),
        "graphs": graphs.graphs if graphs else 0,
        "graph_gib": graphs.spent / 2**30 if graphs else 0.0,
        "prefill_per_s": max(rates),
        "kv_gib": kv / 2**30,
    }


if __name__ == "__main__":
    sys.exit(main())
