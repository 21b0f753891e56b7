"""Tiny random draft heads, in the layouts in which checkpoints of each kind are released.

A head is random like its target (support.checkpoints.models), so nearly none of its drafts are accepted, and any
computation that differs from support.oracles.heads shows in the drafted tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from support.checkpoints.models import write

Tensors = dict[str, torch.Tensor]
MtpForm = Literal["deepseek", "mimo", "qwen"]
EagleForm = Literal["eagle1", "eagle3", "speculators"]
SCALE = 8.0
INDEX = "model.safetensors.index.json"


class Draws:
    """Random tensors as support.checkpoints.models makes them, from a separate generator."""

    def __init__(self, seed: int, scale: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = scale

    def matrix(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * 0.02 * self.scale

    def bias(self, size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator) * 0.2

    def norm(self, size: int) -> torch.Tensor:
        return 0.6 + 0.8 * torch.rand(size, generator=self.generator)

    def like(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Other tensors of the same names and shapes."""
        kinds = {True: self.bias, False: self.norm}
        return {
            name: kinds[name.endswith("bias")](len(tensor)) if tensor.dim() == 1 else self.matrix(*tensor.shape)
            for name, tensor in tensors.items()
        }


def config_of(path: Path) -> dict[str, Any]:
    """Of its text part, if there are others."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    part: dict[str, Any] = config.get("text_config", config)
    return part


def tensors_of(path: Path) -> Tensors:
    """All tensors of a directory, in one file or several, safetensors or PyTorch; named as if there were only a text
    part."""
    found: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    for file in [*path.glob("*.bin"), *path.glob("*.pt")]:
        found |= torch.load(file, weights_only=True)
    return {name.replace("model.language_model.", "model."): tensor for name, tensor in found.items()}


# Modules shipped with the target: DeepSeek-V3, GLM-4.5, MiMo, Qwen3-Next and similar


def write_mtp(
    path: Path,
    form: MtpForm,
    modules: int = 1,
    *,
    model_type: str | None = None,
    copies: bool | Literal["other"] = False,
    seed: int = 1,
    **options: Any,
) -> Path:
    """A target with `modules` modules of its own, each a block of the target's kind, with experts if any layer could
    have them.

    model_type: the target's; by default "mimo" for that form and "qwen3" for the others.
    copies: add the copies of embedding and head that DeepSeek ships with every module; "other": which differ.
    options: `scale`, `shard` and config fields, as support.checkpoints.models.write takes them.
    """
    assert form != "qwen" or modules == 1, "no released checkpoint of this form has more"
    assert form == "deepseek" or not copies, "only this form has copies"
    if form == "mimo":
        declared: dict[str, Any] = {"num_nextn_predict_layers": modules}
    elif form == "qwen":
        declared = {"mtp_num_hidden_layers": modules, "mtp_use_dedicated_embeddings": False}
    else:  # the field that released files have, then the one that transformers' own use of the modules reads
        declared = {"num_nextn_predict_layers": modules, "num_mtp_layers": modules}
        declared["mtp_layer_types"] = ["full_attention"] * modules
    model_type = model_type or ("mimo" if form == "mimo" else "qwen3")
    write(path, model_type, **declared, **options)
    target, like = tensors_of(path), _with_experts(path)
    draws = Draws(seed, options.get("scale", SCALE))
    extra: Tensors = {}
    for module in range(modules):
        extra |= _MODULES[form](draws, like, config_of(path)["num_hidden_layers"], module)
        if copies:
            prefix = f"model.layers.{config_of(path)['num_hidden_layers'] + module}."
            embedding = target["model.embed_tokens.weight"]
            matrices = {"embed_tokens": embedding, "shared_head.head": target.get("lm_head.weight", embedding)}
            for name, matrix in matrices.items():
                other = copies == "other"
                extra[f"{prefix}{name}.weight"] = draws.matrix(*matrix.shape) if other else matrix.clone()
    _add(path, extra)
    return path


def _with_experts(path: Path) -> Tensors:
    """The tensors that modules are like: the target's or, if all its layers are dense, of such a target with experts in
    all of them."""
    config = config_of(path)
    if config.get("first_k_dense_replace", 0) < config["num_hidden_layers"]:
        return tensors_of(path)
    config |= {"first_k_dense_replace": 0, "quantization_config": None}
    with tempfile.TemporaryDirectory() as sparse:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(sparse)
        return tensors_of(Path(sparse))


def _deepseek(draws: Draws, target: Tensors, layers: int, module: int) -> Tensors:
    prefix, width = f"model.layers.{layers + module}.", target["model.embed_tokens.weight"].shape[1]
    return {
        prefix + "enorm.weight": draws.norm(width),
        prefix + "hnorm.weight": draws.norm(width),
        prefix + "eh_proj.weight": draws.matrix(width, 2 * width),
        **_block(draws, target, prefix),
        prefix + "shared_head.norm.weight": draws.norm(width),
    }


def _mimo(draws: Draws, target: Tensors, layers: int, module: int) -> Tensors:
    prefix, width = f"model.mtp_layers.{module}.", target["model.embed_tokens.weight"].shape[1]
    return {
        prefix + "token_layernorm.weight": draws.norm(width),
        prefix + "hidden_layernorm.weight": draws.norm(width),
        prefix + "input_proj.weight": draws.matrix(width, 2 * width),
        **_block(draws, target, prefix),
        prefix + "final_layernorm.weight": draws.norm(width),
    }


def _qwen(draws: Draws, target: Tensors, layers: int, module: int) -> Tensors:
    """Norms are stored less one: Qwen3-Next scales by 1 + weight."""
    width = target["model.embed_tokens.weight"].shape[1]
    tensors = {
        "mtp.fc.weight": draws.matrix(width, 2 * width),
        "mtp.pre_fc_norm_embedding.weight": draws.norm(width),
        "mtp.pre_fc_norm_hidden.weight": draws.norm(width),
        **_block(draws, target, f"mtp.layers.{module}."),
        "mtp.norm.weight": draws.norm(width),
    }
    return {name: tensor - 1 if "norm" in name else tensor for name, tensor in tensors.items()}


_MODULES = {"deepseek": _deepseek, "mimo": _mimo, "qwen": _qwen}


def _block(draws: Draws, target: Tensors, prefix: str) -> Tensors:
    """A block of the kind of the target's last, with other weights, which are dense."""
    target = {name: tensor for name, tensor in target.items() if "weight_scale" not in name}
    layers = {int(name.split(".")[2]) for name in target if name.startswith("model.layers.")}
    last = f"model.layers.{max(layers)}."
    like = {name.removeprefix(last): t for name, t in target.items() if name.startswith(last)}
    alike = [i for i in layers if f"model.layers.{i}.self_attn.k_proj.weight" in target]
    if alike and max(alike) < max(layers):  # the target's last layer reads the keys of another
        read = f"model.layers.{max(i for i in alike if _queries(target, i) == _queries(target, max(layers)))}."
        like |= {name.removeprefix(read): t for name, t in target.items() if name.startswith(f"{read}self_attn.")}
    like = {name: t for name, t in like.items() if "per_layer_" not in name}  # it is given nothing but the stream
    return draws.like({prefix + name: t for name, t in like.items()})


