"""Embedding and output head: one matrix where the files have one, two where they have two."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm.cli.inspect import describe
from stridelm.config import EngineConfig
from stridelm.models import MODELS, WITH_TEXT
from stridelm.models.files import read_rows
from stridelm.models.layers.decoder import HEAD
from stridelm.models.loader import build_stored, load_config, load_model, weight_bytes
from stridelm.parallel.shard import Shard
from support.checkpoints.changed import copied, rewritten
from support.checkpoints.fp8 import FORMS, write_fp8
from support.oracles.models import check_model

Checkpoint = Callable[..., Path]
KINDS = (*MODELS, *WITH_TEXT)


def tied(path: Path) -> Path:
    """The checkpoint, with a config.json that says that its head is its embedding."""
    config = json.loads((path / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part["tie_word_embeddings"] = True
    (path / "config.json").write_text(json.dumps(config))
    return path


def embedding_of(path: Path) -> str:
    kind = json.loads((path / "config.json").read_text())["model_type"]
    return f"{WITH_TEXT.get(kind, 'model.')}embed_tokens.weight"


@pytest.mark.parametrize(("kind", "shard"), [*((kind, None) for kind in KINDS), ("llama", "40KB")])
def test_a_head_that_config_denies(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, shard: str | None
) -> None:
    """A head in the files that differs from the embedding is used, as in transformers, and a warning says so."""
    path = tied(copied(checkpoint(kind, scale=3.0, shard=shard), tmp_path))
    caplog.set_level(logging.WARNING)
    check_model(path, 33)
    assert sum(record.message.count(f"{HEAD} differs from") for record in caplog.records) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_the_embedding(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A head that equals the embedding, in whatever dtype, takes no memory and causes no warning."""
    source = checkpoint(kind, tie_word_embeddings=True)
    embedding = embedding_of(source)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[embedding] = tensors[embedding].bfloat16().float()
        tensors[HEAD] = tensors[embedding].bfloat16()

    caplog.set_level(logging.WARNING)
    model = load_model(rewritten(source, tmp_path, add))
    assert model.spec.tied and model.head.weight is model.embed.weight and not caplog.records


@pytest.mark.parametrize("kind", KINDS)
def test_a_tie_under_the_head_s_name(checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    """A tied model of which only the head is stored is the one of which only the embedding is."""
    source = checkpoint(kind, tie_word_embeddings=True)
    embedding = embedding_of(source)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors.pop(embedding)

    ours = load_model(rewritten(source, tmp_path, rename)).state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in load_model(source).state_dict().items())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_share(checkpoint: Checkpoint, tmp_path: Path, rank: int) -> None:
    """Every rank decides as a single one does."""
    path = tied(copied(checkpoint("llama"), tmp_path))
    ours, whole = load_model(path, shard=Shard(rank, 2)), load_model(path)
    assert not whole.spec.tied and not ours.spec.tied
    assert torch.equal(ours.head.weight, whole.head.weight) and torch.equal(ours.embed.weight, whole.embed.weight)


@pytest.mark.parametrize("form", FORMS)
def test_beside_matrices_in_eight_bits(checkpoint: Checkpoint, tmp_path: Path, form: str) -> None:
    """A quantised checkpoint's dense head is compared and used like any other."""
    source = checkpoint("llama", hidden_size=256)
    path = tied(write_fp8(tmp_path / "eight", source, form))
    assert torch.equal(load_model(path).head.weight, load_model(source).head.weight)


@pytest.mark.parametrize("change", ["equal", "different", "head alone"])
def test_estimates_agree(checkpoint: Checkpoint, tmp_path: Path, change: str) -> None:
    """What `stride inspect` and the memory estimate say of the tie is what is loaded."""
    source = checkpoint("qwen3", tie_word_embeddings=True)
    embedding = embedding_of(source)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors[embedding] + (change == "different")
        if change == "head alone":
            del tensors[embedding]

    path = rewritten(source, tmp_path, add)
    facts, loaded = describe(EngineConfig(model=str(path), dtype="float32")), load_model(path)
    empty, _ = build_stored(load_config(path), path)
    assert facts["tied_embeddings"] == loaded.spec.tied == (change != "different")
    taken = sum(parameter.nbytes for parameter in loaded.parameters())
    assert weight_bytes(empty, torch.float32) == taken == 4 * facts["parameters"]
    rotary = facts["memory"]["part_bytes"].pop("rotary tables")
    assert sum(facts["memory"]["part_bytes"].values()) == taken, rotary


@pytest.mark.parametrize("row", [0, 31, 63])
def test_a_difference_in_one_place(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    """Matrices are compared in pieces that together are all of them."""
    source = checkpoint("qwen3", tie_word_embeddings=True)
    embedding = embedding_of(source)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors[embedding].clone()
        tensors[HEAD][row, -1] += 1

    pieces: list[int] = []

    def counting(path: Path, name: str, begin: int, end: int) -> torch.Tensor:
        rows = read_rows(path, name, begin, end)
        pieces.append(rows.nbytes)
        return rows

    monkeypatch.setattr("stridelm.models.ties.read_rows", counting)
    monkeypatch.setattr("stridelm.models.ties.PIECE_BYTES", 10 * 64 * 4)
    assert not load_config(rewritten(source, tmp_path, add)).tie_word_embeddings
    assert max(pieces) == 10 * 64 * 4


def test_weights_that_are_not_there(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Without files to decide, as where weights are drawn at random, config.json does."""
    path = copied(checkpoint("qwen3", tie_word_embeddings=True), tmp_path)
    (path / "model.safetensors").write_text("not weights")
    model: Any = load_model(path, load_format="dummy")
    assert model.spec.tied
    (path / "model.safetensors").unlink()
    assert load_model(path, load_format="dummy").spec.tied
