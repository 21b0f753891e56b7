"""The row operations in plain torch: the reference, on any device, and differentiable.

Legend: as in ops.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F

from stridelm.kernels import entries
from stridelm.kernels.ops import LatentRope, Parts, QKRope, Routing
from stridelm.kernels.quantised_ops import QuantisesAfterwards


# On a CPU F.gelu computes a single row, and the last numbers of a thread's share, with different arithmetic than the
# rest, so a row's bits would depend on the batch. The functions that it is made of do not.
def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.special.ndtr(x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * (x * x * x))))


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
}


def whole_logits(logits: torch.Tensor) -> torch.Tensor:
    """[N, L], as `Ops.route` adds them up."""
    if logits.dim() == 2:
        return logits
    logits_NL, *rest = logits.unbind(1)
    for part_NL in rest:
        logits_NL = logits_NL + part_NL
    return logits_NL


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias_E: torch.Tensor | None = None,
    scale_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.route`."""
    experts, logits_NL = routing.num_experts, whole_logits(logits)
    logits_NE, shared_NS = logits_NL.split((experts, logits_NL.shape[1] - experts), dim=1)
    logits_NE = logits_NE * routing.logit_scale
    scores_NE = logits_NE.softmax(-1) if routing.scoring == "softmax" else _sigmoid(logits_NE)
    choice_NE = scores_NE if bias_E is None else scores_NE + bias_E
    if routing.n_group > 1:
        by_group_NGM = choice_NE.view(len(choice_NE), routing.n_group, -1)
        best_NG = by_group_NGM.topk(2, dim=-1).values.sum(-1).sort(stable=True, dim=-1, descending=True).indices
        out_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter(1, best_NG[:, : routing.topk_group], False)
        choice_NE = by_group_NGM.masked_fill(out_NG[..., None], float("-inf")).flatten(1)
    # Sorted because `topk` may return any of equal scores.
    order_NE = choice_NE.sort(stable=True, dim=-1, descending=True).indices
    chosen_NK = order_NE[:, : routing.num_experts_per_tok].contiguous()
    weights_NK = scores_NE.gather(1, chosen_NK)
    if routing.norm_topk_prob:
        total_N1 = weights_NK[:, :1]
        for k in range(1, weights_NK.shape[1]):
            total_N1 = total_N1 + weights_NK[:, k : k + 1]
        weights_NK = weights_NK / (total_N1 + 1e-20)
    weights_NK = weights_NK * routing.routed_scaling_factor
    if scale_E is not None:
        weights_NK = weights_NK * scale_E[chosen_NK]
    return chosen_NK, torch.cat((weights_NK, _sigmoid(shared_NS)), dim=1)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """From the exponential, because `torch.sigmoid` computes the last numbers of a tensor otherwise than the rest."""
    return (1 / (1 + torch.exp(-x.double()))).to(x.dtype)


def spread_logits(own_MD: torch.Tensor, ids_D: torch.Tensor, places_V: torch.Tensor) -> torch.Tensor:
    """`Ops.spread_logits`."""
    return own_MD.new_full((len(own_MD), len(places_V)), float("-inf")).index_copy_(1, ids_D, own_MD)


def soft_cap(logits_MV: torch.Tensor, cap: float) -> torch.Tensor:
    """`Ops.soft_cap`."""
    wide = torch.promote_types(logits_MV.dtype, torch.float32)
    return (torch.tanh(logits_MV.to(wide) / cap) * cap).to(logits_MV.dtype)


def combine(parts_NKC: torch.Tensor, weights_NW: torch.Tensor, shared_NC: torch.Tensor | None = None) -> torch.Tensor:
    """`Ops.combine`."""
    count = parts_NKC.shape[1]
    total_NC = parts_NKC[:, 0] * weights_NW[:, :1]
    for k in range(1, count):
        total_NC = total_NC + parts_NKC[:, k] * weights_NW[:, k : k + 1]
    if shared_NC is not None:
        total_NC = total_NC + (shared_NC * weights_NW[:, count:] if weights_NW.shape[1] > count else shared_NC)
    return total_NC.to(parts_NKC.dtype)


def part_logits(
    x_MH: torch.Tensor, scores_MC: torch.Tensor, weight_VH: torch.Tensor, ids_CS: torch.Tensor, best: int
) -> torch.Tensor:
    """`Ops.part_logits`."""
    logits_MV = x_MH.new_full((len(x_MH), len(weight_VH)), float("-inf"))
    # Sorted because `topk` may return any of equal scores.
    chosen_MK = scores_MC.sort(stable=True, dim=-1, descending=True).indices[:, :best]
    # Row by row: each is one product of the same shape, and no copy is made of all rows' matrices. The row is copied
    # because a library may add in another order at another alignment.
    for row, (x_H, chosen_K) in enumerate(zip(x_MH, chosen_MK, strict=True)):
        ids_T = ids_CS[chosen_K].flatten()
        logits_MV[row, ids_T] = weight_VH[ids_T] @ x_H.clone()
    return logits_MV


