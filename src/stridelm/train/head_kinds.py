"""Kinds of heads that can be trained: how each is built, what it learns, and the layout of its checkpoint.

The head modules belong to their drafters and are imported only when one is built: a drafter's folder may be missing.

Legend: B sequences, S tokens of each, H width, M rows, V tokens of a head's draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F

from stridelm.batch import States
from stridelm.draft.heads import DraftHead
from stridelm.models.layers.attention import HeadsSpec
from stridelm.models.layers.block import LayerSpec
from stridelm.models.layers.decoder import Decoder, DecoderSpec
from stridelm.models.layers.hf import ACTIVATIONS, EXTRA_MODULES
from stridelm.models.layers.mlp import GatedMLPSpec
from stridelm.models.layers.rope import RopeSpec
from stridelm.train.continuations import Continuations
from stridelm.train.export import checkpoint_tensors
from stridelm.train.recipe import init_weights
from stridelm.train.settings import EagleSettings, HeadSettings, MtpSettings
from stridelm.train.unrolled import target_states, unrolled

if TYPE_CHECKING:
    from stridelm.draft.eagle.head import Eagle3Head
    from stridelm.draft.mtp.head import MtpModule


class HeadKind:
    """Base of all kinds."""

    stage: ClassVar[str]
    drafter: ClassVar[str]
    """The drafter that serves it."""

    def __init__(self, settings: HeadSettings) -> None:
        self.settings = settings

    def check(self, target: DecoderSpec) -> None:
        """Raise ValueError if this target cannot have such a head."""

    def build(self, target: Decoder, said: Continuations, seed: int) -> DraftHead:
        """A new head in float32 on the target's device, a function of target, settings, `said` and seed only. said:
        the continuations that it will be trained on."""
        raise NotImplementedError

    def states(self, head: DraftHead, target: Decoder, rows_BL: torch.Tensor) -> States:
        """What the head reads of the target over these texts."""
        return target_states(target, rows_BL, head.taps)

    def unrolled(
        self, head: DraftHead, states: States, rows_BL: torch.Tensor, first: int, depth: int
    ) -> Iterator[torch.Tensor]:
        """As `train.unrolled.unrolled`. states: as `states` returns them."""
        return unrolled(head, states, rows_BL, first, depth)

    def sought(
        self, head: DraftHead, target: Decoder, tokens_BS: torch.Tensor, before_BSH: torch.Tensor
    ) -> torch.Tensor:
        """[B, S, ..] the training target of each token: by default the token itself. before: the target's states from
        which the tokens were drawn."""
        return tokens_BS

    def nats(self, head: DraftHead, hidden_MH: torch.Tensor, sought_M: torch.Tensor) -> torch.Tensor:
        """[M] the loss of the head's outputs: by default the cross-entropy of the tokens."""
        return F.cross_entropy(head.logits(hidden_MH).float(), sought_M, reduction="none")

    def config(self, head: DraftHead, target: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of the head, from the target's."""
        raise NotImplementedError

    def tensors(self, head: DraftHead, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The contents of model.safetensors."""
        return checkpoint_tensors(head, dtype)


class MtpKind(HeadKind):
    """A multi-token prediction module that reads its own output, trained on the tokens that the target generated
    (FastMTP, arXiv 2509.18362), in DeepSeek-V3's layout."""

    stage = "mtp"
    drafter = "mtp"
    settings: MtpSettings

    def build(self, target: Decoder, said: Continuations, seed: int) -> DraftHead:
        from stridelm.draft.mtp.head import DEEPSEEK, MtpHead

        head = MtpHead(target, DEEPSEEK, 1)
        init_weights(head, torch.Generator().manual_seed(seed))
        with torch.no_grad():  # start from the norm that the target's output matrix was trained with
            cast("MtpModule", head.parts[0]).norm.copy_(target.norm)
        return head.to(target.norm.device)

    def config(self, head: DraftHead, target: Mapping[str, Any]) -> dict[str, Any]:
        """The target's config, which gives the shape of the module's block."""
        own = {name: value for name, value in target.items() if name not in EXTRA_MODULES}
        return {**own, EXTRA_MODULES[0]: 1}


class Eagle3Kind(HeadKind):
    """An EAGLE-3 head (arXiv 2503.01840), trained on the target's probabilities over the head's draft vocabulary, in
    the layout of SafeAILab and SpecForge."""

    stage = "eagle3"
    drafter = "eagle"
    settings: EagleSettings

    def check(self, target: DecoderSpec) -> None:
        self._spec(target)

    def build(self, target: Decoder, said: Continuations, seed: int) -> DraftHead:
        from stridelm.draft.eagle.head import Eagle3Head

        spec, device = self._spec(target.spec), target.norm.device
        head = Eagle3Head(
            target,
            spec,
            own_embedding=False,
            taps=taps(target.spec.num_layers),
            draft_vocab=min(self.settings.draft_vocab_size, target.spec.vocab_size),
            norm_before_residual=False,
        )
        init_weights(head, torch.Generator().manual_seed(seed))
        frequent = said.counts(target.spec.vocab_size).sort(descending=True, stable=True).indices
        head.set_vocabulary(frequent[: len(head.ids)].sort().values)
        with torch.no_grad():  # start from the target's output rows and norm, which are already trained
            head.head.weight.copy_(target.head.weight.cpu()[head.ids])
            head.norm.copy_(target.norm)
        head.to(device).prepare(device)
        return head

    def sought(
        self, head: DraftHead, target: Decoder, tokens_BS: torch.Tensor, before_BSH: torch.Tensor
    ) -> torch.Tensor:
        logits = target.logits(before_BSH.flatten(0, 1)).index_select(1, cast("Eagle3Head", head).ids)
        return logits.float().softmax(-1).unflatten(0, tokens_BS.shape)

    def nats(self, head: DraftHead, hidden_MH: torch.Tensor, sought_M: torch.Tensor) -> torch.Tensor:
        ours = cast("Eagle3Head", head).own_logits(hidden_MH).float().log_softmax(-1)
        return -(sought_M * ours).sum(-1)

    def config(self, head: DraftHead, target: Mapping[str, Any]) -> dict[str, Any]:
        layers = target["num_hidden_layers"]
        config = {"architectures": ["LlamaForCausalLMEagle3"], **self._layer(head.spec)}
        config |= {"draft_vocab_size": len(cast("Eagle3Head", head).ids)}
        config |= {name: target.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if taps(layers) != usual_taps(layers):
            config["eagle_aux_hidden_state_layer_ids"] = list(taps(layers))
        return config

    def tensors(self, head: DraftHead, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        ids = cast("Eagle3Head", head).ids.cpu()
        vocab_size = head.spec.vocab_size
        can_say = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        own = super().tensors(head, dtype)
        renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in own.items()}
        return {**renamed, "d2t": ids - torch.arange(len(ids)), "t2d": can_say}

    def _spec(self, target: DecoderSpec) -> DecoderSpec:
        """The spec of the head's layer: a llama's, with the target's sizes unless the settings override them."""
        s, (mixer, mlp) = self.settings, _dense(target)
        heads = s.heads or mixer.num_heads
        if target.hidden_size % heads:
            raise ValueError(
                f"--heads {heads} must divide the hidden size {target.hidden_size}, as llama configs require"
            )
        layer = LayerSpec(
            HeadsSpec(
                num_heads=heads,
                num_kv_heads=s.kv_heads or mixer.num_kv_heads,
                head_dim=mixer.head_dim,
                rope=RopeSpec(mixer.head_dim, mixer.rope.theta),
            ),
            GatedMLPSpec(intermediate_size=s.mlp or mlp.intermediate_size, activation=mlp.activation),
        )
        return replace(target, layers=(layer,), tied=False, extra_modules=0)

    @staticmethod
    def _layer(spec: DecoderSpec) -> dict[str, Any]:
        """The config of a llama layer of this shape."""
        mixer, mlp = _dense(spec)
        activation = next(name for name, ours in ACTIVATIONS.items() if ours == mlp.activation)
        return {
            "model_type": "llama",
            "hidden_size": spec.hidden_size,
            "intermediate_size": mlp.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            "hidden_act": activation,
            "rms_norm_eps": spec.norm_eps,
            "rope_theta": mixer.rope.theta,
            "vocab_size": spec.vocab_size,
            "max_position_embeddings": spec.max_length,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }


def _dense(spec: DecoderSpec) -> tuple[HeadsSpec, GatedMLPSpec]:
    """The parts of the first layer. Raises ValueError if they are not a dense decoder's."""
    mixer, mlp = spec.layers[0].mixer, spec.layers[0].mlp
    if not (isinstance(mixer, HeadsSpec) and isinstance(mlp, GatedMLPSpec)):
        raise ValueError("EAGLE-3 heads are trained for dense decoders; train an MTP module instead")
    return mixer, mlp


def usual_taps(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are read in a target of this many, unless config.json lists others."""
    return 2, layers // 2, layers - 3


def taps(layers: int) -> tuple[int, int, int]:
    """The usual ones; for a target of fewer than six layers, the first, middle and last."""
    return usual_taps(layers) if layers >= 6 else (0, layers // 2, layers - 1)
