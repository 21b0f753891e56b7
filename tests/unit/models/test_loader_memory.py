"""Loading reports its progress, takes little memory of its own, and refuses a model that does not fit before anything
is allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from stridelm import LLM
from stridelm.models import files, loader
from stridelm.models.files import read_tensors
from stridelm.models.layers.slots import Split
from stridelm.models.loader import build_empty, load_config, load_model, materialise, weight_bytes
from stridelm.parallel.shard import Shard
from stridelm.progress import size

Checkpoint = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every progress bar, and the amounts reported to it."""
    seen: list[dict[str, Any]] = []

    @contextmanager
    def bar(description: str, total: int, unit: str, least: int) -> Iterator[Callable[[int], None]]:
        told: list[int] = []
        seen.append({"total": total, "unit": unit, "least": least, "told": told})
        yield told.append

    monkeypatch.setattr(loader, "bar", bar)
    return seen


def empty(path: Path) -> Any:
    return build_empty(load_config(path), path)


def room_of(path: Path, dtype: torch.dtype) -> int:
    """Bytes that the loaded model takes."""
    return weight_bytes(empty(path), dtype) + empty(path).ropes.nbytes


# Reading


def test_tensors_come_as_they_are_stored(checkpoint: Checkpoint) -> None:
    """All tensors of all files, on the requested device."""
    path = checkpoint("qwen3", shard="40KB")
    stored = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert len(list(path.glob("*.safetensors"))) > 1
    read = dict(read_tensors(path, CPU))
    assert read.keys() == stored.keys()
    for name, tensor in read.items():
        assert tensor.device == CPU
        assert torch.equal(tensor, stored[name])


@pytest.mark.parametrize(("given", "asked"), [("cpu", "cpu"), ("cuda:1", "cuda:1")])
def test_files_are_opened_for_the_device(
    given: str, asked: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors itself puts tensors on the device, so that it can use pinned memory."""
    opened: list[str] = []

    @contextmanager
    def safe_open(file: Path, framework: str, device: str) -> Iterator[Any]:
        opened.append(device)
        yield type("Handle", (), {"keys": lambda self: []})()

    monkeypatch.setattr(files, "safe_open", safe_open)
    assert list(read_tensors(checkpoint("qwen3"), torch.device(given))) == []
    assert opened == [asked]


@pytest.mark.parametrize("mapped", [1, 5000, 2**30])
def test_files_are_mapped_anew(mapped: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mapping lasts for more than so many bytes and a tensor, and every tensor comes once."""
    path = checkpoint("qwen3")
    stored = load_file(path / "model.safetensors")
    opened: list[Path] = []
    real = files.opened

    def counting(file: Path, device: torch.device) -> Any:
        opened.append(file)
        return real(file, device)

    monkeypatch.setattr(files, "MAPPED_BYTES", mapped)
    monkeypatch.setattr(files, "opened", counting)
    read = list(read_tensors(path, CPU))
    assert sorted(name for name, _ in read) == sorted(stored)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in read)
    assert {1: len(opened) == len(stored), 5000: 1 < len(opened) < len(stored), 2**30: len(opened) == 1}[mapped]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_share_is_read_by_itself(dim: int, checkpoint: Checkpoint) -> None:
    """Of a matrix, a rank reads its rows or columns; what is not shared comes whole."""
    path, name = checkpoint("qwen3"), "model.layers.1.mlp.up_proj.weight"
    stored = load_file(path / "model.safetensors")
    for rank in range(2):
        split = Split(dim, rank, 2)
        for each, tensor in read_tensors(path, CPU, shares={name: split}):
            assert torch.equal(tensor, split.of(stored[each]) if each == name else stored[each])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_rank_reads_its_shares_alone(kind: str, checkpoint: Checkpoint, bars: list[dict[str, Any]]) -> None:
    """Of everything that is cut, half the bytes; the bar counts what is read."""
    path = checkpoint(kind)
    stored = load_file(path / "model.safetensors")
    model = build_empty(load_config(path), path, Shard(0, 2))
    cut = {name for name, slot in model.slots() if slot.split.world > 1}
    assert any("o_proj" in name for name in cut) and any("up_proj" in name for name in cut)
    load_model(path, shard=Shard(1, 2), serving=False)
    (seen,) = bars
    expected = sum(tensor.nbytes // (2 if name in cut else 1) for name, tensor in stored.items())
    assert sum(seen["told"]) == seen["total"] == expected


def test_what_is_not_wanted_is_not_read(checkpoint: Checkpoint, tmp_path: Path, bars: list[dict[str, Any]]) -> None:
    """A redundant tensor that older files carry costs nothing."""
    path = checkpoint("qwen3")
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(path / "model.safetensors")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1000)}
    save_file({**stored, **extra}, tmp_path / "model.safetensors")
    load_model(tmp_path)
    (seen,) = bars
    assert sum(seen["told"]) == seen["total"] == sum(tensor.nbytes for tensor in stored.values())


# What loading itself takes


