"""Checkpoints in eight bits against their definition, and the refusal of those that are not supported or broken."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stridelm import LLM
from stridelm.cli.main import main
from stridelm.draft.head_drafter import HeadDrafter
from stridelm.draft.mtp.head import MtpHead
from stridelm.models.layers.linear import Linear
from stridelm.models.loader import build_stored, format_names, load_config, load_model, weight_bytes
from stridelm.train.export import load_for_training
from support.checkpoints.fp8 import BLOCK_CONFIG, CHANNEL_CONFIG, FORMS, SCALES, by_definition, write_fp8
from support.checkpoints.heads import write_mtp
from support.checks.eight_bit_kv import write_scaled
from support.oracles.fp8 import check_fp8

Checkpoint = Callable[..., Path]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-whole-blocks": ("llama", {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_size": 160, "intermediate_size": 200}),
    "qwen3-partial-blocks": ("qwen3", {"hidden_size": 200, "intermediate_size": 328, "head_dim": 20}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {"hidden_size": 256, "moe_intermediate_size": 136}),
    "qwen2-moe": ("qwen2_moe", {"hidden_size": 200, "num_experts": 4}),
    "deepseek": ("deepseek_v3", {"hidden_size": 160, "kv_lora_rank": 144, "moe_intermediate_size": 48}),
    "deepseek-all-dense": ("deepseek_v3", {"first_k_dense_replace": 2, "q_lora_rank": None}),
}
by_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def stored(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """stored(variant, form): its checkpoint in eight bits."""

    def get(variant: str, form: str, **options: Any) -> Path:
        kind, changes = VARIANTS[variant]
        return write_fp8(tmp_path / f"{variant}-{form}", checkpoint(kind, scale=3.0, **changes), form, **options)

    return get


@by_form
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(stored: Callable[..., Path], variant: str, form: str) -> None:
    """Prefill, chunks and decode steps give the logits of the definition within 1e-5, with products of either kind."""
    path = stored(variant, form)
    check_fp8(path, form, 7)
    check_fp8(path, form, 1024, deterministic=False)


@pytest.mark.parametrize("variant", ["llama-biases", "qwen3-moe", "deepseek"])
def test_scales_in_eight_bits(stored: Callable[..., Path], variant: str) -> None:
    """Powers of two that are stored as such, as transformers does, are what they are as float32, as DeepSeek does."""

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(SCALES["powers"])]:
            short = tensors[name].to(torch.float8_e8m0fnu)
            assert torch.equal(short.float(), tensors[name])
            tensors[name] = short

    path = stored(variant, "powers")
    wanted = load_model(path).state_dict()
    got = load_model(rewritten(path, shorten)).state_dict()
    assert got.keys() == wanted.keys()
    assert all(torch.equal(tensor.float(), wanted[name].float()) for name, tensor in got.items())


@by_form
def test_modules_that_stay_dense(stored: Callable[..., Path], form: str) -> None:
    """Where a tensor is stored without scales it is dense, whether config.json lists it or not."""

    def leaves(name: str) -> bool:
        return ".0.mlp.down_proj" in name or ".1.self_attn" in name

    path = stored("llama-whole-blocks", form, leaves=leaves)
    check_fp8(path, form, 1024)
    model = load_model(path)
    dense = [
        name for name, part in model.named_modules() if getattr(part, "format", None) and part.format.name == "dense"
    ]
    assert dense == ["blocks.0.mlp.down", "blocks.1.mixer.qkv", "blocks.1.mixer.o", "head"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_quantised_while_loading(checkpoint: Checkpoint, stored: Callable[..., Path], variant: str) -> None:
    """A dense checkpoint loaded with quantization='fp8' is the model that its quantised copy is."""
    kind, changes = VARIANTS[variant]
    ours = load_model(checkpoint(kind, scale=3.0, **changes), quantization="fp8", serving=False).state_dict()
    # What is widened is left dense, and what is quantised beside it stays the same.
    path = stored(variant, "block", leaves=lambda name: "kv_b_proj" in name)
    theirs = load_model(path, serving=False).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor.float(), theirs[name].float()) for name, tensor in ours.items())


@by_form
def test_bytes(stored: Callable[..., Path], form: str) -> None:
    """The profile of memory counts scales, and eight bits for a matrix."""
    path = stored("llama-biases", form)
    model, _ = build_stored(load_config(path), path)
    loaded = load_model(path, dtype=torch.bfloat16, serving=False)
    assert weight_bytes(model, torch.bfloat16) == sum(parameter.nbytes for parameter in loaded.parameters())
    assert loaded.get_parameter("blocks.0.mlp.down.weight").itemsize == 1


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_random_weights(checkpoint: Checkpoint, stored: Callable[..., Path], quantization: str | None) -> None:
    """A model to measure speed with: the formats are those of the config, and its logits are finite."""
    path = checkpoint("llama", scale=3.0) if quantization else stored("llama-whole-blocks", "block")
    if not quantization:
        (path / "model.safetensors").unlink()
    model = load_model(path, load_format="dummy", quantization=quantization, dtype=torch.bfloat16)
    assert format_names(model.blocks) == ["FP8 by block"] and model.head.format.name == "dense"
    out = LLM(str(path), load_format="dummy", quantization=quantization, skip_tokenizer_init=True, num_pages=20)
    assert len(out.generate([5, 6, 7])[0].outputs[0].token_ids) > 0


@pytest.mark.parametrize(
    ("form", "name"), [("block", "FP8 by block"), ("powers", "FP8 by block (UE8M0)"), ("channel", "FP8 by channel")]
)
def test_inspect(stored: Callable[..., Path], capsys: pytest.CaptureFixture[str], form: str, name: str) -> None:
    """The format is named."""
    assert main(["inspect", str(stored("llama-biases", form)), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["weight_formats"] == [name, "dense"]
    assert facts["stored"]["float8_e4m3fn"] == 14


# What is refused


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    made = copy.deepcopy(config)
    for name, value in changes.items():
        part: Any = made
        *path, last = name.split("__")
        for step in path:
            part = part[step]
        part[last] = value
    return made


GROUP = "config_groups__group_0__"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "block size": (changed(BLOCK_CONFIG, weight_block_size=[64, 128]), "weight_block_size [64, 128] is not supported"),
    "per tensor": (changed(BLOCK_CONFIG, weight_block_size=None), "weight_block_size None is not supported"),
    "static": (changed(BLOCK_CONFIG, activation_scheme="static"), "activation_scheme 'static' is not supported"),
    "e5m2": (changed(BLOCK_CONFIG, fmt="e5m2"), "fmt 'e5m2' is not supported; supported: 'e4m3'"),
    "scales in a format unheard of": (
        changed(BLOCK_CONFIG, scale_fmt="ue4m3"),
        "scale_fmt 'ue4m3' is not supported; supported: 'float' or 'ue8m0'",
    ),
    "packed": (changed(CHANNEL_CONFIG, format="pack-quantized"), "format 'pack-quantized' is not supported"),
    "four bits": (changed(CHANNEL_CONFIG, **{f"{GROUP}weights__num_bits": 4}), "with weights"),
    "per tensor rows": (changed(CHANNEL_CONFIG, **{f"{GROUP}input_activations__strategy": "tensor"}), "with input_act"),
    "static rows": (changed(CHANNEL_CONFIG, **{f"{GROUP}input_activations__dynamic": False}), "with input_activations"),
    "weights alone": (changed(CHANNEL_CONFIG, **{f"{GROUP}input_activations": None}), "with input_activations {}"),
    "no groups": (changed(CHANNEL_CONFIG, config_groups=None), "with weights {}"),
    "KV by heads": (
        changed(CHANNEL_CONFIG, kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "attn_head"}),
        "kv_cache_scheme",
    ),
    "experts in four bits": (changed(BLOCK_CONFIG, expert_dtype="fp4"), "expert_dtype 'fp4' is not supported"),
    "quantised outputs": (
        changed(CHANNEL_CONFIG, **{f"{GROUP}output_activations": {"num_bits": 8}}),
        "with output_activations {'num_bits': 8} is not supported; supported: none",
    ),
    "transforms": (
        changed(CHANNEL_CONFIG, transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
        "with transform_config {'config_groups': {'R1'",
    ),
    "sparse": (
        changed(CHANNEL_CONFIG, sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config in format 'sparse-24-bitmask' is not supported; supported: 'dense'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_configs(checkpoint: Checkpoint, tmp_path: Path, case: str) -> None:
    """Before any file of weights is opened, with what is supported and a way out."""
    entry, message = REFUSED[case]
    config = json.loads((checkpoint("llama", scale=3.0) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": entry}))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_model(tmp_path)
    assert "otherwise give the checkpoint that they were quantised from" in str(error.value)


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "groups in a list": (changed(CHANNEL_CONFIG, config_groups=["a"]), "config_groups must be an object; got ['a']"),
    "group is text": (
        changed(CHANNEL_CONFIG, config_groups={"g": "FP8"}),
        "config_groups.g must be an object; got 'FP8'",
    ),
    "preset": (
        changed(CHANNEL_CONFIG, config_groups={"FP8_DYNAMIC": ["Linear"]}),
        "config_groups.FP8_DYNAMIC must be an object; got ['Linear']",
    ),
    "weights are text": (
        changed(CHANNEL_CONFIG, **{f"{GROUP}weights": "FP8"}),
        "config_groups.group_0.weights must be an object; got 'FP8'",
    ),
    "scheme of KV is text": (changed(CHANNEL_CONFIG, kv_cache_scheme="fp8"), "kv_cache_scheme must be an object"),
    "sparsity is text": (changed(CHANNEL_CONFIG, sparsity_config="2:4"), "sparsity_config must be an object"),
    "modules are a number": (
        changed(BLOCK_CONFIG, modules_to_not_convert=5),
        "modules_to_not_convert must be a list of modules' names; got 5",
    ),
    "modules are text": (
        changed(CHANNEL_CONFIG, ignore="lm_head"),
        "ignore must be a list of modules' names; got 'lm_head'",
    ),
    "modules are an object": (changed(CHANNEL_CONFIG, ignore={"a": 1}), "ignore must be a list of modules' names"),
    "module is a number": (changed(CHANNEL_CONFIG, ignore=[5]), "ignore must be a list of modules' names; got [5]"),
    "no pattern": (changed(CHANNEL_CONFIG, ignore=["re:("]), "ignore must be names, or regular expressions after re:"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_configs(checkpoint: Checkpoint, tmp_path: Path, case: str) -> None:
    """The error names the file and the field, and says what it must be."""
    entry, message = MALFORMED[case]
    config = json.loads((checkpoint("llama", scale=3.0) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": entry}))
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/config.json: quantization_config.{message}")):
        load_model(tmp_path)


@by_form
def test_copies_in_eight_bits(tmp_path: Path, form: str) -> None:
    """A head in eight bits is neither the embedding nor the model's head: a module, and a model that config.json calls
    tied, use it."""
    heads = ("lm_head", "model.layers.2.shared_head.head")

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for head in heads:
            stored, scale = by_definition(tensors.get(f"{head}.weight", torch.ones(64, 64)), form)
            tensors.update({f"{head}.weight": stored, f"{head}.{SCALES[form]}": scale})

    tied: dict[str, Any] = {"model_type": "deepseek_v3", "tie_word_embeddings": True}
    source = write_mtp(tmp_path / "source", "deepseek", copies=True, **tied)
    path = rewritten(write_fp8(tmp_path / "stored", source, form), quantise)
    llm = LLM(str(path), drafter="mtp", skip_tokenizer_init=True, num_pages=20)
    assert len(llm.generate([5, 6, 7])[0].outputs[0].token_ids) > 0
    model = llm.engine.loaded.model
    drafter = llm.engine.drafters.get("mtp")
    assert isinstance(drafter, HeadDrafter) and isinstance(drafter.head, MtpHead)
    assert not model.spec.tied and all(isinstance(part.head, Linear) for part in drafter.head.parts)


def test_what_published_configs_say_beside(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As llm-compressor writes it."""
    sparsity = {"format": "dense", "sparsity_structure": "unstructured"}
    source = checkpoint("llama", scale=3.0)
    load_model(write_fp8(tmp_path, source, "channel", transform_config={}, sparsity_config=sparsity))


