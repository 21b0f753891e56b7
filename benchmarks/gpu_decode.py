"""Decode speed of an 8B model on one GPU, weights random: plain and mask-token windows, over batch sizes.

    python benchmarks/gpu_decode.py --batch 1,4,16,64,128,256 --json results/gpu_decode.json

Llama-3.1-8B's shape in bfloat16, 512 random tokens in, 256 out, greedy, no prefix cache. Only decoding is timed: from
the step in which the last request got its first token to the end. `floor` is the time to read the weights and the
KV that a step must read, at the bandwidth given. Trusted windows emit all their tokens, so their speed does not depend
on what random weights say; they are lossy, and marked so.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.engine.wiring import load_parts
from stridelm.params import SamplingParams, Speculation

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
VLLM = {1: 203.9, 4: 796.0, 16: 2968.0, 64: 9421.0, 128: 14343.0, 256: 17853.0}
"""Tokens a second of vLLM 0.26.0, plain, the same work on one H200 (measured beside us, torch 2.11)."""


@dataclass(frozen=True)
class Row:
    batch: int
    decoding: str
    lossy: bool
    tokens_per_s: float
    ms_per_step: float
    tokens_per_step: float
    floor_ms: float
    over_plain: float | None
    over_vllm: float | None
    mode: str


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    ms_per_step: float
    tokens_per_step: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,4,16,64,128,256")
    parser.add_argument("--prompt", type=int, default=512, help="tokens in")
    parser.add_argument("--output", type=int, default=256, help="tokens out")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--modes", default="captured", help="of captured, eager, unlapped, deterministic")
    parser.add_argument("--decoding", default="plain,mask@2:trust")
    parser.add_argument("--bandwidth", type=float, default=4.28, help="TB/s, for the floor (H200 copies: 4.28)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(width=140)
    if not torch.cuda.is_available():
        console.print("no GPU here: this benchmark needs one")
        return 1
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            **{**LLAMA_8B, "num_hidden_layers": args.layers}, architectures=["LlamaForCausalLM"]
        ).save_pretrained(folder)
        for mode in args.modes.split(","):
            engine = open_engine(folder, mode, args)
            for batch in (int(n) for n in args.batch.split(",")):
                rows += measure_batch(engine, mode, batch, args, console)
            engine = None  # the next mode needs the memory
            gc.collect()
            torch.cuda.empty_cache()
    console.print(as_table(rows))
    if args.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": [asdict(r) for r in rows]}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def open_engine(folder: str, mode: str, args: argparse.Namespace) -> Engine:
    largest = max(int(n) for n in args.batch.split(","))
    length = args.prompt + args.output
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        drafter="none",
        mask_token_id=5,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=mode == "eager",
        deterministic=mode == "deterministic",
        max_num_seqs=largest,
        max_num_batched_tokens=8192,
        max_model_len=length + 64,
        num_pages=largest * (-(-(length + 64) // 16) + 1),
    )
    engine = Engine(config, load_parts(config))
    if mode == "unlapped":
        engine.lag = 0
    return engine


def measure_batch(engine: Engine, mode: str, batch: int, args: argparse.Namespace, console: Console) -> list[Row]:
    rows = []
    plain: float | None = None
    for decoding in args.decoding.split(","):
        run(engine, decoding, batch, args.prompt, 24)  # compiles and captures
        runs = [run(engine, decoding, batch, args.prompt, args.output) for _ in range(args.repeats)]
        middle = sorted(runs, key=lambda r: r.tokens_per_s)[len(runs) // 2]
        plain = middle.tokens_per_s if decoding == "plain" else plain
        row = Row(
            batch=batch,
            decoding=decoding,
            lossy="trust" in decoding,
            tokens_per_s=middle.tokens_per_s,
            ms_per_step=middle.ms_per_step,
            tokens_per_step=middle.tokens_per_step,
            floor_ms=floor_ms(engine, batch, args),
            over_plain=None if plain is None else middle.tokens_per_s / plain,
            over_vllm=middle.tokens_per_s / VLLM[batch] if decoding == "plain" and batch in VLLM else None,
            mode=mode,
        )
        console.print(
            f"{mode} batch {batch} {decoding}: {row.tokens_per_s:.1f} tokens/s, {row.ms_per_step:.2f} ms a step"
        )
        rows.append(row)
    return rows


def run(engine: Engine, decoding: str, batch: int, prompt: int, output: int) -> Measured:
    """One batch from its prompts to its end."""
    rng = random.Random(batch)
    vocab = engine.parts.target.vocab_size
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, speculation=speculation(decoding))
    requests = [
        engine.add(f"{decoding}-{i}-{time.perf_counter_ns()}", [rng.randrange(vocab) for _ in range(prompt)], params)
        for i in range(batch)
    ]
    while any(not request.output_ids for request in requests):
        engine.step()
    torch.cuda.synchronize()
    before = sum(len(request.output_ids) for request in requests)
    steps, started = engine.stats.steps, time.perf_counter()
    while engine.busy:
        engine.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    steps = engine.stats.steps - steps
    tokens = sum(len(request.output_ids) for request in requests) - before
    engine.check()
    return Measured(tokens / seconds, seconds / steps * 1e3, tokens / steps / batch)


def speculation(decoding: str) -> Speculation | str:
    """ "plain", or drafter@depth with an acceptance rule and a confidence behind colons."""
    if decoding == "plain":
        return "off"
    drafter, _, rest = decoding.partition("@")
    depth, *how = rest.split(":")
    return Speculation(
        drafter=drafter,
        depth=int(depth),
        acceptance=how[0] if how else "exact",
        confidence=float(how[1]) if len(how) > 1 else None,
    )


def floor_ms(engine: Engine, batch: int, args: argparse.Namespace) -> float:
    """Weights (all but the embedding, of which a row a token is read) and KV at the middle of the run."""
    model = engine.parts.model
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - model.embed.weight.numel() * 2
    entry = sum(layer.bytes_per_token(2) for layer in model.kv_layout)
    return (weights + batch * (args.prompt + args.output / 2) * entry) / (args.bandwidth * 1e12) * 1e3


def as_table(rows: list[Row]) -> Table:
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Llama-3.1-8B's shape, bfloat16")
    for column in ("mode", "batch", "decoding", "tokens/s", "ms a step", "tokens/step", "floor ms", "/plain", "/vLLM"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.mode,
            str(row.batch),
            row.decoding + ("*" if row.lossy else ""),
            f"{row.tokens_per_s:,.1f}",
            f"{row.ms_per_step:.2f}",
            f"{row.tokens_per_step:.2f}",
            f"{row.floor_ms:.2f}",
            "" if row.over_plain is None else f"{row.over_plain:.2f}x",
            "" if row.over_vllm is None else f"{row.over_vllm:.3f}x",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
