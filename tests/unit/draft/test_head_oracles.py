"""The oracles of draft heads against transformers' own modules, and the checkpoints that they read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from stridelm.models.loader import load_model
from support.checkpoints.heads import (
    EagleForm,
    MtpForm,
    config_of,
    default_aux_layers,
    tensors_of,
    write_eagle,
    write_medusa,
    write_mtp,
)
from support.checkpoints.models import write
from support.oracles.heads import Drafted, Medusa, eagle, mtp
from support.oracles.models import YARN

CLOSE = 1e-4
HAS_MODULES = pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="transformers before 5.20 has another MtpModel"
)
LENGTHS = (2, 3, 7, 20)


def known(length: int, seed: int = 0, vocab: int = 64) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def check(ours: Drafted, tokens: list[int], logits_DV: torch.Tensor) -> None:
    assert ours.tokens == tokens
    assert torch.allclose(ours.logits_DV, logits_DV, atol=CLOSE, rtol=CLOSE)


# Modules of the target


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("llama", {"shard": "40KB"}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("deepseek_v3", {"scale": 3.0}),
    ("glm4_moe", {"scale": 3.0}),
    ("glm4_moe", {"scale": 3.0, "use_qk_norm": True, "attention_bias": True, "rope_parameters": YARN}),
]


@pytest.fixture(params=LAYOUTS, ids=str)
def layout(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    kind: tuple[str, dict[str, Any]] = request.param
    return kind


def transformers_target(path: Path) -> Any:
    """A target in transformers, told which layers of the file are modules."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    layers = model.config.num_hidden_layers
    behind = range(layers, layers + model.config.num_mtp_layers)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{i}\." for i in behind]
    return model