def peak_beyond(path: Path, **options: Any) -> int:
    """Bytes that were allocated at the worst moment of a load, beyond those of the loaded model. Counted by torch's
    allocator, which also counts mapped files, at their full size: those are left out."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = load_model(path, serving=False, **options)
    mapped = {file.stat().st_size for file in path.glob("*.safetensors")}
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    amounts = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    running = list(accumulate(amount for amount in amounts if abs(amount) not in mapped))
    kept = sum(p.untyped_storage().nbytes() for p in {id(p): p for p in model.parameters()}.values())
    assert amounts.count(-max(mapped)) >= 1 and running[-1] >= kept
    return max(running) - running[-1]


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_loading_takes_no_more_for_more_layers(quantization: str | None, checkpoint: Checkpoint) -> None:
    """Beyond the model itself a load allocates a few times its largest tensor at most, however many tensors there are:
    no state dict on the host, no second copy of a layer's experts."""
    shape = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 16, "shard": "1MB"}
    peaks = {}
    for layers in (2, 8):
        path = checkpoint("qwen3_moe", num_hidden_layers=layers, **shape)
        tensors = [t for file in path.glob("*.safetensors") for t in load_file(file).values()]
        largest = max(t.nbytes for t in tensors)
        experts = sum(t.nbytes for t in tensors if t.shape == (128, 128)) // layers
        assert experts > 12 * largest
        peaks[layers] = peak_beyond(path, quantization=quantization)
        assert peaks[layers] <= (4 if quantization else 1) * largest
    assert peaks[8] == peaks[2]


# Room


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weight_bytes(dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    """What the loaded parameters take in the serving dtype; tied ones are counted and held once."""
    sizes = {}
    for tied in (False, True):
        path = checkpoint("qwen3", tie_word_embeddings=tied)
        predicted = weight_bytes(empty(path), dtype)
        model = load_model(path, dtype=dtype, serving=False)
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        assert predicted == sum(storages.values())
        sizes[tied] = predicted
    assert sizes[False] - sizes[True] == 64 * 64 * dtype.itemsize  # a vocabulary of 64, 64 wide


def test_tied_weights_are_allocated_once(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head never has memory of its own, not even for a moment: a model that just fits would fail."""
    made: list[torch.Size] = []
    empty_like = torch.empty_like

    def counting(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        made.append(tensor.shape)
        return empty_like(tensor, **options)

    model = empty(checkpoint("qwen3", tie_word_embeddings=True))
    monkeypatch.setattr(torch, "empty_like", counting)
    materialise(model, torch.float32, CPU)
    assert made.count(torch.Size([64, 64])) == 1 + sum(p.shape == (64, 64) for p in model.blocks.parameters())
    assert model.head.weight is model.embed.weight
    assert bool(model.head.weight.isnan().all())


def test_a_model_that_does_not_fit(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what the weights take, what is free where, what is missing, and what would help; nothing was
    allocated. A byte more of memory, and it loads."""
    path = checkpoint("qwen3", vocab_size=4096, hidden_size=256, tie_word_embeddings=True)
    need, narrow = (room_of(path, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert 2**20 < need < 2**23
    monkeypatch.setattr(loader, "materialise", lambda *args: pytest.fail("memory was allocated"))
    monkeypatch.setattr(loader, "free_memory", lambda device: need - 2**20)
    with pytest.raises(ValueError, match="choose a narrower dtype, a smaller model or another device") as caught:
        LLM(path, dtype="float32", device="cpu", skip_tokenizer_init=True)
    said = str(caught.value)
    assert f"take {need / 2**20:.1f} MiB in float32" in said
    assert f"{need / 2**20 - 1:.1f} MiB are free on cpu: 1.0 MiB are missing" in said
    monkeypatch.setattr(loader, "free_memory", lambda device: narrow - 1)
    with pytest.raises(ValueError, match="1 B are missing; choose a smaller model"):
        load_model(path, dtype=torch.bfloat16)
    monkeypatch.undo()
    monkeypatch.setattr(loader, "free_memory", lambda device: need)
    load_model(path, dtype=torch.float32)


def test_gibibytes_are_said_as_such(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 8B parameters on a device with 10 GiB free, from its config alone."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    monkeypatch.setattr(loader, "free_memory", lambda device: 10 * 2**30)
    with pytest.raises(ValueError, match=r"15\.0 GiB in bfloat16 but only 10\.0 GiB .* cuda:1: 5\.0 GiB are missing"):
        loader.check_room(build_empty(config, "8b"), torch.bfloat16, torch.device("cuda:1"))


# Progress


def test_loading_tells_every_byte(checkpoint: Checkpoint, bars: list[dict[str, Any]]) -> None:
    """The total is known from the headers of all files before any is read, and equals the sum reported in the end."""
    path = checkpoint("qwen3", shard="40KB")
    load_model(path, dtype=torch.bfloat16)
    (seen,) = bars
    tensors = [t for file in path.glob("*.safetensors") for t in load_file(file).values()]
    assert seen["total"] == sum(t.nbytes for t in tensors)
    assert sorted(seen["told"]) == sorted(t.nbytes for t in tensors)
    assert (seen["unit"], seen["least"]) == ("bytes", loader.SHOWN_BYTES)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_log_says_what_was_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, load_format: str
) -> None:
    """How much it was, and how fast; nothing if weights are drawn."""
    path = checkpoint("qwen3", shard="40KB")
    clock = iter((7.0, 9.0))
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with caplog.at_level("INFO", logger=loader.logger.name):
        load_model(path, load_format=load_format)
    total = sum(t.nbytes for file in path.glob("*.safetensors") for t in load_file(file).values())
    said = f"{size(total)} of weights read from {path} in 2.0 s, {size(total // 2)}/s"
    assert caplog.messages == ([said] if load_format == "auto" else [])


def test_drawing_tells_every_byte(checkpoint: Checkpoint, bars: list[dict[str, Any]]) -> None:
    """Random weights are counted in the serving dtype, and tied ones once."""
    path = checkpoint("qwen3", tie_word_embeddings=True)
    load_model(path, dtype=torch.bfloat16, load_format="dummy")
    (seen,) = bars
    assert seen["total"] == sum(seen["told"]) == weight_bytes(empty(path), torch.bfloat16)
    assert (seen["unit"], seen["least"]) == ("bytes", loader.SHOWN_BYTES)
