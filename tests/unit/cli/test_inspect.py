"""`stride inspect` reports what loading would find, and loads nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stridelm import LLM
from stridelm.builtin import builtin_path
from stridelm.cache.layout import bytes_per_token
from stridelm.cli import main as entry_point
from stridelm.draft import DRAFTERS
from stridelm.draft.whose import heads_of
from stridelm.models import MODELS, loader
from stridelm.models.files import DTYPES
from stridelm.verify import RULES
from support.checkpoints.fp8 import write_fp8
from support.checkpoints.heads import write_mtp
from support.checkpoints.models import SMALL_OF
from support.oracles.models import VARIANTS

Inspect = Callable[..., dict[str, Any]]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Inspect:
    """inspect(path, *options): its JSON output. Reading a weight is an error."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(loader, "read_tensors", refuse)

    def run(path: Path, *options: str) -> dict[str, Any]:
        assert entry_point.main(["inspect", str(path), "--json", *options]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", list(MODELS))
def test_it_agrees_with_transformers_and_the_loader(
    model_type: str, tied: bool, checkpoint: Callable[..., Path], inspect: Inspect
) -> None:
    path = checkpoint(model_type, tie_word_embeddings=tied)
    facts = inspect(path)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    assert facts["architecture"] == type(theirs).__name__
    trained = ("e_score_correction_bias", "layer_scalar")
    buffers = [buffer for name, buffer in theirs.named_buffers() if name.endswith(trained)]
    assert facts["parameters"] == theirs.num_parameters() + sum(buffer.numel() for buffer in buffers)
    assert (facts["layers"], facts["heads"]) == (2, 4)
    latent = "kv_lora_rank" in SMALL_OF.get(model_type, {})
    assert (facts["kv_heads"], facts["head_dim"]) == ((None, None) if latent else (2, 16))
    partly = model_type == "glm4_moe"
    assert (facts["latent_dim"], facts["rope_dim"]) == ((32, 8) if latent else (None, 8 if partly else 16))
    assert (facts["vocab_size"], facts["context"], facts["tied_embeddings"]) == (64, 256, tied)
    assert facts["stored"] == {"float32": len(load_file(path / "model.safetensors"))}
    assert facts["weight_bytes"] == 4 * facts["parameters"]
    ours = loader.build_empty(loader.load_config(path), path)
    sizes = facts["kv_bytes_per_token"]
    assert sizes.pop("fp8") * 4 == sizes["float32"]
    for name, size in sizes.items():
        assert size == bytes_per_token(ours.layer_states, DTYPES[name])
    mixture = SMALL_OF.get(model_type, {})
    assert facts["num_experts"] == mixture.get("n_routed_experts", mixture.get("num_experts"))
    for name in ("num_experts_per_tok", "moe_intermediate_size"):
        assert facts[name] == mixture.get(name)
    # layers and a latent row's width, or key and value, layers, heads and their width
    assert facts["kv_bytes_per_token"]["float32"] == (2 * 40 * 4 if latent else 2 * 2 * 2 * 16 * 4)


def test_windows_and_shards_and_dtypes(checkpoint: Callable[..., Path], inspect: Inspect, tmp_path: Path) -> None:
    assert inspect(checkpoint("mistral", sliding_window=9))["windows"] == [9]
    path = checkpoint("qwen3", shard="40KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    assert inspect(path)["parameters"] * 4 == inspect(path)["weight_bytes"]
    copy = copied(path, tmp_path)
    for file in copy.glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    assert list(inspect(copy)["stored"]) == ["bfloat16"]


def test_every_drafter_says_whether_it_can(speaking: Path, inspect: Inspect) -> None:
    """The same error as for a request, with the remedy; a mask id given here counts."""
    facts = inspect(speaking)
    assert [drafter["name"] for drafter in facts["drafters"]] == list(DRAFTERS)
    for drafter in facts["drafters"]:
        kind = DRAFTERS.get(drafter["name"])
        assert drafter["usable"] == (drafter["why_not"] is None)
        assert drafter["default_depth"] == kind.default_depth
        rules = [rule for rule in RULES if RULES.get(rule).works_with(kind.rules, kind.branches)]
        assert kind.rules <= set(rules)
        assert drafter["acceptance"] == [rule for rule in rules if not RULES.get(rule).simulated]
        assert drafter["lossy"] == [rule for rule in drafter["acceptance"] if not RULES.get(rule).lossless]
    able = {drafter["name"]: drafter for drafter in facts["drafters"]}
    assert "give mask_token_id" in able["mask"]["why_not"]
    assert able["none"]["usable"] and able["ngram"]["usable"]
    assert facts["auto"] == "ngram"
    with_id = inspect(speaking, "--mask-token-id", "299")
    assert next(d for d in with_id["drafters"] if d["name"] == "mask")["usable"]
    assert (with_id["auto"], with_id["mask_token_ids"]) == ("mask", [299])


def test_heads_in_the_model_s_directory_can_draft(inspect: Inspect) -> None:
    """All that lie beside the built-in model, without being named. Which is tried first does not follow from that."""
    facts = inspect(builtin_path())
    able = {drafter["name"] for drafter in facts["drafters"] if drafter["usable"]}
    heads = heads_of(builtin_path(), ())
    assert list(heads) == ["mtp", "eagle", "frozen_kv"] and heads.keys() <= able
    assert facts["auto"] == "hybrid"


def test_kinds_of_attention_on_the_screen(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert entry_point.main(["inspect", str(checkpoint("deepseek_v3"))]) == 0
    assert "4 heads on latent rows of 32 + 8" in capsys.readouterr().out
    assert entry_point.main(["inspect", str(checkpoint("glm4_moe"))]) == 0
    out = capsys.readouterr().out
    assert "2 KV heads of 16" in out and "default RoPE of 8 dimensions a head" in out
    path = checkpoint("gemma4_text", **VARIANTS["gemma4_text"]["shared"])
    assert entry_point.main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "MLP 96 or 192" in out and "default or proportional RoPE" in out
    assert "2 KV heads of 16 or 32, sliding window 7; 2 layers read others' KV" in out


def test_memory_is_told_for_any_gpu(speaking: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str]) -> None:
    """What would be taken of it and left for KV; where nothing is left, why an engine would not start."""
    here, there = inspect(speaking, "--device", "cpu")["memory"], inspect(speaking, "--memory", "8")["memory"]
    assert (here["device"], there["device"], there["free_bytes"]) == ("cpu", "cuda", 8 * 2**30)
    assert there["part_bytes"]["captured steps"] == 2 * 2**30 and "captured steps" not in here["part_bytes"]
    assert there["contexts"] == 32 and there["why_not"] is None
    assert there["left_bytes"] == 8 * 2**30 - sum(there["part_bytes"].values())
    small = inspect(speaking, "--memory", "1.5", "--max-num-seqs", "4")["memory"]
    assert (small["contexts"], small["kv_bytes"]) == (0, 0)
    assert "lower capture_memory" in small["why_not"]
    with pytest.raises(SystemExit):
        entry_point.main(["inspect", str(speaking), "--memory", "0"])
    assert "memory must be a number above 0" in capsys.readouterr().err


def test_on_the_screen(speaking: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert entry_point.main(["inspect", str(speaking)]) == 0
    out = capsys.readouterr().out
    for words in (
        "Qwen3ForCausalLM",
        "256 tokens",
        "256 B in bfloat16",
        "trust (lossy)",
        "give mask_token_id",
        "rotary tables",
        "contexts of 256 tokens",
    ):
        assert words in out


def copied(path: Path, to: Path) -> Path:
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def without_norm(file: Path) -> None:
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (without_norm, "missing: model.norm.weight"),
    "unexpected": (lambda f: save_file({**load_file(f), "spare": torch.zeros(2)}, f), "unexpected: spare"),
    "misshapen": (
        lambda f: save_file({**load_file(f), "model.norm.weight": torch.zeros(3)}, f),
        "model.norm.weight is [3], config.json says [64]",
    ),
    "whole numbers": (
        lambda f: save_file({**load_file(f), "model.norm.weight": torch.zeros(64, dtype=torch.int8)}, f),
        "model.norm.weight (torch.int8)",
    ),
    "truncated": (lambda f: f.write_bytes(f.read_bytes()[:-100]), "copy it again"),
    "absent": (lambda f: f.unlink(), "has no *.safetensors"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_would_not_load_is_said_without_loading(
    what: str, speaking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(speaking, tmp_path)
    spoil, says = BROKEN[what]
    spoil(path / "model.safetensors")
    assert entry_point.main(["inspect", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err and captured.err.count("\n") == 1


EXPERT = "model.layers.2.mlp.experts.3.up_proj."
BROKEN_MODULES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "one of two": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("model.layers.3.")],
        "missing: model.layers.3.eh_proj.weight",
    ),
    "no expert": (lambda t: t.pop(f"{EXPERT}weight"), f"missing: {EXPERT}weight"),
    "no scale": (lambda t: t.pop(f"{EXPERT}weight_scale_inv"), f"missing: {EXPERT}weight_scale_inv"),
    "short scale": (
        lambda t: t.update({f"{EXPERT}weight_scale_inv": torch.ones(7, 7)}),
        f"{EXPERT}weight_scale_inv is [7, 7], config.json says [1, 1]",
    ),
}


@pytest.mark.parametrize("what", BROKEN_MODULES)
def test_modules_that_would_not_load(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is the engine's own, and says whose weights they are and how to serve without them; then the drafter
    is told to be of no use."""
    source = write_mtp(tmp_path / "source", "deepseek", 2, model_type="deepseek_v3")
    path = write_fp8(tmp_path / "stored", source, "block")
    spoil, says = BROKEN_MODULES[what]
    tensors = load_file(path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        LLM(str(path), skip_tokenizer_init=True, num_pages=20)
    assert str(error.value).startswith("drafter 'mtp' cannot be loaded: ")
    assert str(error.value).endswith("; drafter='none' serves without it")
    capsys.readouterr()
    assert entry_point.main(["inspect", str(path)]) == 2
    assert capsys.readouterr() == ("", f"stride: error: {error.value}\n")
    assert entry_point.main(["inspect", str(path), "--drafter", "none", "--json"]) == 0
    drafters = {drafter["name"]: drafter for drafter in json.loads(capsys.readouterr().out)["drafters"]}
    assert not drafters["mtp"]["usable"] and says in drafters["mtp"]["why_not"]
    assert len(LLM(str(path), drafter="none", skip_tokenizer_init=True, num_pages=20).generate([5])) == 1
