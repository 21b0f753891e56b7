"""The row operations on a CPU: tensors in and out, one compiled call each.

Legend: as in kernels/ops.py.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from stridelm.kernels import plain
from stridelm.kernels.host import rows
from stridelm.kernels.host.arithmetic import DTYPES
from stridelm.kernels.host.memory import NO_NORMS, array
from stridelm.kernels.host.router import combine, route
from stridelm.kernels.host.warm import compile_experts, compile_kernels
from stridelm.kernels.ops import Parts, QKRope
from stridelm.kernels.quantised_ops import QuantisesAfterwards


class HostOps(QuantisesAfterwards):
    device: ClassVar[str | None] = "cpu"
    dtypes: ClassVar[frozenset[torch.dtype]] = DTYPES
    rope_and_store_latent = staticmethod(plain.rope_and_store_latent)  # torch: same bits beside any rows
    route = staticmethod(route)
    combine = staticmethod(combine)
    part_logits = staticmethod(plain.part_logits)
    soft_cap = staticmethod(plain.soft_cap)
    spread_logits = staticmethod(plain.spread_logits)

    def prepare(
        self, dtype: torch.dtype, *, normed_heads: bool = False, activation: str = "silu", has_experts: bool = False
    ) -> None:
        compile_kernels(self, dtype, normed_heads=normed_heads, activation=activation)
        if has_experts:
            compile_experts(self, dtype)

    def norm(self, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
        x_NC = x_NC.contiguous()
        out = torch.empty_like(x_NC)
        rows.norm(array(x_NC), array(weight_C), np.float32(eps), array(out))
        return out

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
        hidden_NC = hidden_NC.contiguous()
        ids_N = torch.arange(len(hidden_NC)) if ids_N is None else ids_N.contiguous()
        count, width = hidden_NC.shape
        out_MC = hidden_NC.new_empty(2 * count, width)
        tokens = array(token_VC.contiguous()), array(ids_N), array(token_weight_C)
        hidden = array(hidden_NC), array(hidden_weight_C)
        rows.join_norms(*tokens, *hidden, np.float32(eps), int(hidden_first), array(out_MC))
        return out_MC.view(count, 2 * width)

    def add_norm(
        self, x_NC: torch.Tensor, delta_NC: torch.Tensor, weight_C: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(x_NC)
        rows.add_norm(array(x_NC), array(delta_NC), array(weight_C), np.float32(eps), array(out))
        return x_NC, out

    def combine_norm(
        self, of: Parts, x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.add_norm(self.combine(*of), x_NC, weight_C, eps)

    def add_normed(
        self,
        x_NC: torch.Tensor,
        delta_NC: torch.Tensor,
        after_C: torch.Tensor,
        eps: float,
        factor_1: torch.Tensor | None = None,
        weight_C: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        total = x_NC + self.norm(delta_NC, after_C, eps)  # each part is rounded, as by transformers
        if factor_1 is not None:
            total *= factor_1
        return total, None if weight_C is None else self.norm(total, weight_C, eps)

    def gate(
        self, gate_up_N2I: torch.Tensor, activation: str = "silu", up_NI: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate_up_N2I = gate_up_N2I if up_NI is None else torch.cat((gate_up_N2I, up_NI), dim=1)
        out = gate_up_N2I.new_empty(gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2)
        rows.GATES[activation](array(gate_up_N2I), array(out))
        return out

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
        eight_bits = keys_PGD.dtype != qkv_NXD.dtype
        if eight_bits or (rope.kv_heads and (rope.normed_values or rope.keys_as_values)):
            return plain.rope_and_store(qkv_NXD, rope, keys_PGD, values_PGD, slots_N, key_scale, value_scale)
        count, _, size = qkv_NXD.shape
        q = qkv_NXD.new_empty(count, rope.heads, size)
        rows.rope_and_store(
            array(qkv_NXD),
            NO_NORMS if rope.norms is None else array(rope.norms.view(-1, size)),
            np.float32(rope.eps),
            array(rope.positions),
            array(rope.cos_LF),
            array(rope.sin_LF),
            array(slots_N),
            array(q),
            array(keys_PGD),
            array(values_PGD),
        )
        return q
