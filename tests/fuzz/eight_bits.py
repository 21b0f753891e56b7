"""transformers' models with weights or KV in eight bits, from the formats' definitions, in float64.

Numbers are rounded to e4m3 (largest 448) where the formats say so, after they were rounded to float32. The scale of a
block of 128 x 128 of a matrix, and of 128 columns of a row that meets it, is their largest magnitude over 448. That of
keys and values is 1, and they are limited. Two numbers that differ in float64's last bits may be rounded apart, which
would be seen in all that follows, so nothing here is computed in less: neither norms nor a softmax.

Legend: B batch, H heads, T tokens, D a head's width.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

BLOCK, LARGEST = 128, 448.0
ATTENTION = "fuzz_in_eight_bits"


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).double()


def rounded(x: torch.Tensor, height: int) -> torch.Tensor:
    """x [N, I] in blocks of `height` rows and 128 columns, each in eight bits with a scale of its own."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], BLOCK):
            place = slice(top, top + height), slice(left, left + BLOCK)
            block = x[place].float()
            scale = block.abs().max().clamp(min=1e-12) / LARGEST
            out[place] = e4m3(block / scale) * scale.double()
    return out


class EightBitLinear(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = rounded(inner.weight.detach(), BLOCK), inner.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rounded(x.flatten(0, -2), 1).view(x.shape), self.weight, self.bias)


class WideNorm(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = inner.weight, inner.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * self.weight


def attend(
    module: nn.Module,
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention to keys and values in eight bits, if the module says so."""
    if module.kv_in_eight_bits:
        k_BHTD, v_BHTD = e4m3(k_BHTD), e4m3(v_BHTD)
    queries_a_head = q_BHTD.shape[1] // k_BHTD.shape[1]
    k_BHTD, v_BHTD = (each.repeat_interleave(queries_a_head, 1) for each in (k_BHTD, v_BHTD))
    scores = q_BHTD @ k_BHTD.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ v_BHTD).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, eager_mask)


def in_eight_bits(model: Any, options: Collection[str]) -> Any:
    """The model with weights in eight bits if `quantization` is among the options, and KV if `kv_cache_dtype` is. The
    embedding and the output head stay as they are."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, WideNorm(module))
        elif "quantization" in options and isinstance(module, nn.Linear) and "_proj" in name:
            model.set_submodule(name, EightBitLinear(module))
        elif name.endswith("self_attn"):
            module.kv_in_eight_bits = "kv_cache_dtype" in options
    model.set_attn_implementation(ATTENTION)
    return model
