"""What a head drafts, from its definition: no cache, no batch, in float32, every draft from scratch.

The target's states come from transformers; the heads are written out here and share no code with the package. Entry i
of a head consists of the target's state of token i and the embedding of token i + 1, and predicts token i + 2. With n
known tokens the target has computed all but the last, so entries 0 to n - 2 have its states: they are the caught-up
entries. The last of them gives the first draft; what follows depends on the kind of head.

- Recursion, one module again and again: each draft adds an entry after the caught-up ones, made of the draft's
  embedding and of the module's own output state at the entry before.
- In turn, one module per draft: module k runs over all entries, on the states of module k - 1 and on tokens one
  position later than that module's. This is what transformers' MtpModel does.

Legend: n known tokens, D drafts, H width, V tokens of the head's vocabulary, T entries.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), MiMo (arXiv 2505.07608), EAGLE (arXiv 2401.15077), EAGLE-3
(arXiv 2503.01840), Medusa (arXiv 2401.10774), and the layouts of what their authors released.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from support.checkpoints.heads import EagleForm, MtpForm, Tensors, config_of, default_aux_layers, tensors_of


@dataclass(frozen=True)
class Drafted:
    tokens: list[int]
    """[D], in the target's token ids."""
    logits_DV: torch.Tensor
    """Over the head's own vocabulary."""
    ids_V: torch.Tensor
    """The target's id of each token of it."""

    @property
    def margin(self) -> float:
        """The least lead of a drafted token over the runner-up: rounding can flip a draft only if this is small."""
        best = self.logits_DV.topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


class TargetStates:
    """A target checkpoint in transformers, which returns its states."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.config = AutoConfig.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype).eval()

    @torch.inference_mode()
    def __call__(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """[T, H] each: the inputs of layers 0, 1, ..., then the state after the final norm."""
        out = self.model.model(torch.tensor([list(ids)]), output_hidden_states=True)
        inputs = [states[0] for states in out.hidden_states[: self.config.num_hidden_layers]]
        return [*inputs, out.last_hidden_state[0]]

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        return self.model.get_input_embeddings()(torch.tensor(list(ids)))

    def head(self, states: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(states)


class Layer:
    """A block of a llama, qwen2 or qwen3, depending on its tensors, without the norm before attention."""

    def __init__(self, config: Any, tensors: Tensors) -> None:
        self.tensors = {name: tensor.float() for name, tensor in tensors.items()}
        self.eps = config.rms_norm_eps
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.activation = ACT2FN[config.hidden_act]
        self.rope = LlamaRotaryEmbedding(config)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.eps)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def __call__(self, reads: torch.Tensor, residual_TH: torch.Tensor) -> torch.Tensor:
        """reads: the rows from which queries, keys and values are projected."""
        x = residual_TH + self.attention(reads)
        h = self.norm("post_attention_layernorm", x)
        gate, up = self.linear("mlp.gate_proj", h), self.linear("mlp.up_proj", h)
        return x + self.linear("mlp.down_proj", self.activation(gate) * up)

    def attention(self, reads: torch.Tensor) -> torch.Tensor:
        """Causal, over all entries; a target's sliding windows do not apply here."""
        entries = len(reads)
        q, k, v = (
            self.linear(f"self_attn.{name}_proj", reads).view(entries, -1, self.head_dim).transpose(0, 1)
            for name in ("q", "k", "v")
        )
        if "self_attn.q_norm.weight" in self.tensors:
            q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        cos, sin = (table[0] for table in self.rope(reads, torch.arange(entries)[None]))
        q, k = q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / self.head_dim**0.5
        future = torch.ones(entries, entries, dtype=torch.bool).triu(1)
        values = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.linear("self_attn.o_proj", values.transpose(0, 1).flatten(1))


THEIRS: dict[str, tuple[Any, Any]] = {
    "deepseek_v3": (DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding),
    "glm4_moe": (Glm4MoeDecoderLayer, Glm4MoeRotaryEmbedding),
}
"""transformers' block and rotation, of the model types whose modules are in a form that transformers reads."""


