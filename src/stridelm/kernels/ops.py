"""The row operations of a decoder, as one interface with several implementations.

Legend: N rows, C hidden width, I MLP width, X = H + 2G heads side by side (H query, G key, G value heads), D head size,
F pairs of dimensions that are rotated, P pool slots, L positions. In latent attention: R width of a latent, K width of
the rotated part of queries and keys, C = R + K. In mixtures: E experts, K experts that a row chooses. In output heads:
M rows, H hidden width, V tokens, C centroids, S tokens of a centroid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from stridelm.kernels.row_forms import QuantisedRows, RowForm
from stridelm.values import LARGEST, number

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""Activations of a gate: x / (1 + e^-x); x Phi(x), with Phi the normal distribution function (Hendrycks and Gimpel
2016, arXiv 1606.08415), approximated by tanh(sqrt(2 / pi) (x + 0.044715 x^3)); and the same by the error function."""


@dataclass(frozen=True, eq=False)  # hashed by identity: the compiler hashes what it traces
class QKRope:
    """How a layer's queries, keys and values are made from their projections: a norm over each head if the model has
    one, then the rotation of queries and keys by the row's position."""

    heads: int
    kv_heads: int
    """0 in a layer that stores nothing, because it reads the entries of another one."""
    positions: torch.Tensor
    """[N] int64."""
    cos_LF: torch.Tensor
    """float32 by position; dimension i is paired with i + F. A head's dimensions from 2 F on are not rotated."""
    sin_LF: torch.Tensor
    norms: torch.Tensor | None = None
    """[2 D] norm weights: for queries, then for keys; [D] if there are no keys."""
    eps: float = 0.0
    normed_values: bool = False
    """Values are normalised too, without a weight. Only if queries and keys are."""
    keys_as_values: bool = False
    """The keys' projections are also the values', which are not projected: X = H + G."""

    @property
    def projected(self) -> int:
        """How many heads are projected: X."""
        return self.heads + self.kv_heads * (1 if self.keys_as_values else 2)


@dataclass(frozen=True, eq=False)
class LatentRope:
    """How a layer's latent rows are made from their projections, and which part of its queries is rotated: the latent
    is normalised, and the shared key beside it is rotated by the row's position."""

    positions: torch.Tensor
    """[N] int64."""
    cos_LF: torch.Tensor
    """[L, K / 2] float32 by position."""
    sin_LF: torch.Tensor
    norm_R: torch.Tensor
    """Weight of the latent's norm."""
    eps: float
    interleaved: bool
    """Dimension 2i is paired with 2i + 1, and the first of each pair goes to the first half; otherwise dimension i is
    paired with i + K / 2."""


