"""Decoding on a CPU against llama.cpp: same bfloat16 weights, prompts and threads, in one process.

    npm pack @node-llama-cpp/linux-x64
    python benchmarks/against_llama_cpp.py --llama-cpp node-llama-cpp-linux-x64-*.tgz --json results/llama_cpp.jsonl

Two models: the built-in one, on prompts whose plain continuation does not loop (bench/repetition.py), and a Qwen3 shape
of 0.29B parameters (16 layers of hidden size 1,024) with random weights, on random prompts. Both are written as GGUF by
the package gguf (`pip install 'stridelm[gguf]'`). llama.cpp is any prebuilt one: the package above as npm packs it, or
a folder with libllama.so. It is called through its C interface, with its default of a float16 KV cache, and keeps its
threads from step to step.

All decode greedily, for exactly --max-tokens tokens. Sides take turns, in alternating order; the ratio is taken within
a round, and the median ratio is reported. Stride decodes plainly and, with the built-in model, also with --drafters;
llama.cpp decodes plainly.

The outputs must be the same. Where one differs, the two computed the same text up to there, and llama.cpp's logits of
both next tokens are compared: within two steps of bfloat16 it is a near-tie, which both may resolve as they do.
Anything more is an error, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep

import torch
from against_transformers import Pass, common_prefix, run_stride
from gguf_file import write_gguf
from llama_cpp import REMEDY, LlamaCpp
from rich.console import Console
from rich.table import Table

from stridelm.bench.environment import cpu_name
from stridelm.bench.prompts import load_prompts
from stridelm.bench.repetition import VARIED, bucket_of
from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.bench.stand import encode, open_engine
from stridelm.bench.variants import Variant, plain, read_variants
from stridelm.builtin import builtin_path
from stridelm.engine.engine import Engine

QWEN3 = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""Qwen3-0.6B's, with fewer layers and a smaller vocabulary."""
RANDOM_PROMPT = 128
"""Tokens of a prompt for it."""
MODELS = ("built-in", "qwen3-0.29b")
WARM_UP_TOKENS = 8
SETTLE_S = 0.3
"""Between two turns: llama.cpp's threads spin for some 0.1 s before they sleep."""
NEAR_TIE = 2 * 2.0**-8
"""Of a logit's magnitude: twice the distance of neighbouring bfloat16 numbers, at most."""


@dataclass(frozen=True)
class Settings:
    models: tuple[str, ...]
    streams: tuple[int, ...]
    threads: tuple[int, ...]
    drafters: tuple[str, ...]
    num_prompts: int
    max_tokens: int
    repeats: int


@dataclass(frozen=True)
class Row:
    model: str
    device: str
    decoding: str
    streams: int
    threads: int
    prompts: int
    completion_tokens: int
    stride_tokens_per_s: float
    llama_cpp_tokens_per_s: float
    ratio: float
    ratios: tuple[float, ...]
    same_outputs: int
    mean_agreeing_tokens: float
    """Leading tokens that agree."""
    widest_tie: float
    """Of the differences between logits that were resolved differently, as a share of the logit: at most NEAR_TIE."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="PATH", help="its package (.tgz), or a folder")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--drafters", default="mtp@3", help="with the built-in model, as for stride bench latency")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    streams, threads = (tuple(int(n) for n in given.split(",")) for given in (args.streams, args.threads))
    models, drafters = tuple(args.models.split(",")), tuple(filter(None, args.drafters.split(",")))
    if unknown := set(models) - set(MODELS):
        parser.error(f"unknown model {', '.join(sorted(unknown))}; choose of {', '.join(MODELS)}")
    settings = Settings(models, streams, threads, drafters, args.num_prompts, args.max_tokens, args.repeats)
    console = Console(width=160, highlight=False)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = unpacked(args.llama_cpp, folder)
        for model in models:
            checkpoint = builtin_path() if model == "built-in" else write_qwen3(folder / model)
            file = write_gguf(checkpoint, folder / f"{model}.gguf")
            for count in threads:
                rows += measure_threads(model, checkpoint, file, library, count, settings)
                console.print(f"{model}, {count} threads: done")
    console.print(as_table(rows))
    if args.json:
        append_result(args.json, "against_llama_cpp", settings, rows=[asdict(row) for row in rows])
    wrong = [row for row in rows if row.widest_tie > NEAR_TIE]
    for row in wrong:
        console.print(
            f"{row.model}, {row.decoding}, {row.streams} streams, {row.threads} threads: the outputs differ where "
            f"llama.cpp's logits are {row.widest_tie:.1%} apart, which is no near-tie"
        )
    return 1 if wrong else 0


def unpacked(source: Path, folder: Path) -> Path:
    """The folder of a prebuilt llama.cpp. Raises SystemExit if there is nothing."""
    if source.is_dir():
        return source
    if not source.is_file():
        raise SystemExit(f"there is no llama.cpp at {source}; {REMEDY}")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "llama.cpp", filter="data")
    return folder / "llama.cpp"


def write_qwen3(folder: Path) -> Path:
    """A checkpoint with random weights, the same ones each time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**QWEN3)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def measure_threads(
    model: str, checkpoint: Path, file: Path, library: Path, threads: int, settings: Settings
) -> list[Row]:
    """All rows of a model at one number of threads, for which an engine chooses its products when it is opened."""
    torch.set_num_threads(threads)
    alike = model == "built-in"
    engine = open_engine(
        None if alike else str(checkpoint), max(settings.streams), dtype="bfloat16", skip_tokenizer_init=not alike
    )
    ways = {"plain": plain(engine.loaded.target)}
    if alike:
        ways |= {name: read_variants([name], (), engine.loaded.target)[0] for name in settings.drafters}
    prompts = varied_prompts(engine, settings) if alike else random_prompts(settings)
    rows = []
    for streams in settings.streams:
        theirs = LlamaCpp(library, file, streams, threads, max(map(len, prompts)) + settings.max_tokens)
        rows += measure(model, engine, theirs, ways, prompts, streams, threads, settings)
        theirs.close()
    del engine  # the next number of threads needs another
    gc.unfreeze()
    gc.collect()
    return rows