def test_scheme_of_kv(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A checkpoint that was calibrated for KV in eight bits, with one scale for a layer's keys and one for its values,
    loads as if it were not."""
    source = checkpoint("llama", scale=3.0)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    plain = load_model(write_fp8(tmp_path / "plain", source, "channel"))
    scaled = write_fp8(tmp_path / "calibrated", source, "channel", kv_cache_scheme=scheme)
    calibrated = load_model(write_scaled(tmp_path / "scaled", scaled, "compressed-tensors", 2))
    for ours, theirs in zip(calibrated.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.float(), theirs.float())


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


E4M3 = torch.float8_e4m3fn
DOWN = "model.layers.0.mlp.down_proj."
NORM = "model.norm.weight"
ONLY_MATRICES = rf"{NORM} in .*/llama-whole-blocks-block is \[256\] in float8_e4m3fn, but only matrices can be"
SPOILED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no scale": (lambda t: t.pop(f"{DOWN}weight_scale_inv"), rf"missing: {DOWN}weight_scale_inv"),
    "no weight": (lambda t: t.pop(f"{DOWN}weight"), rf"missing: {DOWN}weight; unexpected: {DOWN}weight_scale_inv"),
    "short scale": (
        lambda t: t.update({f"{DOWN}weight_scale_inv": torch.ones(1, 3)}),
        rf"misshapen: {DOWN}weight_scale_inv is \[1, 3\], config.json says \[2, 3\]",
    ),
    "a scale in eight bits": (
        lambda t: t.update({f"{DOWN}weight_scale_inv": torch.ones(2, 3).to(torch.float8_e4m3fn)}),
        rf"of a dtype that weights cannot have: {DOWN}weight_scale_inv",
    ),
    "a scale as a power of two": (
        lambda t: t.update({f"{DOWN}weight_scale_inv": torch.ones(2, 3).to(torch.float8_e8m0fnu)}),
        rf"{DOWN}weight_scale_inv \(torch.float8_e8m0fnu\); .* need scale_fmt 'ue8m0' in its quantization_config",
    ),
    "a dense tensor in a fused matrix": (
        lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(384, 256)}),
        r"gate_proj.weight is in float8_e4m3fn and model.layers.1.mlp.up_proj.weight in float32, .* give the",
    ),
    "other eight bits in a fused matrix": (
        lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(384, 256).to(torch.float8_e5m2)}),
        r"gate_proj.weight is in float8_e4m3fn and model.layers.1.mlp.up_proj.weight in float8_e5m2, but both",
    ),
    "a norm": (lambda t: t.update({NORM: t[NORM].to(E4M3)}), ONLY_MATRICES),
    "a norm with a scale": (
        lambda t: t.update({NORM: t[NORM].to(E4M3), f"{NORM}_scale_inv": torch.ones(1)}),
        ONLY_MATRICES,
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_broken_checkpoints(
    stored: Callable[..., Path], case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Headers show it: no tensor is read, and `stride inspect` says the same."""
    change, message = SPOILED[case]
    path = rewritten(stored("llama-whole-blocks", "block"), change)
    monkeypatch.setattr("stridelm.models.loader.read_tensors", None)
    with pytest.raises(ValueError, match=message):
        load_model(path)
    assert main(["inspect", str(path)]) != 0
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
WIDENED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "a short scale": ({f"{KV_B}_scale_inv": torch.ones(9, 9)}, r"scale_inv is \[9, 9\] in float32, but FP8 by block"),
    "a scale in eight bits": ({f"{KV_B}_scale_inv": torch.ones(1, 2).to(E4M3)}, r"in float8_e4m3fn, but .* bfloat16"),
    "a scale of whole numbers": ({f"{KV_B}_scale_inv": torch.ones(1, 2, dtype=torch.int32)}, "in int32, but FP8"),
    "no matrix": ({KV_B: torch.ones(5).to(E4M3)}, r"kv_b_proj.weight in .* is \[5\] in .* only matrices can be"),
}