def _queries(target: Tensors, layer: int) -> torch.Size:
    return target[f"model.layers.{layer}.self_attn.q_proj.weight"].shape


def _add(path: Path, extra: Tensors) -> None:
    """Put tensors into a checkpoint's only file, or into an additional one if there are several."""
    if not (path / INDEX).is_file():
        save_file(tensors_of(path) | extra, path / "model.safetensors", metadata={"format": "pt"})
        return
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(extra, "model-extra.safetensors")
    save_file(extra, path / "model-extra.safetensors", metadata={"format": "pt"})
    (path / INDEX).write_text(json.dumps(index))


# Heads in a directory of their own: MTP modules, EAGLE-1/2, EAGLE-3, Medusa


def write_modules(path: Path, target_path: Path, modules: int = 1, *, seed: int = 1, scale: float = SCALE) -> Path:
    """MTP modules for a target that has none, with the names that they would have inside it."""
    config, like, draws = config_of(target_path), _with_experts(target_path), Draws(seed, scale)
    tensors: Tensors = {}
    for module in range(modules):
        tensors |= _deepseek(draws, like, config["num_hidden_layers"], module)
    return write_head(path, {**config, "num_nextn_predict_layers": modules}, tensors, "model.safetensors")


def write_eagle(
    path: Path,
    target_path: Path,
    form: EagleForm,
    *,
    bias: bool = False,
    embed: Literal["none", "copy", "own"] = "none",
    draft_vocab: int | None = None,
    aux_layers: tuple[int, ...] | None = None,
    nested: bool = False,
    norm_before_residual: bool = False,
    binary: bool = False,
    seed: int = 1,
    scale: float = SCALE,
    **changes: Any,
) -> Path:
    """An EAGLE head for a target.

    bias: give EAGLE-1's `fc` one.
    embed: leave the embedding to the target, ship a copy of it, or ship a different one.
    draft_vocab: how many tokens of the target's vocabulary an EAGLE-3 head can emit; by default five of eight.
    aux_layers: the layers whose inputs an EAGLE-3 head reads. By default config.json omits them, which means those of
        default_aux_layers; a target too shallow for them gets a list.
    nested: list them as SpecForge does, inside `eagle_config`, by the layers whose outputs they are.
    binary: write pytorch_model.bin, as EAGLE's authors do, instead of safetensors.
    changes: config fields in which the head's layer differs from the target's.
    """
    target = config_of(target_path)
    layer = _layer_config(target) | changes
    draws = Draws(seed, scale)
    width = target["hidden_size"]
    if form == "eagle1":
        assert not norm_before_residual and draft_vocab is None and aux_layers is None, "EAGLE-3's"
        config = {"architectures": ["LlamaForCausalLM"], **layer, "bias": bias}
        tensors = {"fc.weight": draws.matrix(width, 2 * width)} | ({"fc.bias": draws.bias(width)} if bias else {})
        tensors |= _llama_layer(draws, layer, "layers.0.", reads=width)
    else:
        assert not bias, "EAGLE-1's"
        draft_vocab = draft_vocab or target["vocab_size"] * 5 // 8
        config, prefix = _eagle3_config(form, target_path, layer, draft_vocab)
        if norm_before_residual or form == "speculators":
            config["norm_before_residual"] = norm_before_residual
        if aux_layers is None and target["num_hidden_layers"] < 6:
            aux_layers = (0, target["num_hidden_layers"] // 2, target["num_hidden_layers"] - 1)
        if aux_layers is not None and nested:
            behind = [layer - 1 for layer in aux_layers]
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": behind, "use_aux_hidden_state": True}
        elif aux_layers is not None:
            config["eagle_aux_hidden_state_layer_ids"] = list(aux_layers)
        tensors = {
            "fc.weight": draws.matrix(width, (3 if aux_layers is None else len(aux_layers)) * width),
            prefix + "hidden_norm.weight": draws.norm(width),
            prefix + "input_layernorm.weight": draws.norm(width),
            **_llama_layer(draws, layer, prefix, reads=2 * width),
            "norm.weight": draws.norm(width),
            "lm_head.weight": draws.matrix(draft_vocab, width),
            **_vocabulary(draws, target["vocab_size"], draft_vocab),
        }
    if embed != "none":
        embedding = tensors_of(target_path)["model.embed_tokens.weight"]
        tensors["embed_tokens.weight"] = embedding.clone() if embed == "copy" else draws.matrix(*embedding.shape)
    return write_head(path, config, tensors, "pytorch_model.bin" if binary else "model.safetensors")


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs an EAGLE-3 head reads if its config.json does not list them."""
    return 2, layers // 2, layers - 3


def _eagle3_config(
    form: EagleForm, target_path: Path, layer: dict[str, Any], draft_vocab: int
) -> tuple[dict[str, Any], str]:
    """(config.json, prefix of the layer's tensors)."""
    if form == "eagle3":
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, "draft_vocab_size": draft_vocab}
        return config, "midlayer."
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": str(target_path), "architectures": config_of(target_path)["architectures"]},
        },
        "torch_dtype": "float32",
    }
    return config, "layers.0."