@torch.inference_mode()
def their_drafts(model: Any, modules: MtpModel, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """The tokens that transformers' MtpModel drafts after known tokens, and the logits."""
    out = model.model(torch.tensor([ids[:-1]]), output_hidden_states=True)
    tokens, logits, _ = modules(
        input_ids=torch.tensor([ids[1:]]),
        last_hidden_states=out.hidden_states[-1],
        attention_mask=None,
        position_ids=torch.arange(1, len(ids))[None],
        mtp_cache=MtpCache(config=model.config.get_mtp_config()),
    )
    return tokens[0].tolist(), logits[0]


@HAS_MODULES
@pytest.mark.parametrize("modules", [1, 3])
def test_transformers_drafts_the_same(layout: Any, modules: int, tmp_path: Path) -> None:
    """Modules in turn, loaded by transformers from the checkpoint as it is written."""
    kind, options = layout
    path = write_mtp(tmp_path, "deepseek", modules, model_type=kind, copies=True, **options)
    model = transformers_target(path)
    theirs, ours = MtpModel.from_pretrained(model), mtp(path, "deepseek")
    for length in LENGTHS:
        check(ours.in_turn(known(length)), *their_drafts(model, theirs, known(length)))


@HAS_MODULES
@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("modules", [1, 2])
def test_transformers_generates_the_same(
    kind: str, modules: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache and over many steps it drafts what the oracle drafts from scratch, whatever was accepted."""
    # The vocabulary is so small that drafts are right by chance.
    path = write_mtp(tmp_path, "deepseek", modules, vocab_size=4, model_type=kind)
    model, ours = transformers_target(path), mtp(path, "deepseek")
    drafted: list[tuple[list[int], list[int]]] = []
    accepted: list[int] = []
    propose = MTPCandidateGenerator.get_candidates

    def listening(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = propose(self, input_ids, *args, **kwargs)
        if candidates.shape != input_ids.shape:
            drafted.append((input_ids[0].tolist(), candidates[0, input_ids.shape[1] :].tolist()))
            accepted.append(kwargs["n_last_matches"])
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", listening)
    settings: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings["attention_mask"] = torch.ones(1, 9)  # else tokens equal to the padding id would be masked
    for seed in range(8):
        prompt = torch.tensor([known(9, seed, vocab=4)])
        plain = model.generate(prompt, **settings)
        assert torch.equal(model.generate(prompt, use_mtp=True, **settings), plain)
    assert all(ours.in_turn(ids).tokens == tokens for ids, tokens in drafted)
    assert {0, 1} <= set(accepted)


RENAMED: dict[MtpForm, dict[str, str]] = {
    "deepseek": {
        "model.layers.{behind}.enorm.": "enorm.",
        "model.layers.{behind}.hnorm.": "hnorm.",
        "model.layers.{behind}.eh_proj.": "eh_proj.",
        "model.layers.{behind}.shared_head.norm.": "post_norm.",
        "model.layers.{behind}.": "mtp_block.",
    },
    "mimo": {
        "model.mtp_layers.{i}.token_layernorm.": "enorm.",
        "model.mtp_layers.{i}.hidden_layernorm.": "hnorm.",
        "model.mtp_layers.{i}.input_proj.": "eh_proj.",
        "model.mtp_layers.{i}.final_layernorm.": "post_norm.",
        "model.mtp_layers.{i}.": "mtp_block.",
    },
    "qwen": {
        "mtp.pre_fc_norm_embedding.": "enorm.",
        "mtp.pre_fc_norm_hidden.": "hnorm.",
        "mtp.fc.": "eh_proj.",
        "mtp.norm.": "post_norm.",
        "mtp.layers.{i}.": "mtp_block.",
    },
}
"""Prefixes in checkpoints, and MtpModel's names for them in layer i. The first that matches counts."""


def their_modules(path: Path, form: MtpForm, modules: int) -> tuple[Any, MtpModel]:
    """(target, modules) in transformers, which itself reads only one of the forms."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    model.config.num_mtp_layers = modules
    model.config.mtp_layer_types = ["full_attention"] * modules
    model.config.mtp_hidden_states_first = form == "mimo"
    found: dict[str, torch.Tensor] = {}
    stored = tensors_of(path)
    for i in range(modules):
        for prefix, name in RENAMED[form].items():
            prefix = prefix.format(i=i, behind=model.config.num_hidden_layers + i)
            for key in [key for key in stored if key.startswith(prefix)]:
                tensor = stored.pop(key)
                found[f"layers.{i}.{name}{key.removeprefix(prefix)}"] = tensor + (form == "qwen" and "norm" in key)
    theirs = MtpModel(model, modules).eval()
    missing, unexpected = theirs.load_state_dict(found, strict=False)
    assert not unexpected and all(name.startswith(("embed_tokens.", "shared_head.")) for name in missing)
    return model, theirs


@HAS_MODULES
@pytest.mark.parametrize(("form", "modules"), [("deepseek", 2), ("mimo", 1), ("mimo", 3), ("qwen", 1)])
def test_every_form_in_turn(form: MtpForm, modules: int, tmp_path: Path) -> None:
    """The forms that transformers does not read give the same results when renamed to its names."""
    path = write_mtp(tmp_path, form, modules)
    model, theirs = their_modules(path, form, modules)
    for length in LENGTHS:
        check(mtp(path, form).in_turn(known(length)), *their_drafts(model, theirs, known(length)))


@HAS_MODULES
@pytest.mark.parametrize(("form", "modules"), [("deepseek", 2), ("mimo", 1), ("qwen", 1)])
@torch.inference_mode()
def test_every_form_again_and_again(form: MtpForm, modules: int, tmp_path: Path) -> None:
    """Recursion from scratch equals the first module over a cache, fed its own last state and draft."""
    path, depth = write_mtp(tmp_path, form, modules), 4
    model, theirs = their_modules(path, form, modules)
    for length in LENGTHS:
        ids = known(length)
        cache = MtpCache(config=model.config.get_mtp_config())
        states = model.model(torch.tensor([ids[:-1]])).last_hidden_state
        feed, positions = torch.tensor([ids[1:]]), torch.arange(length - 1)[None]
        tokens, logits = [], []
        for _ in range(depth):
            states = theirs.forward_layer(0, states, positions, cache, input_ids=feed)[:, -1:]
            logits.append(model.lm_head(states)[0, 0])
            feed, positions = logits[-1].argmax().view(1, 1), positions[:, -1:] + 1
            tokens.append(int(feed))
        check(mtp(path, form).recursive(ids, depth), tokens, torch.stack(logits))


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("deepseek", {"modules": 2, "copies": True}),
        ("deepseek", {"model_type": "llama", "shard": "40KB"}),
        ("deepseek", {"tie_word_embeddings": True, "copies": True}),
        ("deepseek", {"model_type": "glm4_moe", "modules": 2, "copies": True}),
        ("mimo", {"modules": 2}),
        ("mimo", {"shard": "40KB"}),
        ("qwen", {}),
    ],
)
def test_targets_with_modules_load(form: MtpForm, options: dict[str, Any], tmp_path: Path) -> None:
    """transformers and the loader read the target as if its modules were absent."""
    path = write_mtp(tmp_path / "with", form, **options)
    config = config_of(path)
    plain = {key: value for key, value in options.items() if key not in ("modules", "copies", "model_type")}
    bare = write(tmp_path / "without", config["model_type"], **plain)
    theirs, wanted = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (path, bare))
    assert theirs.keys() == wanted.keys() and all(torch.equal(theirs[name], wanted[name]) for name in wanted)
    ours, expected = load_model(path, serving=False), load_model(bare, serving=False).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())
    assert (ours.spec.extra_modules, len(tensors_of(path)) > len(tensors_of(bare))) == (options.get("modules", 1), True)


# Heads in directories of their own


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("target"), "qwen3", num_hidden_layers=7)


EAGLES: list[tuple[EagleForm, dict[str, Any]]] = [
    ("eagle1", {}),
    ("eagle1", {"bias": True, "embed": "own", "binary": True}),
    ("eagle3", {}),
    ("eagle3", {"embed": "own", "norm_before_residual": True}),
    ("eagle3", {"draft_vocab": 64, "head_dim": 24, "binary": True}),
    ("speculators", {"embed": "copy"}),
    ("speculators", {"norm_before_residual": True, "aux_layers": (0, 3, 6)}),
    ("eagle3", {"aux_layers": (2, 3, 6), "nested": True}),
]


def llama_layer(config: dict[str, Any], tensors: dict[str, torch.Tensor], reads: int) -> LlamaDecoderLayer:
    """transformers' block with these weights; its attention reads rows `reads` wide without a norm before it."""
    layer = LlamaDecoderLayer(LlamaConfig.from_dict(config, attn_implementation="sdpa"), 0).eval()
    for name in ("q_proj", "k_proj", "v_proj"):
        width = len(tensors[f"self_attn.{name}.weight"])
        setattr(layer.self_attn, name, torch.nn.Linear(reads, width, bias=False))
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict(tensors)
    return layer


def rotary(config: dict[str, Any], entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = LlamaRotaryEmbedding(LlamaConfig.from_dict(config))(torch.zeros(1), torch.arange(entries)[None])
    return cos, sin


@pytest.mark.parametrize(("form", "options"), EAGLES)
@torch.inference_mode()
def test_eagle_is_a_llama_block(form: EagleForm, options: dict[str, Any], target: Path, tmp_path: Path) -> None:
    """One module step, composed of transformers' own modules, equals the oracle's."""
    path = write_eagle(tmp_path, target, form, **options)
    stated, tensors = config_of(path), tensors_of(path)
    config = stated.get("transformer_layer_config", stated)
    prefix = "midlayer." if form == "eagle3" else "layers.0."
    own = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    norms = {name: torch.nn.RMSNorm(64, config["rms_norm_eps"]) for name in ("hidden_norm", "input_layernorm")}
    for name, norm in norms.items():
        if form != "eagle1":
            norm.weight.copy_(own.pop(f"{name}.weight"))
    layer = llama_layer(config, own, reads=64 if form == "eagle1" else 128)
    states, embeds = torch.randn(2, 1, 11, 64, generator=torch.Generator().manual_seed(0))
    num_modules = rotary(config, 11)
    if form == "eagle1":
        fc = torch.nn.functional.linear(torch.cat([embeds, states], -1), tensors["fc.weight"], tensors.get("fc.bias"))
        wanted = layer(fc, position_embeddings=num_modules)[0]
    else:
        normed = norms["hidden_norm"](states)
        reads = torch.cat([norms["input_layernorm"](embeds), normed], -1)
        x = (normed if options.get("norm_before_residual") else states) + layer.self_attn(reads, num_modules, None)[0]
        wanted = (x + layer.mlp(layer.post_attention_layernorm(x)))[0]
    onward, _ = eagle(path, target, form).modules[0](states[0], embeds[0])
    assert torch.allclose(onward, wanted, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize(("form", "options"), EAGLES)
def test_eagle_drafts(form: EagleForm, options: dict[str, Any], target: Path, tmp_path: Path) -> None:
    """Drafts depend on the position and on the known tokens; those over a small vocabulary are in it."""
    path = write_eagle(tmp_path, target, form, **options)
    head, tensors = eagle(path, target, form), tensors_of(path)
    drafts = [head.recursive(known(12, seed), 5) for seed in range(6)]
    assert len({token for drafted in drafts for token in drafted.tokens}) > 8
    assert all(drafted.margin > 1e-4 for drafted in drafts)
    # A longer draft begins with the shorter one.
    assert head.recursive(known(12), 2).tokens == drafts[0].tokens[:2]
    if form != "eagle1":
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        assert torch.equal(ids, tensors["t2d"].nonzero().flatten()) and len(ids) == options.get("draft_vocab", 40)
        assert all(tensors["t2d"][drafted.tokens].all() for drafted in drafts)


def test_eagle_layers(target: Path, tmp_path: Path) -> None:
    """If config.json names no layers, the ones that the authors' code reads are used."""
    said, unsaid = (write_eagle(tmp_path / str(aux), target, "eagle3", aux_layers=aux) for aux in ((2, 3, 4), None))
    assert default_aux_layers(7) == (2, 3, 4) and "eagle_aux_hidden_state_layer_ids" not in config_of(unsaid)
    drafts = [eagle(path, target, "eagle3").recursive(known(9), 4) for path in (said, unsaid)]
    assert torch.equal(drafts[0].logits_DV, drafts[1].logits_DV)


@pytest.mark.parametrize("binary", [False, True])
def test_medusa_drafts(binary: bool, target: Path, tmp_path: Path) -> None:
    """Every head reads the last state; without its residual blocks it would be a plain product."""
    path = write_medusa(tmp_path, target, heads=4, layers=2, binary=binary)
    tensors, drafted = tensors_of(path), Medusa(path, target)(known(12))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.inference_mode():
        x = model.model(torch.tensor([known(12)[:-1]])).last_hidden_state[0, -1]
        for layer in range(2):
            linear = torch.nn.Linear(64, 64)
            linear.load_state_dict({kind: tensors[f"3.{layer}.linear.{kind}"] for kind in ("weight", "bias")})
            x = x + torch.nn.SiLU()(linear(x))
        assert torch.allclose(drafted.logits_DV[3], tensors["3.2.weight"] @ x, atol=CLOSE, rtol=CLOSE)
    assert len(set(drafted.tokens)) > 1
    assert Medusa(path, target)(known(12), 2).tokens == drafted.tokens[:2]