@pytest.mark.parametrize("case", WIDENED)
def test_broken_matrices_that_are_widened(
    stored: Callable[..., Path], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers show it there too."""
    tensors, message = WIDENED[case]
    path = rewritten(stored("deepseek", "block"), lambda t: t.update(tensors))
    monkeypatch.setattr("stridelm.models.loader.read_tensors", None)
    with pytest.raises(ValueError, match=message):
        load_model(path)


@by_form
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -1.0])
@pytest.mark.parametrize(
    ("variant", "module"),
    [
        ("qwen3-moe", "model.layers.1.mlp.experts.3.down_proj"),
        ("qwen3-moe", "model.layers.0.self_attn.k_proj"),
        ("deepseek", "model.layers.0.self_attn.kv_b_proj"),
    ],
)
def test_scales_that_are_none(stored: Callable[..., Path], variant: str, module: str, number: float, form: str) -> None:
    """One number among others, of matrices that are stacked or widened."""
    scale = f"{module}.{SCALES[form]}"
    path = rewritten(stored(variant, form), lambda t: t[scale][-1:].fill_(number))
    with pytest.raises(ValueError, match="not all finite and at least 0") as error:
        load_model(path)
    names = re.findall(r"model\.[\w.]+", str(error.value))
    assert names == [scale]


def test_quantization_without_effect(stored: Callable[..., Path]) -> None:
    path = stored("llama-biases", "channel")
    with pytest.raises(ValueError, match=r"quantization='fp8' would have no effect .* give the checkpoint that they"):
        LLM(str(path), quantization="fp8", skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"unknown quantization 'int4'; choose fp8"):
        LLM(str(path), quantization="int4", skip_tokenizer_init=True)


def test_cards_without_eight_bits(stored: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 is refused before weights are read, with what to do."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("stridelm.models.loader.read_tensors", None)
    with pytest.raises(ValueError, match=r"need a GPU of compute capability 8\.9 or later; give the checkpoint"):
        load_model(stored("llama-biases", "block"), device="cuda:0")


@pytest.mark.parametrize("variant", ["llama-biases", "modules"])
def test_cards_without_eight_bits_are_inspected(
    stored: Callable[..., Path],
    variant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The reason is that of the engine. A GPU that is not here is not asked."""
    if variant == "modules":
        path = write_fp8(tmp_path / "q", write_mtp(tmp_path / "m", "deepseek", model_type="deepseek_v3"), "block")
    else:
        path = stored(variant, "block")
    inspect = ["inspect", str(path), "--memory", "24", "--json"]
    assert main(inspect) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["why_not"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, able in (((8, 0), False), ((8, 9), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert main(inspect) == 0
        why_not = json.loads(capsys.readouterr().out)["memory"]["why_not"]
        assert why_not is None if able else "need a GPU of compute capability 8.9 or later" in why_not


def test_training_starts_from_dense_weights(stored: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="is quantised; training starts from the checkpoint that"):
        load_for_training(stored("qwen3-tied", "block"))