def roped(
    qkv_NXD: torch.Tensor, rope: QKRope, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [N, H, D], keys and values [N, G, D] of all rows. dtype: of keys and values; None: of the projections."""
    dtype = dtype or qkv_NXD.dtype
    heads, kv_heads = rope.heads, rope.kv_heads
    qk, v = qkv_NXD[:, : heads + kv_heads], qkv_NXD[:, rope.projected - kv_heads :]
    qk = qk if qk.element_size() > 2 else qk.float()
    if rope.norms is not None:
        of_queries, *of_keys = rope.norms.view(-1, qkv_NXD.shape[2])
        weights = [of_queries.expand(heads, -1), *(weight.expand(kv_heads, -1) for weight in of_keys)]
        qk = F.rms_norm(qk, qk.shape[-1:], None, rope.eps) * torch.cat(weights)
    if rope.normed_values:
        v = F.rms_norm(v.to(dtype), v.shape[-1:], None, rope.eps)
    q, k = rotate(qk, rope).split((heads, kv_heads), dim=1)
    return q.to(qkv_NXD.dtype), k.to(dtype), v.to(dtype)


def rope_and_store(
    qkv_NXD: torch.Tensor,
    rope: QKRope,
    keys_PGD: torch.Tensor,
    values_PGD: torch.Tensor,
    slots_N: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """`Ops.rope_and_store`."""
    q, k, v = roped(qkv_NXD, rope, entries.wide(keys_PGD.dtype, qkv_NXD.dtype))
    if rope.kv_heads:
        entries.write(keys_PGD, slots_N, k, key_scale)
        entries.write(values_PGD, slots_N, v, value_scale)
    return q


def rope_and_store_latent(
    q_NHK: torch.Tensor,
    rows_NC: torch.Tensor,
    rope: LatentRope,
    latents_PC: torch.Tensor,
    slots_N: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """`Ops.rope_and_store_latent`."""
    q_NHK, latent_NC = latent_rows(q_NHK, rows_NC, rope, entries.wide(latents_PC.dtype, rows_NC.dtype))
    entries.write(latents_PC, slots_N, latent_NC, scale)
    return q_NHK


def latent_rows(
    q_NHK: torch.Tensor, rows_NC: torch.Tensor, rope: LatentRope, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rotated queries [N, H, K], latent rows [N, C] as they are stored). dtype: of latent rows; None: of the
    projections."""
    dtype = dtype or rows_NC.dtype
    width = q_NHK.shape[2]
    latent, key = rows_NC.split((rows_NC.shape[1] - width, width), dim=1)
    latent = F.rms_norm(latent.contiguous().to(dtype), rope.norm_R.shape, rope.norm_R.to(dtype), rope.eps)
    turned = torch.cat((q_NHK, key[:, None]), dim=1)
    turned = turned if turned.element_size() > 2 else turned.float()
    if rope.interleaved:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    q, key = rotate(turned, rope).split((q_NHK.shape[1], 1), dim=1)
    return q.to(rows_NC.dtype), torch.cat((latent, key[:, 0].to(dtype)), dim=1)


def rotate(x_NHD: torch.Tensor, rope: QKRope | LatentRope) -> torch.Tensor:
    """Rotate each head of each row by its position's angles, as far as there are angles for its dimensions."""
    cos, sin = (table[rope.positions][:, None].to(x_NHD.dtype) for table in (rope.cos_LF, rope.sin_LF))
    pairs = cos.shape[-1]
    low, high, rest = x_NHD.split((pairs, pairs, x_NHD.shape[-1] - 2 * pairs), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


class PlainOps(QuantisesAfterwards):
    device: ClassVar[str | None] = None
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
    rope_and_store = staticmethod(rope_and_store)
    rope_and_store_latent = staticmethod(rope_and_store_latent)
    route = staticmethod(route)
    combine = staticmethod(combine)
    part_logits = staticmethod(part_logits)
    soft_cap = staticmethod(soft_cap)
    spread_logits = staticmethod(spread_logits)

    def prepare(
        self, dtype: torch.dtype, *, normed_heads: bool = False, activation: str = "silu", has_experts: bool = False
    ) -> None:
        pass

    def norm(self, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x_NC, weight_C.shape, weight_C, eps)

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
        token_NC = token_VC if ids_N is None else F.embedding(ids_N, token_VC)
        token_NC, hidden_NC = self.norm(token_NC, token_weight_C, eps), self.norm(hidden_NC, hidden_weight_C, eps)
        return torch.cat((hidden_NC, token_NC) if hidden_first else (token_NC, hidden_NC), dim=-1)

    def add_norm(
        self, x_NC: torch.Tensor, delta_NC: torch.Tensor, weight_C: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x_NC + delta_NC
        return total, self.norm(total, weight_C, eps)

    def combine_norm(
        self, of: Parts, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.add_norm(self.combine(*of).to(x_NC.dtype), x_NC, weight_C, eps)

    def add_normed(
        self,
        x_NC: torch.Tensor,
        delta_NC: torch.Tensor,
        after_C: torch.Tensor,
        eps: float,
        factor_1: torch.Tensor | None = None,
        weight_C: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        wide = torch.promote_types(x_NC.dtype, torch.float32)
        total = x_NC.to(wide) + F.rms_norm(delta_NC.to(wide), after_C.shape, after_C.to(wide), eps)
        total = (total if factor_1 is None else total * factor_1.to(wide)).to(x_NC.dtype)
        return total, None if weight_C is None else self.norm(total, weight_C, eps)

    def gate(
        self, gate_up_N2I: torch.Tensor, activation: str = "silu", up_NI: torch.Tensor | None = None
    ) -> torch.Tensor:
        # Side by side in any case: on a CPU the bits of an activation depend on how its input lies in memory.
        gate_up_N2I = gate_up_N2I if up_NI is None else torch.cat((gate_up_N2I, up_NI), dim=1)
        gate, up = gate_up_N2I.chunk(2, dim=-1)
        wide = gate if gate.element_size() > 2 or activation == "silu" else gate.float()
        return _ACTIVATIONS[activation](wide).to(up.dtype) * up