def _layer_config(target: dict[str, Any]) -> dict[str, Any]:
    """A one-layer LlamaConfig of the target's sizes, with the field names of the transformers releases of that time.
    The layer is a llama's whatever the target is."""
    same = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    return {
        **{field: target[field] for field in same if field in target},
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
    }


def _llama_layer(draws: Draws, layer: dict[str, Any], prefix: str, reads: int) -> Tensors:
    """A llama block without its first norm; queries, keys and values are projected from rows `reads` wide."""
    width, inner = layer["hidden_size"], layer["intermediate_size"]
    head = layer.get("head_dim") or width // layer["num_attention_heads"]
    heads, kv_heads = layer["num_attention_heads"] * head, layer["num_key_value_heads"] * head
    return {
        prefix + "self_attn.q_proj.weight": draws.matrix(heads, reads),
        prefix + "self_attn.k_proj.weight": draws.matrix(kv_heads, reads),
        prefix + "self_attn.v_proj.weight": draws.matrix(kv_heads, reads),
        prefix + "self_attn.o_proj.weight": draws.matrix(width, heads),
        prefix + "post_attention_layernorm.weight": draws.norm(width),
        prefix + "mlp.gate_proj.weight": draws.matrix(inner, width),
        prefix + "mlp.up_proj.weight": draws.matrix(inner, width),
        prefix + "mlp.down_proj.weight": draws.matrix(width, inner),
    }


