"""Every registered architecture against transformers, on tiny random checkpoints that transformers wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import LLM, SamplingParams
from stridelm.models import MODELS
from stridelm.models.loader import load_config, load_model, materialise
from support.checkpoints.changed import copied, rewritten
from support.oracles.models import check_model, options, variants

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("chunk", [1024, 7])
@pytest.mark.parametrize(("kind", "variant"), variants())
def test_logits(checkpoint: Checkpoint, kind: str, variant: str, chunk: int) -> None:
    """Prefill, chunks and decode steps give transformers' logits within 1e-5 in float32."""
    check_model(checkpoint(kind, **options(kind, variant)), chunk)


@pytest.mark.parametrize("kind", list(MODELS))
def test_fast_products(checkpoint: Checkpoint, kind: str) -> None:
    """The same with the library's own products, which do not promise equal bits."""
    check_model(checkpoint(kind, scale=3.0), 33, deterministic=False)


@pytest.mark.parametrize("kind", list(MODELS))
def test_shards(checkpoint: Checkpoint, kind: str, tmp_path: Path) -> None:
    """A checkpoint in many files with an index is the same model as one in a single file."""
    whole, cut = checkpoint(kind, scale=3.0), checkpoint(kind, scale=3.0, shard="40KB")
    assert len(list(cut.glob("*.safetensors"))) > 2
    ours, theirs = (load_model(path, serving=False).state_dict() for path in (cut, whole))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("kind", list(MODELS))
def test_bfloat16_is_near(checkpoint: Checkpoint, kind: str) -> None:
    """In bfloat16 the logits are close to those of the same model, to within eight bits."""
    check_model(checkpoint(kind, scale=3.0), 1024, close=0.15, dtype="bfloat16")


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling", "type"])
def test_config_spellings(checkpoint: Checkpoint, tmp_path: Path, style: str) -> None:
    """Rotary scaling is read in the config format of new files and in that of old ones."""
    parameters = {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0}
    path = copied(checkpoint("llama", scale=3.0, rope_parameters=parameters), tmp_path)
    config = json.loads((path / "config.json").read_text())
    if style != "rope_parameters":
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = {"rope_type" if style == "rope_scaling" else "type": "linear", "factor": 3.0}
    (path / "config.json").write_text(json.dumps(config))
    mixers: list[Any] = [layer.mixer for layer in load_model(path).spec.layers]
    assert [mixer.rope.theta for mixer in mixers] == [777.0, 777.0]
    check_model(path, 1024)


def test_dynamic_scaling_ends_at_the_original_length(checkpoint: Checkpoint) -> None:
    """Beyond it the frequencies depend on the order of calls: a longer context is had by asking for it, up to `factor`
    times as long."""
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    path = checkpoint("llama", rope_parameters=parameters, max_position_embeddings=64)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "drafter": "none", "num_pages": 40}
    with pytest.raises(ValueError, match="max_model_len 257 exceeds the 64 tokens"):
        LLM(str(path), max_model_len=257, **settings)
    llm = LLM(str(path), **settings)
    with pytest.raises(ValueError, match="64"):
        llm.generate([1] * 64, SamplingParams(max_tokens=1))
    out = llm.generate([1] * 60, SamplingParams(max_tokens=50, ignore_eos=True))[0].outputs[0]
    assert len(out.token_ids) == 4 and out.finish_reason == "length"