class TheirLayer:
    """The same for one of THEIRS, whose own class in transformers computes it, in the dtype of its tensors."""

    def __init__(self, config: Any, tensors: Tensors) -> None:
        stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
        if experts:
            by_part = {
                part: torch.stack([experts[f"mlp.experts.{i}.{part}.weight"] for i in range(config.n_routed_experts)])
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            stacked["mlp.experts.gate_up_proj"] = torch.cat((by_part["gate_proj"], by_part["up_proj"]), 1)
            stacked["mlp.experts.down_proj"] = by_part["down_proj"]
        config = copy.deepcopy(config)
        config._attn_implementation = "eager"
        config.first_k_dense_replace = 0  # modules have experts whatever layers have, as in their `get_mtp_config`
        block, rotary = THEIRS[config.model_type]
        self.layer = block(config, 0).to(next(iter(tensors.values())).dtype).eval()
        self.layer.load_state_dict(
            {name: tensor for name, tensor in stacked.items() if name in self.layer.state_dict()}
        )
        self.rope = rotary(config)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.layer.get_submodule(name)(x)
        return normed

    def __call__(self, reads: torch.Tensor, residual_TH: torch.Tensor) -> torch.Tensor:
        entries = len(reads)
        future = torch.full((entries, entries), float("-inf")).triu(1)[None, None]
        angles = self.rope(reads[None], torch.arange(entries)[None])
        x = residual_TH + self.layer.self_attn(reads[None], angles, future)[0][0]
        more: torch.Tensor = self.layer.mlp(self.norm("post_attention_layernorm", x)[None])[0]
        return x + more


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def under(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors below a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


Module = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(states [T, H], embeddings [T, H]) of the entries -> (states to go on from, states for the head), [T, H] each."""


class Modules:
    """One or more modules for a target, with the head and embedding that they use."""

    def __init__(
        self,
        modules: Sequence[Module],
        features: Callable[[Sequence[int]], torch.Tensor],
        embed: Callable[[Sequence[int]], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
        ids_V: torch.Tensor,
        own: Sequence[Tensors] = (),
    ) -> None:
        """own: the embedding and the head that each module has itself, as its checkpoint names them."""
        self.modules, self.features, self.embed, self.head, self.ids_V = modules, features, embed, head, ids_V
        self.own = own or [{}] * len(modules)

    def embedded(self, module: int, ids: Sequence[int]) -> torch.Tensor:
        own = self.own[module].get("embed_tokens.weight")
        return self.embed(ids) if own is None else F.embedding(torch.tensor(list(ids)), own)

    def scored(self, module: int, states: torch.Tensor) -> torch.Tensor:
        own = self.own[module].get("shared_head.head.weight")
        return self.head(states) if own is None else F.linear(states, own)

    @torch.inference_mode()
    def recursive(self, known: Sequence[int], depth: int) -> Drafted:
        """`depth` drafts of the first module, applied repeatedly."""
        folded, tokens, logits = self.features(known[:-1]), list(known), []
        states = folded
        for _ in range(depth):
            onward, said = self.modules[0](states, self.embedded(0, tokens[1:]))
            logits.append(self.scored(0, said[-1]))
            tokens.append(int(self.ids_V[logits[-1].argmax()]))
            # Caught-up entries have the target's states; only those after them have the module's own.
            states = torch.cat([states, onward[-1:]])
        return Drafted(tokens[len(known) :], torch.stack(logits), self.ids_V)

    @torch.inference_mode()
    def in_turn(self, known: Sequence[int], depth: int | None = None) -> Drafted:
        """One draft of every module, or of the first `depth`."""
        states, tokens, logits = self.features(known[:-1]), list(known), []
        for step, module in enumerate(self.modules[:depth]):
            states, said = module(states, self.embedded(step, tokens[step + 1 :]))
            logits.append(self.scored(step, said[-1]))
            tokens.append(int(self.ids_V[logits[-1].argmax()]))
        return Drafted(tokens[len(known) :], torch.stack(logits), self.ids_V)


@dataclass(frozen=True)
class _Names:
    """The names that a form of module gives to its parts."""

    prefix: str
    """A module's, given its index and the target's number of layers."""
    embedding_norm: str
    state_norm: str
    projection: str
    block: str
    last_norm: str
    state_first: bool = False
    """Whether the projection reads the state before the embedding."""
    norm_offset: float = 0.0
    """What is added to the stored weights of norms."""


_NAMES: dict[MtpForm, _Names] = {
    "deepseek": _Names("model.layers.{behind}.", "enorm", "hnorm", "eh_proj", "", "shared_head.norm"),
    "mimo": _Names(
        "model.mtp_layers.{module}.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "",
        "final_layernorm",
        state_first=True,
    ),
    "qwen": _Names(
        "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.{module}.", "norm", norm_offset=1.0
    ),
}


Change = Callable[[nn.Module, str], None]
"""(a target or a block in transformers, how names of its tensors begin in the checkpoint) -> other layers in it."""


def mtp(
    path: Path, form: MtpForm, dtype: torch.dtype = torch.float32, change: Change = lambda module, prefix: None
) -> Modules:
    """The modules of a target that ships its own. A module's state after its last norm is fed back.

    dtype, change: for THEIRS only, in what to compute, and what to change first.
    """
    target = TargetStates(path, dtype)
    change(target.model, "")
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(path).items()}
    config = config_of(path)
    count = config.get("num_nextn_predict_layers") or config["mtp_num_hidden_layers"]
    modules = [_mtp_module(_NAMES[form], target.config, tensors, index, change) for index in range(count)]
    prefixes = [_NAMES[form].prefix.format(module=i, behind=config["num_hidden_layers"] + i) for i in range(count)]
    own = [under(tensors, prefix) for prefix in prefixes]
    ids_V = torch.arange(config["vocab_size"])
    return Modules(modules, lambda ids: target(ids)[-1], target.embed, target.head, ids_V, own)


def _mtp_module(names: _Names, config: Any, tensors: Tensors, index: int, change: Change) -> Module:
    prefix = names.prefix.format(module=index, behind=config.num_hidden_layers + index)
    own = {
        name: tensor + (names.norm_offset if tensor.dim() == 1 and "norm" in name else 0.0)
        for name, tensor in under(tensors, prefix).items()
    }
    kind = TheirLayer if config.model_type in THEIRS else Layer
    layer = kind(config, under(own, names.block.format(module=index)))
    if isinstance(layer, TheirLayer):
        change(layer.layer, prefix)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, own[f"{name}.weight"], config.rms_norm_eps)

    def module(states_TH: torch.Tensor, embeds_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = [norm(names.embedding_norm, embeds_TH), norm(names.state_norm, states_TH)]
        x = F.linear(torch.cat(both[::-1] if names.state_first else both, -1), own[f"{names.projection}.weight"])
        out = norm(names.last_norm, layer(layer.norm("input_layernorm", x), x))
        return out, out

    return module


def eagle(path: Path, target_path: Path, form: EagleForm) -> Modules:
    """An EAGLE head, which is only used recursively. The layer's state before any norm is fed back."""
    target, config = TargetStates(target_path), config_of(path)
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors_of(path).items()
    }
    layer_config = LlamaConfig.from_dict(config.get("transformer_layer_config", config))
    embedding = tensors.get("embed_tokens.weight")

    def embed(ids: Sequence[int]) -> torch.Tensor:
        return target.embed(ids) if embedding is None else F.embedding(torch.tensor(list(ids)), embedding)

    if form == "eagle1":
        layer = Layer(layer_config, under(tensors, "layers.0."))

        def first(states_TH: torch.Tensor, embeds_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = F.linear(torch.cat([embeds_TH, states_TH], -1), tensors["fc.weight"], tensors.get("fc.bias"))
            out = layer(x, x)
            return out, out

        ids_V = torch.arange(config["vocab_size"])
        return Modules([first], lambda ids: target(ids)[-1], embed, target.head, ids_V)

    layer = Layer(layer_config, under(tensors, "midlayer." if form == "eagle3" else "layers.0."))
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    if taps is None and "eagle_config" in config:  # layers whose outputs are read
        taps = [layer + 1 for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    taps = taps or default_aux_layers(target.config.num_hidden_layers)

    def features(ids: Sequence[int]) -> torch.Tensor:
        states = target(ids)
        return F.linear(torch.cat([states[tap] for tap in taps], -1), tensors["fc.weight"])

    def third(states_TH: torch.Tensor, embeds_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = layer.norm("hidden_norm", states_TH)
        reads = torch.cat([layer.norm("input_layernorm", embeds_TH), normed], -1)
        out = layer(reads, normed if config.get("norm_before_residual") else states_TH)
        return out, rms_norm(out, tensors["norm.weight"], layer.eps)

    def head(states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, tensors["lm_head.weight"])

    ids_V = torch.arange(config["draft_vocab_size"]) + tensors["d2t"]
    return Modules([third], features, embed, head, ids_V)


class Medusa:
    """Heads that all read the state from which the last known token was drawn."""

    def __init__(self, path: Path, target_path: Path) -> None:
        self.target, self.tensors, config = TargetStates(target_path), tensors_of(path), config_of(path)
        self.heads, self.layers = config["medusa_num_heads"], config["medusa_num_layers"]

    @torch.inference_mode()
    def __call__(self, known: Sequence[int], depth: int | None = None) -> Drafted:
        """One draft of every head, or of the first `depth`."""
        state, logits = self.target(known[:-1])[-1][-1], []
        for head in range(self.heads)[:depth]:
            own = under(self.tensors, f"{head}.")
            x = state
            for layer in range(self.layers):
                x = x + F.silu(F.linear(x, own[f"{layer}.linear.weight"], own[f"{layer}.linear.bias"]))
            logits.append(F.linear(x, own[f"{self.layers}.weight"]))
        logits_DV = torch.stack(logits)
        return Drafted(logits_DV.argmax(-1).tolist(), logits_DV, torch.arange(logits_DV.shape[1]))
