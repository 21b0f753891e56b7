"""The kind of head that reads its target's keys and values: how it is built and stored, in the layout of Gemma 4's
assistants. Any dense target can have one.

Its modules are imported only when one is built: the drafter's folder may be missing.

Legend: B sequences of L tokens, H width of the head, R width of the target, V tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from stridelm.batch import States
from stridelm.draft.heads import DraftHead
from stridelm.models.layers.attention import HeadsSpec
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import ACTIVATIONS
from stridelm.models.layers.rope import RopeSpec
from stridelm.train.continuations import Continuations
from stridelm.train.head_kinds import HeadKind
from stridelm.train.recipe import init_weights
from stridelm.train.settings import FrozenKVSettings

if TYPE_CHECKING:
    from stridelm.draft.frozen_kv.head import FrozenKVHead
    from stridelm.train.frozen_entries import StatesAndEntries

FULL, SLIDING = "full_attention", "sliding_attention"
SAMPLE = 4096
"""Tokens whose embeddings are measured."""
AFTER = 0.1
"""What norms after a layer's parts are initialised to, so that layers change little at first."""


class FrozenKVKind(HeadKind):
    """Query-only layers over the keys and values of the target's last layers, at the position of the last token (Gemma
    4's assistants), trained on the tokens that the target generated, in transformers' layout."""

    stage = "frozen_kv"
    drafter = "frozen_kv"
    settings: FrozenKVSettings

    def check(self, target: DecoderSpec) -> None:
        from stridelm.draft.frozen_kv.layout import sources_in

        if FULL not in sources_in(target):
            raise ValueError("all layers of the target have windows; an assistant reads one that has full attention")
        if self._width(target) > target.hidden_size:
            raise ValueError(f"--hidden {self.settings.hidden} is over the target's {target.hidden_size}; lower it")
        self._text(target)

    def build(self, target: Decoder, said: Continuations, seed: int) -> DraftHead:
        from transformers import Gemma4TextConfig

        from stridelm.draft.frozen_kv.head import FrozenKVHead
        from stridelm.draft.frozen_kv.layout import spec_of

        spec, device = spec_of(Gemma4TextConfig(**self._text(target.spec)), target.spec), target.norm.device
        head = FrozenKVHead(target, spec)
        generator = torch.Generator().manual_seed(seed)
        init_weights(head, generator)
        _reuse(head, target, generator)
        head.to(device).prepare(device)
        return head

    def states(self, head: DraftHead, target: Decoder, rows_BL: torch.Tensor) -> States:
        from stridelm.train.frozen_entries import states_and_entries

        return states_and_entries(cast("FrozenKVHead", head), target, rows_BL)

    def unrolled(
        self, head: DraftHead, states: States, rows_BL: torch.Tensor, first: int, depth: int
    ) -> Iterator[torch.Tensor]:
        from stridelm.train.frozen_entries import unrolled_over_entries

        read = cast("StatesAndEntries", states)
        return unrolled_over_entries(cast("FrozenKVHead", head), read, rows_BL, first, depth)

    def config(self, head: DraftHead, target: Mapping[str, Any]) -> dict[str, Any]:
        served = cast("FrozenKVHead", head).target.spec
        ids = {name: target.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": served.hidden_size,
            "tie_word_embeddings": True,
            "use_ordered_embeddings": False,
            "text_config": self._text(served) | ids,
        }

    def _width(self, target: DecoderSpec) -> int:
        return self.settings.hidden or max(1, target.hidden_size // 2)

    def _text(self, target: DecoderSpec) -> dict[str, Any]:
        """The `text_config` of a head for this target. Raises ValueError for query heads that cannot share its KV
        heads."""
        from stridelm.draft.frozen_kv.layout import sources_in

        s, sources = self.settings, sources_in(target)
        read = {kind: cast(HeadsSpec, target.layers[layer].mixer) for kind, layer in sources.items()}
        kinds = [SLIDING if SLIDING in sources else FULL] * (s.layers - 1) + [FULL]
        heads, width = s.heads or read[FULL].num_heads, self._width(target)
        for mixer in read.values():
            if heads % mixer.num_kv_heads:
                raise ValueError(f"--heads {heads} is no multiple of the target's {mixer.num_kv_heads} KV heads")
        gated = next((layer.mlp for layer in target.layers if hasattr(layer.mlp, "activation")), None)
        used = getattr(gated, "activation", "silu")
        own = {
            kind: {"head_dim": each.head_dim, "num_key_value_heads": each.num_kv_heads} for kind, each in read.items()
        }
        text = {
            "model_type": "gemma4_text",
            "vocab_size": target.vocab_size,
            "hidden_size": width,
            "intermediate_size": s.mlp or 4 * width,
            "num_hidden_layers": s.layers,
            "num_kv_shared_layers": s.layers,
            "num_attention_heads": heads,
            "layer_types": kinds,
            "hidden_activation": next(name for name, ours in ACTIVATIONS.items() if ours == used),
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "max_position_embeddings": target.max_length,
            "rms_norm_eps": target.norm_eps,
            "rope_parameters": {kind: _stated(read.get(kind, read[FULL])) for kind in (FULL, SLIDING)},
            "per_layer_config": {str(i): own[kind] for i, kind in enumerate(kinds)},
            **own[kinds[0]],
        }
        return text | ({"sliding_window": read[SLIDING].window} if SLIDING in kinds else {})


def _stated(mixer: HeadsSpec) -> dict[str, Any]:
    """A layer's rotation as a config states it."""
    rope: RopeSpec = mixer.rope
    stated = {} if rope.kind == "default" else dict(rope.parameters or {})
    stated |= {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "proportional" and rope.dim < mixer.head_dim:
        stated["partial_rotary_factor"] = rope.dim / mixer.head_dim
    return stated


@torch.no_grad()
def _reuse(head: FrozenKVHead, target: Decoder, generator: torch.Generator) -> None:
    """Start from what the target knows of tokens. Its output rows vary most along H directions of its hidden states:
    the head's output rows are these rows' coordinates, its input the states' coordinates, and what it passes on is a
    state again. Embeddings enter as loudly as states."""
    rows_VR = target.head.weight.detach().float().cpu()
    width, read = head.spec.hidden_size, rows_VR.shape[1]
    basis_RH = torch.linalg.eigh(rows_VR.T @ rows_VR).eigenvectors[:, -width:]
    some = torch.arange(min(len(rows_VR), SAMPLE), device=target.norm.device)
    loud, quiet = (x.detach().float().square().mean().sqrt().cpu() for x in (target.norm, target.embed(some)))
    head.head.weight.copy_(rows_VR @ basis_RH)
    head.post.weight.copy_(basis_RH)
    head.pre.weight[:, read:] = basis_RH.T
    head.pre.weight[:, :read] *= loud / quiet.clamp(min=1e-6)
    for name, parameter in head.named_parameters():
        if name.endswith(("after_mixer", "after_mlp")):
            parameter.fill_(AFTER)
        elif name.endswith(("mixer.o.weight", "mlp.down.weight")):  # zero, whose norm has no finite slope
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