def test_refused_configs(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What would be computed wrongly is refused, and the error names what is supported."""
    path = copied(checkpoint("llama"), tmp_path)
    original = json.loads((path / "config.json").read_text())
    for changes, message in (
        ({"hidden_act": "relu"}, "relu.*supported: silu, swish, gelu_pytorch_tanh, gelu"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported for this architecture"),
        ({"model_type": "gpt2"}, "unknown model type 'gpt2'; choose one of: .*llama"),
        ({"num_key_value_heads": 3}, "no multiple"),
    ):
        (path / "config.json").write_text(json.dumps({**original, **changes}))
        with pytest.raises(ValueError, match=message):
            load_model(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 10}, "head_dim 10 and partial_rotary_factor give 5 rotated dimensions; rotation needs pairs"),
        ({"partial_rotary_factor": 0.01}, "give 0 rotated dimensions"),
        ({"partial_rotary_factor": 1.25}, "partial_rotary_factor must be a number above 0 to 1; got 1.25"),
    ],
)
def test_refused_rotations(checkpoint: Checkpoint, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Parts of heads that cannot be rotated."""
    path = copied(checkpoint("glm4_moe"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = changes.get("partial_rotary_factor", 0.5)
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 exceeds the 6 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be at least 1"),
        ({"num_local_experts": 0}, "num_experts must be at least 1"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be at least 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        ({"num_local_experts": 5}, r"unexpected: model\.layers\.0\.mlp\.experts\.5\.down_proj"),
        ({"num_local_experts": 7}, r"missing: model\.layers\.0\.mlp\.experts\.6\.down_proj"),
        ({"moe_intermediate_size": 31}, r"misshapen: .*experts\.0\.down_proj\.weight is \[64, 32\], .* \[64, 31\]"),
    ],
)
def test_refused_mixtures(checkpoint: Checkpoint, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Experts that do not add up, in config.json or between it and the weights."""
    path = copied(checkpoint("qwen3_moe"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=message):
        load_model(path)


def test_published_name_of_the_number_of_experts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Published checkpoints say `num_experts`, transformers now writes `num_local_experts`."""
    path = copied(checkpoint("qwen3_moe", scale=3.0), tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    (path / "config.json").write_text(json.dumps(config))
    check_model(path, 1024)


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_k2"])
def test_published_configs_of_latent_models(checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    """With the names that released files have for what transformers writes otherwise, with fields that it does not
    write, and with a reference to code that is not run."""
    yarn = {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn["original_max_position_embeddings"] = 64
    path = copied(
        checkpoint(kind, scale=3.0, rope_parameters={**yarn, "rope_type": "yarn", "rope_theta": 50000.0}), tmp_path
    )
    written = json.loads((path / "config.json").read_text())
    del written["rope_parameters"]
    published = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "rope_scaling": {**yarn, "type": "yarn"},
        "rope_theta": 50000.0,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps({**written, **published}))
    check_model(path, 1024)


def test_refused_latents(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Sizes of latent attention that do not add up are refused, by the config's names for them, before weights are
    read."""
    path = copied(checkpoint("deepseek_v3"), tmp_path)
    original = json.loads((path / "config.json").read_text())
    (path / "model.safetensors").unlink()
    for changes, message in (
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 must equal num_attention_heads 4"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported for latent attention"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be at least 1"),
        ({"q_lora_rank": 0}, "q_lora_rank must be at least 1"),
        ({"hidden_act": "relu"}, "relu.*supported: silu"),
        ({"n_group": 3}, "8 experts cannot be divided into n_group 3"),
        ({"topk_group": 5}, "topk_group 5 exceeds n_group 4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds the 4 experts of topk_group 2 groups"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: 'sigmoid'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported: 1"),
    ):
        (path / "config.json").write_text(json.dumps({**original, **changes}))
        with pytest.raises(ValueError, match=message):
            load_model(path)


def test_names_of_latents(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Missing, unexpected and misshapen tensors of latent attention are named."""
    names = {part: f"model.layers.1.self_attn.{part}.weight" for part in ("kv_b_proj", "q_proj", "kv_a_proj_with_mqa")}

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[names["kv_b_proj"]]
        tensors[names["q_proj"]] = torch.zeros(2)
        tensors[names["kv_a_proj_with_mqa"]] = torch.zeros(5, 7)

    with pytest.raises(ValueError, match=r"do not fit its config\.json") as error:
        load_model(rewritten(checkpoint("deepseek_v3"), tmp_path, spoil))
    text = str(error.value)
    assert f"missing: {names['kv_b_proj']}; unexpected: {names['q_proj']}; misshapen: " in text
    assert f"{names['kv_a_proj_with_mqa']} is [5, 7], config.json says [40, 64]" in text


QKV = "model.layers.1.self_attn.k_proj.weight"


def test_names_what_is_wrong(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, unexpected and misshapen tensors, and those of other dtypes, are listed in one error, by the files'
    headers: no tensor is read."""
    eight = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.extra_proj.weight"] = torch.zeros(2)
        tensors[QKV] = torch.zeros(5, 7)
        tensors[eight] = tensors[eight].to(torch.float8_e4m3fn)

    monkeypatch.setattr("stridelm.models.loader.read_tensors", None)
    path = rewritten(checkpoint("llama"), tmp_path, spoil)
    with pytest.raises(ValueError, match=r"do not fit its config\.json") as error:
        load_model(path)
    text = str(error.value)
    assert "missing: model.layers.0.mlp.up_proj.weight, model.norm.weight" in text
    assert "unexpected: model.layers.0.mlp.extra_proj.weight" in text
    assert f"misshapen: {QKV} is [5, 7], config.json says [32, 64]" in text
    assert f"of a dtype that weights cannot have: {eight} (torch.float8_e4m3fn); copy both from the model" in text
    assert "quantization_config" in text


def test_bias_that_config_denies(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Weights that config.json does not mention are not dropped silently."""
    path = copied(checkpoint("llama", attention_bias=True), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(ValueError, match=r"unexpected: .*k_proj\.bias"):
        load_model(path)


def test_harmless_leftovers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Stored rotary frequencies, and the head of a tied model, are accepted: they are not separate weights."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    path = rewritten(checkpoint("llama", scale=3.0, tie_word_embeddings=True), tmp_path, add)
    load_model(path)


def test_unloaded_weights_are_nan(checkpoint: Checkpoint) -> None:
    """Before loading, all weights are NaN, so that a forgotten one cannot go unnoticed."""
    config = load_config(checkpoint("qwen3"))
    with torch.device("meta"):
        model = MODELS.get("qwen3")(config)
    model = materialise(model, torch.float32, torch.device("cpu"))
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())


def test_unreadable_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """For missing, truncated and corrupt files the error names the file."""
    with pytest.raises(ValueError, match="no model at"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_model(tmp_path)
    path = copied(checkpoint("llama"), tmp_path)
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    for spoiled in (whole[: len(whole) // 2], b"\xff" * 64, b""):
        weights.write_bytes(spoiled)
        with pytest.raises(ValueError, match=r"model\.safetensors is corrupt or truncated"):
            load_model(path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        load_model(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        load_model(path)


def test_missing_shard(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The error names a shard that the index lists but that is missing; a broken index too."""
    path = copied(checkpoint("qwen3", scale=3.0, shard="40KB"), tmp_path)
    lost = sorted(path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=lost.name):
        load_model(path)
    (path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="index"):
        load_model(path)


@pytest.mark.parametrize("change", [{"hidden_size": "wide"}, {"num_attention_heads": 5}, {"rope_parameters": 3}])
def test_nonsense_config(checkpoint: Checkpoint, tmp_path: Path, change: dict[str, Any]) -> None:
    """A config that transformers itself refuses is a ValueError that names the file."""
    path = copied(checkpoint("llama"), tmp_path)
    original = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**original, **change}))
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(path)
