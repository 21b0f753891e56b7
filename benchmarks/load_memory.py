"""The host memory that loading a checkpoint takes beyond the model itself, and the rate at which it is read.

    python benchmarks/load_memory.py --gib 2 4 --json results/load_memory.jsonl

A mixture of experts of about that size, with random weights in files of at most 1 GiB, is written into a temporary
directory and loaded in a process of its own, which samples its anonymous memory: pages mapped from files are not the
process's own. Without --device cuda the weights are themselves on the host, and what they take is subtracted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP
from stridelm.models.files import read_headers
from stridelm.models.loader import build_empty, load_config, load_model, weight_bytes
from stridelm.progress import size

LAYER = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 4}
FILE_BYTES = 2**30
SAMPLED_S = 0.002


@dataclass(frozen=True)
class Settings:
    gib: float
    device: str
    quantization: str | None
    serving: bool


@dataclass(frozen=True)
class Measured:
    weights: int
    """Bytes that the loaded weights take on the host."""
    peak: int
    """Anonymous memory at its peak beyond that, and beyond what the process had before."""
    largest: int
    """Bytes of the largest tensor."""
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[1.0, 2.0], help="sizes of the checkpoints")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--serving", action="store_true", help="also choose products, which on a CPU packs the weights")
    parser.add_argument("--directory", type=Path, help="where the checkpoints are written (default: the temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = [Settings(gib, args.device, args.quantization, args.serving) for gib in args.gib]
    if args.measure is not None:
        sys.stdout.write(json.dumps(asdict(measure(args.measure, chosen[0]))))
        return 0
    table = Table("checkpoint", "largest tensor", "host memory beyond the model", "rate")
    for settings in chosen:
        found = in_a_process(settings, args.directory)
        rate = settings.gib * 2**30 / found.seconds
        table.add_row(f"{settings.gib:g} GiB", size(found.largest), size(found.peak), f"{size(int(rate))}/s")
        if args.json:
            append_result(args.json, "load_memory", settings, **asdict(found))
    Console().print(table)
    return 0


def in_a_process(settings: Settings, directory: Path | None) -> Measured:
    """Write a checkpoint and load it elsewhere. Raises CalledProcessError if that fails."""
    with tempfile.TemporaryDirectory(dir=directory) as path:
        write(Path(path), int(settings.gib * 2**30))
        command = [sys.executable, __file__, "--measure", path, "--gib", str(settings.gib), "--device", settings.device]
        command += ["--quantization", settings.quantization] if settings.quantization else []
        command += ["--serving"] if settings.serving else []
        return Measured(**json.loads(subprocess.run(command, check=True, capture_output=True).stdout))


def write(path: Path, total: int) -> None:
    """A checkpoint of whole layers that take about `total` bytes, a file at a time."""
    from transformers import Qwen3MoeConfig

    shape = {"vocab_size": 32768, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, **LAYER}
    per_layer = 2 * 3 * LAYER["num_experts"] * LAYER["hidden_size"] * LAYER["moe_intermediate_size"]
    config = Qwen3MoeConfig(**shape, num_hidden_layers=max(1, total // per_layer), dtype="bfloat16")
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(path)
    index: dict[str, str] = {}
    for number, tensors in enumerate(files_of(path)):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, path / name)
        index |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def files_of(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    model = build_empty(load_config(path), path)
    tensors: dict[str, torch.Tensor] = {}
    held = 0
    for name, slot in model.slots():
        shape = slot.stored_shape(model.get_parameter(slot.name)[slot.start : slot.stop].shape)
        tensors[name] = torch.randn(shape, dtype=torch.bfloat16)
        held += tensors[name].nbytes
        if held >= FILE_BYTES:
            yield tensors
            tensors, held = {}, 0
    if tensors:
        yield tensors


def measure(path: Path, settings: Settings) -> Measured:
    config = load_config(path)
    empty = build_empty(config, path)
    torch.zeros(1, device=settings.device)  # what a device's driver takes is there before
    before, began = anonymous(), time.perf_counter()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(SAMPLED_S):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(
        path,
        dtype=torch.bfloat16,
        device=settings.device,
        quantization=settings.quantization,
        serving=settings.serving,
    )
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    on_host = 0
    if settings.device == "cpu":  # packed weights are no parameters: they take what the empty model's would
        on_host = weight_bytes(empty if settings.serving else model, torch.bfloat16)
    return Measured(on_host, max(0, peak - before - on_host), largest(path), seconds)


def largest(path: Path) -> int:
    """Bytes of the checkpoint's largest tensor."""
    return max(header.nbytes for _, header in read_headers(path))


def anonymous() -> int:
    """Bytes of this process's own memory that are resident."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


if __name__ == "__main__":
    sys.exit(main())