def varied_prompts(engine: Engine, settings: Settings) -> list[list[int]]:
    """The first shipped prompts whose plain continuation is in the headline bucket. Raises SystemExit if there are too
    few."""
    prompts = encode(engine, load_prompts())
    outputs = run_stride(engine, prompts, plain(engine.loaded.target), max(settings.streams), settings.max_tokens)
    found = [prompt for prompt, output in zip(prompts, outputs.outputs) if bucket_of(output) == VARIED]
    if len(found) < settings.num_prompts:
        raise SystemExit(f"only {len(found)} prompts have continuations that do not loop; lower --num-prompts")
    return found[: settings.num_prompts]


def random_prompts(settings: Settings) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(0)
    shape = (settings.num_prompts, RANDOM_PROMPT)
    prompts: list[list[int]] = torch.randint(QWEN3["vocab_size"], shape, generator=numbers).tolist()
    return prompts


def measure(
    model: str,
    engine: Engine,
    theirs: LlamaCpp,
    ways: Mapping[str, Variant],
    prompts: Sequence[list[int]],
    streams: int,
    threads: int,
    settings: Settings,
) -> list[Row]:
    def ours(variant: Variant) -> Callable[[int], Pass]:
        return lambda tokens: run_stride(engine, prompts, variant, streams, tokens)

    sides = {name: ours(variant) for name, variant in ways.items()}
    sides["llama.cpp"] = lambda tokens: run_llama_cpp(theirs, prompts, streams, tokens)
    done = take_turns(sides, settings)
    reference = done.pop("llama.cpp")
    return [
        row_of(model, cpu_name(), name, prompts, streams, threads, passes, reference, theirs)
        for name, passes in done.items()
    ]


def take_turns(sides: Mapping[str, Callable[[int], Pass]], settings: Settings) -> dict[str, list[Pass]]:
    """One pass of each side per round."""
    for side in sides.values():
        side(WARM_UP_TOKENS)
    done: dict[str, list[Pass]] = {name: [] for name in sides}
    for repeat in range(settings.repeats):
        for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            sleep(SETTLE_S)
            done[name].append(sides[name](settings.max_tokens))
    return done


def run_llama_cpp(theirs: LlamaCpp, prompts: Sequence[list[int]], streams: int, tokens: int) -> Pass:
    """One batch after another. They take as many steps, since all outputs have the same length."""
    outputs: list[list[int]] = []
    start = perf_counter()
    for first in range(0, len(prompts), streams):
        outputs += theirs.generate(prompts[first : first + streams], tokens)
    return Pass(outputs, perf_counter() - start, steps=tokens * -(-len(prompts) // streams))


def row_of(
    model: str,
    device: str,
    decoding: str,
    prompts: Sequence[list[int]],
    streams: int,
    threads: int,
    ours: Sequence[Pass],
    reference: Sequence[Pass],
    theirs: LlamaCpp,
) -> Row:
    ratios = tuple(a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, reference))
    agreeing = [common_prefix(a, b) for a, b in zip(ours[-1].outputs, reference[-1].outputs)]
    ties = [
        tie_of(theirs, [*prompt, *a[:same]], a[same], b[same])
        for prompt, a, b, same in zip(prompts, ours[-1].outputs, reference[-1].outputs, agreeing)
        if a != b
    ]
    return Row(
        model=model,
        device=device,
        decoding=decoding,
        streams=streams,
        threads=threads,
        prompts=len(prompts),
        completion_tokens=ours[-1].tokens,
        stride_tokens_per_s=statistics.median(one.tokens_per_s for one in ours),
        llama_cpp_tokens_per_s=statistics.median(one.tokens_per_s for one in reference),
        ratio=statistics.median(ratios),
        ratios=ratios,
        same_outputs=len(prompts) - len(ties),
        mean_agreeing_tokens=statistics.mean(agreeing),
        widest_tie=max(ties, default=0.0),
    )


def tie_of(theirs: LlamaCpp, ids: Sequence[int], a: int, b: int) -> float:
    """How far llama.cpp's logits of two tokens are apart, as a share of their magnitude."""
    logits = theirs.logits_after(ids)
    return float(abs(logits[a] - logits[b]) / max(abs(logits[a]), abs(logits[b])))


def as_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, title=f"{rows[0].device}, bfloat16", title_justify="left")
    names = ("model", "decoding", "streams", "threads", "Stride tokens/s", "llama.cpp tokens/s", "ratio", "rounds")
    for name in (*names, "same outputs", "agreeing", "widest tie"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            row.decoding,
            str(row.streams),
            str(row.threads),
            f"{row.stride_tokens_per_s:.1f}",
            f"{row.llama_cpp_tokens_per_s:.1f}",
            f"{row.ratio:.2f}x",
            f"{min(row.ratios):.2f} to {max(row.ratios):.2f}",
            f"{row.same_outputs} of {row.prompts}",
            f"{row.mean_agreeing_tokens:.1f} tokens",
            f"{row.widest_tie:.2%}" if row.widest_tie else "",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
