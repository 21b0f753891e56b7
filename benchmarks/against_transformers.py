"""Decoding against transformers' `generate`: same weights, dtype, threads and prompts, in one process.

    python benchmarks/against_transformers.py [MODEL] --batch 1,8 --json results/against_transformers.jsonl
    python benchmarks/against_transformers.py --mixture --json results/against_transformers.jsonl
    python benchmarks/against_transformers.py [MODEL] --mtp 3 --json results/against_transformers_mtp.jsonl

Both decode greedily with a KV cache, for exactly --max-tokens tokens; prompts of a batch are padded on the
left for transformers. The two take turns, in alternating order; the ratio is taken within a round, and the
median ratio is reported. Stride runs as shipped, including paging, sampler and detokenising. transformers
returns ids only.

With --mixture the model is a qwen3_moe of the built-in model's sizes with random weights, 32 experts of 128 of which
four are chosen: 43M parameters.

With --mtp DEPTH both draft with the MTP module beside MODEL, one prompt at a time. transformers' option is
`generate(use_mtp=True)`: it drafts exactly one token with each module of a checkpoint and applies none twice.
Because its qwen3 expects no modules, they are passed to it and stay loaded, as in Stride; by itself it loads
them again for every prompt. What is compared:

- one module, from which both draft one token;
- the same checkpoint, with Stride applying the module DEPTH times;
- a checkpoint with DEPTH copies of the module, which makes transformers draft DEPTH tokens; Stride runs it
  module by module too, and drafts the same;
- the two ways to draft DEPTH tokens with this module: Stride applies it repeatedly, transformers uses the
  copies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

from stridelm.bench.drive import drive
from stridelm.bench.environment import device_name, dtype_name
from stridelm.bench.prompts import load_prompts
from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.bench.stand import checkpoint_name, encode, make_jobs, open_engine
from stridelm.bench.variants import Variant, plain, read_variants
from stridelm.builtin import builtin_path
from stridelm.draft.whose import BESIDE
from stridelm.engine.engine import Engine
from stridelm.models.files import read_tensors
from stridelm.params import SamplingParams

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Settings:
    model: str | None
    """None: the built-in one."""
    batch: tuple[int, ...]
    max_tokens: int
    num_prompts: int
    repeats: int
    dtype: str
    device: str
    mtp: int | None = None
    """Depth. None: plain decoding in both."""
    mixture: bool = False
    """A random one instead of a model."""


@dataclass(frozen=True)
class Pass:
    """All prompts, completed once."""

    outputs: list[list[int]]
    seconds: float
    steps: int
    """Forward passes of the target, including those that read prompts."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """For runs of one prompt at a time, where each prompt is read in one step, which gives its first token."""
        return (self.tokens - len(self.outputs)) / (self.steps - len(self.outputs))


@dataclass(frozen=True)
class Row:
    model: str
    device: str
    dtype: str
    batch: int
    prompts: int
    completion_tokens: int
    stride_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: float
    ratios: tuple[float, ...]
    same_outputs: int
    """Prompts whose outputs agree. In 16 bits two implementations diverge at near-ties; neither is wrong."""
    mean_agreeing_tokens: float
    """Leading tokens that agree."""


@dataclass(frozen=True)
class MtpRow(Row):
    stride_modules: int
    """In the checkpoint; a single one is applied `stride_depth` times."""
    stride_depth: int
    transformers_modules: int
    """Each drafts one token."""
    stride_tokens_per_step: float
    transformers_tokens_per_step: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--batch", default="1,8", help="comma-separated batch sizes (default: 1,8)")
    parser.add_argument("--mixture", action="store_true", help="a small random mixture of experts instead of MODEL")
    parser.add_argument("--mtp", type=int, metavar="DEPTH", help="draft with MTP, at batch size 1")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32 (default: auto, as Stride chooses)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = parser.parse_args()
    if args.mixture and (args.model or args.mtp):
        parser.error("--mixture is a model of its own, without MTP modules: leave out MODEL and --mtp")
    if args.threads:
        torch.set_num_threads(args.threads)
    batch = (1,) if args.mtp else tuple(int(size) for size in args.batch.split(","))
    settings = Settings(
        args.model,
        batch,
        args.max_tokens,
        args.num_prompts,
        args.repeats,
        args.dtype,
        args.device,
        args.mtp,
        args.mixture,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = write_mixture(Path(folder) / "mixture") if args.mixture else settings.model
        rows: Sequence[Row] = measure_mtp(settings, args.mtp) if args.mtp else measure(model, settings)
    show(rows)
    if args.json:
        append_result(args.json, "against_transformers", settings, rows=[vars(row) for row in rows])
    return 0


def write_mixture(path: Path) -> str:
    """Write the checkpoint of --mixture, with the built-in model's tokenizer. Returns its path."""
    own = json.loads((builtin_path() / "config.json").read_text(encoding="utf-8"))
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{name: own[name] for name in sizes}, **experts, tie_word_embeddings=True)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    for file in builtin_path().glob("tokenizer*"):
        shutil.copy(file, path)
    return str(path)


