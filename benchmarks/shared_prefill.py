"""Reading prompts with a model whose last layers store nothing, with and without all rows going through those layers.

    python benchmarks/shared_prefill.py --json results/shared_prefill.jsonl
    python benchmarks/shared_prefill.py --model gemma4-e4b --prompt 7000 --batch 1,4
    python benchmarks/shared_prefill.py --tiny

Random weights in the shape of a Gemma 4 that shares keys and values, random prompts, and no prefix cache; a request
ends with its first token. Both ways run in one process on one engine, in turn, and the best of --repeats is taken:
`all` with every row in every layer, `some` as the engine serves (run/onward.py). `expected` is the ratio of a row's
products in all layers to those up to where the last entries are stored; attention is left out. --tiny is a small shape
on a CPU.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gemma_shapes import SHARING
from model_shapes import SHAPES, ModelShape
from rich.console import Console
from rich.table import Table
from torch import nn

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.config import EngineConfig
from stridelm.engine.engine import Engine
from stridelm.models.layers.attention import Attention
from stridelm.models.layers.block import Block
from stridelm.models.layers.linear import Linear
from stridelm.params import SamplingParams

TINY = {
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "hidden_size_per_layer_input": 16,
    "num_attention_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 64,
}
WAYS = ("all", "some")


@dataclass(frozen=True)
class Settings:
    model: str
    prompt: int
    batch: tuple[int, ...]
    rows: int
    repeats: int
    tiny: bool


@dataclass(frozen=True)
class Row:
    batch: int
    all_ms: float
    some_ms: float
    ratio: float
    expected: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHARING, default=SHARING[0], help="whose shape")
    parser.add_argument("--prompt", type=int, default=7000, help="prompt tokens")
    parser.add_argument("--batch", default="1", help="prompts that are read at once")
    parser.add_argument("--rows", type=int, default=8192, help="most rows per step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a small shape on a CPU, in float32")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    batches = tuple(int(count) for count in args.batch.split(","))
    settings = Settings(args.model, args.prompt, batches, args.rows, args.repeats, args.tiny)
    if not settings.tiny and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here: give --tiny for a small shape on a CPU")
    largest, length = max(batches), settings.prompt + 1
    shape, engine = open_engine(
        args.model,
        settings.tiny,
        itl_target_ms=0,  # as many rows per step as there may be
        max_num_seqs=largest,
        max_num_batched_tokens=settings.rows,
        max_model_len=length + 63,
        num_pages=largest * (-(-(length + 64) // 16) + 1),
    )
    rows = [measure(engine, batch, settings) for batch in batches]
    table = Table(title=f"{shape.title}, {settings.prompt} prompt tokens, {device_name()}, torch {torch.__version__}")
    for column in ("batch", "all, ms", "some, ms", "all / some", "expected"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = row.all_ms, row.some_ms, row.ratio, row.expected
        table.add_row(str(row.batch), *(f"{figure:,.2f}" for figure in figures))
    Console(width=120).print(table)
    if args.json:
        append_result(args.json, "shared_prefill", settings, rows=[asdict(row) for row in rows])


def tiny(shape: ModelShape) -> ModelShape:
    return replace(shape, title=f"{shape.title}, tiny", config={**shape.config, **TINY})


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def open_engine(model: str, is_tiny: bool, **options: Any) -> tuple[ModelShape, Engine]:
    """Random weights, plain decoding, no prefix cache; on a CPU if tiny. options: others of the engine's."""
    shape = tiny(SHAPES[model]) if is_tiny else SHAPES[model]
    with tempfile.TemporaryDirectory() as folder:
        shape.write(folder)
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            dtype="float32" if is_tiny else "bfloat16",
            device="cpu" if is_tiny else "cuda",
            drafter="none",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            capture="startup" if is_tiny else "lazy",
            **options,
        )
        return shape, Engine(config)


def measure(engine: Engine, batch: int, settings: Settings) -> Row:
    for way in WAYS:
        read_prompts(engine, way, batch, settings.prompt)  # compiles
    times = {way: float("inf") for way in WAYS}
    for _ in range(settings.repeats):
        for way in WAYS:
            times[way] = min(times[way], read_prompts(engine, way, batch, settings.prompt))
    ratio = times["all"] / times["some"]
    return Row(batch, 1e3 * times["all"], 1e3 * times["some"], ratio, expected(engine))


def read_prompts(engine: Engine, way: str, batch: int, length: int) -> float:
    """Seconds until every prompt has its first token."""
    rng, vocab = random.Random(batch), engine.loaded.target.vocab_size
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    prompts = [[rng.randrange(vocab) for _ in range(length)] for _ in range(batch)]
    engine.device.narrows = way == "some"
    began = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add(f"{way}-{index}-{time.perf_counter_ns()}", prompt, params)
    while engine.busy:
        engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    engine.check()
    return took


def expected(engine: Engine) -> float:
    """Products of a row in all layers over those up to where the last entries are stored."""
    model = engine.loaded.model
    of_layer = [weights_of(block) for block in model.blocks]
    last = model.blocks[model.last_storing]
    assert isinstance(last, Block) and isinstance(last.mixer, Attention)
    return sum(of_layer) / (sum(of_layer[: model.last_storing]) + weights_of(last.mixer.qkv))


def weights_of(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, Linear))


if __name__ == "__main__":
    main()
