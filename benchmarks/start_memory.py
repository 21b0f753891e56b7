"""What of a card's memory engines hold once they are ready, and how fast one stream is: of engines that start together.

    python benchmarks/start_memory.py --engines 2 --share 0.4 --max-num-seqs 64

Each engine is a process of its own with random weights of an 8B model. With one engine, `driver MiB` is what the driver
keeps for a graph beside PyTorch's memory; with several it shows what others took meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from model_shapes import LLAMA_8B
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

TOKENS = 256
GIB, MIB = 1 << 30, 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--share", type=float, help="kv_memory_fraction; with several engines, less than 1 / engines")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        sys.stdout.write(json.dumps(start(json.loads(asked.one))) + "\n")
        return 0
    with TemporaryDirectory() as folder:
        LlamaConfig(**LLAMA_8B, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        options = {
            "model": folder,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 8192,
            "skip_tokenizer_init": True,
            "device": "cuda",
            "drafter": asked.drafter,
            "kv_memory_fraction": asked.share,
            "max_num_seqs": asked.max_num_seqs,
            "max_num_batched_tokens": asked.max_num_batched_tokens,
        }
        command = [sys.executable, __file__, "--one", json.dumps(options)]
        engines = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(asked.engines)]
        rows = [json.loads(engine.communicate()[0].splitlines()[-1]) for engine in engines]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)
    return 0


def start(options: dict[str, Any]) -> dict[str, Any]:
    """One start, in a process that has done nothing else."""
    import torch

    from stridelm.config import EngineConfig
    from stridelm.engine.start import start as start_engine
    from stridelm.params import SamplingParams
    from stridelm.run.graphs import GraphPool

    outside: list[int] = []
    """Bytes that left the card during each capture beside those that PyTorch reserved."""
    capture = GraphPool._capture

    def measured(pool: GraphPool, body: Any) -> Any:
        reserved, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
        captured = capture(pool, body)
        outside.append(free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved))
        return captured

    GraphPool._capture = measured  # type: ignore[method-assign, assignment]
    began = time.perf_counter()
    engine = start_engine(EngineConfig(**options))
    ready = time.perf_counter() - began
    held, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    most, (free, _) = torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()
    request = engine.add("a", [1, 2, 3], SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True))
    while not request.output_ids:
        engine.step()
    first, began = len(request.output_ids), time.perf_counter()
    while engine.busy:
        engine.step()
    rate = (TOKENS - first) / (time.perf_counter() - began)
    assert engine.capture is not None
    return {
        "ready s": ready,
        "graphs": engine.stats.captures,
        "missing": engine.stats.missing_graphs,
        "charged GiB": engine.capture.pool.spent / GIB,
        "driver MiB": median(outside) / MIB if outside else 0.0,
        "KV GiB": sum(tensor.nbytes for tensor in engine.loaded.pool.tensors) / GIB,
        "held GiB": held / GIB,
        "used GiB": used / GIB,
        "most held GiB": most / GIB,
        "free GiB": free / GIB,
        "one stream tokens/s": rate,
    }


if __name__ == "__main__":
    sys.exit(main())