def measure(model: str | None, settings: Settings) -> list[Row]:
    engine, hf = open_both(model, settings)
    prompts = encode(engine, load_prompts().first(settings.num_prompts))
    return [measure_batch(engine, hf, prompts, size, settings) for size in settings.batch]


def open_both(model: str | None, settings: Settings) -> tuple[Engine, Any]:
    engine = open_engine(model, max(settings.batch), dtype=settings.dtype, device=settings.device)
    dtype = next(engine.loaded.model.parameters()).dtype
    hf = AutoModelForCausalLM.from_pretrained(model or builtin_path(), dtype=dtype, local_files_only=True)
    hf = hf.eval().to(engine.loaded.device)
    hf.generation_config.eos_token_id = None  # both generate exactly max_tokens
    return engine, hf


def measure_batch(engine: Engine, hf: Any, ids: list[list[int]], size: int, settings: Settings) -> Row:
    ids = list(itertools.islice(itertools.cycle(ids), -(-len(ids) // size) * size))
    variant = plain(engine.loaded.target)
    ours, theirs = take_turns(
        lambda tokens: run_stride(engine, ids, variant, size, tokens),
        lambda tokens: run_transformers(hf, ids, size, tokens),
        settings,
    )
    return Row(checkpoint_name(engine), device_name(engine), dtype_name(engine), size, **figures(ours, theirs))


def take_turns(
    ours: Callable[[int], Pass], theirs: Callable[[int], Pass], settings: Settings
) -> tuple[list[Pass], list[Pass]]:
    """One pass of each per round. They are called with the number of tokens to generate for each prompt."""
    for side in (ours, theirs):
        side(WARM_UP_TOKENS)
    done: dict[Callable[[int], Pass], list[Pass]] = {ours: [], theirs: []}
    for repeat in range(settings.repeats):
        for side in (ours, theirs) if repeat % 2 == 0 else (theirs, ours):
            done[side].append(side(settings.max_tokens))
    return done[ours], done[theirs]


def figures(ours: Sequence[Pass], theirs: Sequence[Pass]) -> dict[str, Any]:
    """The fields that every row has about its rounds."""
    ratios = tuple(a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs))
    outputs = list(zip(ours[-1].outputs, theirs[-1].outputs))
    return {
        "prompts": len(outputs),
        "completion_tokens": ours[-1].tokens,
        "stride_tokens_per_s": statistics.median(one.tokens_per_s for one in ours),
        "transformers_tokens_per_s": statistics.median(one.tokens_per_s for one in theirs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "same_outputs": sum(a == b for a, b in outputs),
        "mean_agreeing_tokens": statistics.mean(common_prefix(a, b) for a, b in outputs),
    }


def measure_mtp(settings: Settings, depth: int) -> list[MtpRow]:
    from transformers.modeling_layers import MtpModel  # imported here: older versions lack it but can decode plainly

    transformers_logging.set_verbosity_error()  # it reports the modules as tensors that its qwen3 does not expect
    transformers_logging.disable_progress_bar()
    source = Path(settings.model or builtin_path())
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[int, tuple[Engine, Any, Any]] = {}
        for modules in dict.fromkeys((1, depth)):
            path = write_with_modules(Path(folder) / str(modules), source, modules)
            engine, hf = open_both(str(path), settings)
            first = hf.config.num_hidden_layers
            hf._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{first + i}\." for i in range(modules)]
            sides[modules] = (engine, hf, MtpModel.from_pretrained(hf, device_map={"": hf.device}))
        ways = dict.fromkeys(((1, 1, 1), (1, depth, 1), (depth, depth, depth), (1, depth, depth)))
        prompts = load_prompts().first(settings.num_prompts)
        return [measure_way(sides, encode(sides[1][0], prompts), *way, settings) for way in ways]


def write_with_modules(path: Path, source: Path, modules: int) -> Path:
    """A checkpoint with `modules` copies of the MTP module beside `source`, declared for both implementations."""
    head = source / BESIDE / "mtp"
    if not head.is_dir():
        raise SystemExit(f"there is no MTP module at {head}")
    path.mkdir()
    for file in (*source.glob("*.json"), *source.glob("*.jinja")):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, path)
    config = json.loads((source / "config.json").read_text())
    config |= {"num_nextn_predict_layers": modules, "num_mtp_layers": modules}
    config["mtp_layer_types"] = ["full_attention"] * modules
    (path / "config.json").write_text(json.dumps(config))
    tensors = dict(read_tensors(source, torch.device("cpu")))
    first = config["num_hidden_layers"]
    prefix = f"model.layers.{first}."
    for name, tensor in read_tensors(head, torch.device("cpu"), lambda name: name.startswith(prefix)):
        for i in range(modules):
            tensors[f"model.layers.{first + i}.{name.removeprefix(prefix)}"] = tensor.clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def measure_way(
    sides: dict[int, tuple[Engine, Any, Any]],
    ids: list[list[int]],
    stride_modules: int,
    stride_depth: int,
    transformers_modules: int,
    settings: Settings,
) -> MtpRow:
    engine, _, _ = sides[stride_modules]
    _, hf, modules = sides[transformers_modules]
    [variant] = read_variants([f"mtp@{stride_depth}"], (), engine.loaded.target)
    ours, theirs = take_turns(
        lambda tokens: run_stride(engine, ids, variant, 1, tokens),
        lambda tokens: run_transformers(hf, ids, 1, tokens, modules),
        settings,
    )
    return MtpRow(
        settings.model or "built-in",
        device_name(engine),
        dtype_name(engine),
        batch=1,
        **figures(ours, theirs),
        stride_modules=stride_modules,
        stride_depth=stride_depth,
        transformers_modules=transformers_modules,
        stride_tokens_per_step=ours[-1].tokens_per_step,
        transformers_tokens_per_step=theirs[-1].tokens_per_step,
    )


def run_stride(engine: Engine, ids: Sequence[list[int]], variant: Variant, streams: int, tokens: int) -> Pass:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    run = drive(engine, make_jobs(ids, variant, params, seed=0), streams)
    return Pass([timeline.token_ids for timeline in run.timelines], run.seconds, run.steps)


@torch.inference_mode()
def run_transformers(hf: Any, ids: Sequence[list[int]], size: int, tokens: int, modules: Any = None) -> Pass:
    """One batch after another. modules: transformers' MtpModel to draft with."""
    outputs: list[list[int]] = []
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    with ExitStack() as stack:
        stack.callback(hf.register_forward_hook(count).remove)
        if modules is not None:
            stack.enter_context(patch.object(type(modules), "from_pretrained", lambda *_, **__: modules))
        start = time.perf_counter()
        for first in range(0, len(ids), size):
            chunk = ids[first : first + size]
            width = max(map(len, chunk))
            padded = torch.tensor([[0] * (width - len(row)) + row for row in chunk], device=hf.device)
            seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in chunk], device=hf.device)
            out = hf.generate(
                padded,
                attention_mask=seen,
                max_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                use_mtp=modules is not None,
            )
            outputs += out[:, width:].tolist()
        return Pass(outputs, time.perf_counter() - start, steps)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def show(rows: Sequence[Row]) -> None:
    head = rows[0]
    table = Table(box=None, pad_edge=False, title=f"{head.model}, {head.dtype}, {head.device}", title_justify="left")
    drafted = ("Stride drafts", "transformers drafts", "tokens/step") if isinstance(head, MtpRow) else ("batch",)
    for name in (
        *drafted,
        "Stride tokens/s",
        "transformers tokens/s",
        "ratio",
        "rounds",
        "same outputs",
        "agreeing",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(how(row) if isinstance(row, MtpRow) else (str(row.batch),)),
            f"{row.stride_tokens_per_s:.1f}",
            f"{row.transformers_tokens_per_s:.1f}",
            f"{row.ratio:.2f}x",
            f"{min(row.ratios):.2f} to {max(row.ratios):.2f}",
            f"{row.same_outputs} of {row.prompts}",
            f"{row.mean_agreeing_tokens:.1f} tokens",
        )
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def how(row: MtpRow) -> tuple[str, str, str]:
    """(what Stride drafts with, what transformers does, tokens/step of both)."""

    def modules(count: int) -> str:
        return f"{count} module{'s' if count > 1 else ''}"

    applied = f" x {row.stride_depth}" if row.stride_depth > row.stride_modules else ""
    return (
        modules(row.stride_modules) + applied,
        modules(row.transformers_modules),
        f"{row.stride_tokens_per_step:.2f}, {row.transformers_tokens_per_step:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