def _vocabulary(draws: Draws, vocab: int, draft_vocab: int) -> Tensors:
    """Which of the target's tokens the head can emit: `d2t`, the target's id minus the head's own id i, and `t2d`."""
    ids = torch.randperm(vocab, generator=draws.generator)[:draft_vocab].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(draft_vocab), "t2d": known}


def write_medusa(
    path: Path,
    target_path: Path,
    heads: int = 3,
    layers: int = 1,
    *,
    binary: bool = False,
    seed: int = 1,
    scale: float = SCALE,
) -> Path:
    """Medusa heads for a target: `layers` residual blocks and a projection each. binary: write a .pt file, as older
    releases did."""
    target = config_of(target_path)
    width, vocab = target["hidden_size"], target["vocab_size"]
    config = {
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": str(target_path),
        "hidden_size": width,
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "model_type": "medusa",
        "vocab_size": vocab,
    }
    draws = Draws(seed, scale)
    tensors: Tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = draws.matrix(width, width)
            tensors[f"{head}.{layer}.linear.bias"] = draws.bias(width)
        tensors[f"{head}.{layers}.weight"] = draws.matrix(vocab, width)
    return write_head(path, config, tensors, "medusa_lm_head.pt" if binary else "medusa_lm_head.safetensors")


# A model of its own


def write_akin(path: Path, target_path: Path, *, noise: float = 0.1, seed: int = 1) -> Path:
    """A model like the target, with enough noise on its matrices that the two agree only now and then."""
    generator = torch.Generator().manual_seed(seed)
    tensors = tensors_of(target_path)
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and "scale" not in name:
            drawn = noise * tensor.float().std() * torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor.float() + drawn).to(tensor.dtype)  # a matrix may be in eight bits
    return write_head(path, config_of(target_path), tensors, "model.safetensors")


def write_head(path: Path, config: dict[str, Any], tensors: Tensors, name: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    if name.endswith("safetensors"):
        save_file(tensors, path / name, metadata={"format": "pt"})
    else:
        torch.save(tensors, path / name)
    return path