SCORINGS = ("softmax", "sigmoid")
"""How a router's logits become scores: over all experts together, or each by itself."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a row chooses its experts by its scores, and with which weights. Raises ValueError for numbers that do not
    fit together."""

    num_experts: int
    num_experts_per_tok: int
    scoring: str = "softmax"
    """One of SCORINGS."""
    n_group: int = 1
    """Consecutive experts form this many groups of one size. Only experts of the `topk_group` groups whose two best
    have the largest sums can be chosen (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2)."""
    topk_group: int = 1
    norm_topk_prob: bool = False
    """Divide the weights of the chosen experts by their sum."""
    routed_scaling_factor: float = 1.0
    """Multiplies the weights in the end."""
    logit_scale: float = 1.0
    """Multiplies the logits in the beginning. No expert is shared then."""

    def __post_init__(self) -> None:
        experts, chosen, groups, kept = self.num_experts, self.num_experts_per_tok, self.n_group, self.topk_group
        for name in ("num_experts", "num_experts_per_tok", "n_group", "topk_group"):
            if not isinstance(count := getattr(self, name), int) or count < 1:
                raise ValueError(f"{name} must be at least 1, and a whole number; got {count!r}")
        number("routed_scaling_factor", self.routed_scaling_factor, 0, LARGEST, open_low=True)
        number("logit_scale", self.logit_scale, 0, LARGEST, open_low=True)
        if chosen > experts:
            raise ValueError(f"num_experts_per_tok {chosen} exceeds the {experts} experts")
        if experts % groups:
            raise ValueError(f"{experts} experts cannot be divided into n_group {groups} groups of one size")
        if kept > groups:
            raise ValueError(f"topk_group {kept} exceeds n_group {groups}")
        if groups > 1 and experts // groups < 2:
            raise ValueError(f"groups are chosen by their two best experts; n_group {groups} leaves each only one")
        within = kept * (experts // groups)
        if chosen > within:
            raise ValueError(f"num_experts_per_tok {chosen} exceeds the {within} experts of topk_group {kept} groups")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring {self.scoring!r} is not supported; supported: {', '.join(SCORINGS)}")


class Parts(NamedTuple):
    """What experts have made of rows, or parts of a product's sums (kernels/sums_in_parts.py), and the weights of these
    parts, as `Ops.combine` takes them."""

    parts_NKC: torch.Tensor
    weights_NW: torch.Tensor
    shared_NC: torch.Tensor | None = None


class Ops(Protocol):
    """Everything is computed in float32 (float64 for float64) and rounded once, when it is stored."""

    device: ClassVar[str | None]
    """Device type that the set is made for; None: any."""
    dtypes: ClassVar[frozenset[torch.dtype]]

    def prepare(
        self, dtype: torch.dtype, *, normed_heads: bool = False, activation: str = "silu", has_experts: bool = False
    ) -> None:
        """Compile what a layer of this dtype needs, so that no request waits for compilation."""
        ...

    def norm(self, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4). x: rows may lie
        apart, as those of a part of all columns do."""
        ...

    def join_norms(
        self,
        token_VC: torch.Tensor,
        ids_N: torch.Tensor | None,
        token_weight_C: torch.Tensor,
        hidden_NC: torch.Tensor,
        hidden_weight_C: torch.Tensor,
        eps: float,
        *,
        hidden_first: bool = False,
    ) -> torch.Tensor:
        """[N, 2C]: the norms of tokens' embeddings and of hidden states side by side, in this order or the other; the
        same bits as `norm`'s. ids: int64, which rows of `token` are meant; None: all, which are N."""
        ...

    def add_norm(
        self, x_NC: torch.Tensor, delta_NC: torch.Tensor, weight_C: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, its norm). x may be overwritten."""
        ...

    def add_normed(
        self,
        x_NC: torch.Tensor,
        delta_NC: torch.Tensor,
        after_C: torch.Tensor,
        eps: float,
        factor_1: torch.Tensor | None = None,
        weight_C: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """((x + delta's norm with `after`) * factor, and its norm with `weight` if there is one). delta may be
        overwritten; x is not."""
        ...

    def gate(
        self, gate_up_N2I: torch.Tensor, activation: str = "silu", up_NI: torch.Tensor | None = None
    ) -> torch.Tensor:
        """activation(gate) * up, [N, I] (Shazeer 2020, arXiv 2002.05202). activation: one of ACTIVATIONS. up: if it is
        not beside the gate, which is then [N, I]; its rows may lie apart."""
        ...

    def rope_and_store(
        self,
        qkv_NXD: torch.Tensor,
        rope: QKRope,
        keys_PGD: torch.Tensor,
        values_PGD: torch.Tensor,
        slots_N: torch.Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> torch.Tensor:
        """Write each row's rotated keys and its values to its slot of a layer's pool, nothing if there are no KV heads;
        returns the rotated queries [N, H, D]. slots_N: int64. The pool has the projections' dtype, or eight bits with
        these scales (kernels/entries.py)."""
        ...

    def rope_and_store_latent(
        self,
        q_NHK: torch.Tensor,
        rows_NC: torch.Tensor,
        rope: LatentRope,
        latents_PC: torch.Tensor,
        slots_N: torch.Tensor,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Write each row's normalised latent and rotated key to its slot of a layer's pool; returns the rotated queries
        [N, H, K]. rows: as projected. q: any strides whose last is 1. slots_N: int64. The pool has the projections'
        dtype, or eight bits with this scale."""
        ...

    def route(
        self,
        logits: torch.Tensor,
        routing: Routing,
        bias_E: torch.Tensor | None = None,
        scale_E: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(each row's experts [N, K] int64, the best first, and of equal ones the first; their weights [N, K] float32).

        logits: float32, [N, L], or [N, P, L], whose P parts are to be added first to last. If there is one more of them
        than experts, it is a shared expert's, and its sigmoid is one more weight: [N, K + 1]. bias: float32, added to
        the scores for the choice only. scale: of each expert, multiplies its weight; no expert is shared then. Chosen
        experts exist even if logits are NaN; their weights are NaN then.
        """
        ...

    def combine(
        self, parts_NKC: torch.Tensor, weights_NW: torch.Tensor, shared_NC: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sum of each row's parts times its weights, [N, C], added in the order of K, then `shared` times the
        additional weight, or 1 if there is none."""
        ...

    def combine_norm(
        self, of: Parts, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + their sum, rounded to x's dtype; the norm of that). x is not overwritten."""
        ...

    def norm_quantised(
        self,
        x_NC: torch.Tensor,
        weight_C: torch.Tensor,
        eps: float,
        form: RowForm,
        delta: torch.Tensor | Parts | None = None,
        *,
        keeps_dense: bool = False,
    ) -> tuple[torch.Tensor, QuantisedRows]:
        """(x + delta, its norm), bit for bit what `norm`, `add_norm` or, with Parts, `combine_norm` return, but that
        the norm is then quantised; with `keeps_dense` it is also kept as it is. delta [N, C] may be overwritten; x is
        not, and is returned if there is no delta."""
        ...

    def gate_quantised(self, gate_up_N2I: torch.Tensor, activation: str, form: RowForm) -> QuantisedRows:
        """What `gate` returns, quantised."""
        ...

    def soft_cap(self, logits_MV: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(logits / cap). logits may be overwritten."""
        ...

    def spread_logits(self, own_MD: torch.Tensor, ids_D: torch.Tensor, places_V: torch.Tensor) -> torch.Tensor:
        """[M, V]: the logits of the tokens `ids` in their places among all, and -inf for all others. places: int64,
        which of these D each token is; D: none."""
        ...

    def part_logits(
        self, x_MH: torch.Tensor, scores_MC: torch.Tensor, weight_VH: torch.Tensor, ids_CS: torch.Tensor, best: int
    ) -> torch.Tensor:
        """[M, V]: of the tokens of a row's `best` centroids, weight times x; -inf for all others. scores: of each
        centroid, NaN counting as the highest; of equal ones the first is taken. ids: int64, the tokens of each, every
        token once."""
        ...
