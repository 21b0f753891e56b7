"""Compiles norms of rows, alone, two side by side and after sums of experts' parts, routers, and what a head does to
its logits, for an H100 that is not there, in published widths, and prints as JSON what its kernels became.

Run as a process of its own, since it changes Triton for good: python -m support.checks.row_compiles
"""

from __future__ import annotations

import json

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stridelm.kernels.head_rows import join_norms, spread_logits
from stridelm.kernels.ops import Parts, Routing
from stridelm.kernels.sums_in_parts import added_parts, scores
from stridelm.kernels.triton_norms import combine_norm, norm
from stridelm.kernels.triton_router import route
from support.checks.kv_compiles import FOUND, compile_only
from support.doubles.absent_gpu import Driver

SIZES = ((2048, 8, False), (2048, 6, True), (7168, 8, True))
"""Width, parts, and whether there is a shared expert, of Qwen3-30B-A3B, DeepSeek-V2-Lite and DeepSeek-V3."""
ROUTERS = (
    (2048, Routing(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)),
    (2048, Routing(num_experts=64, num_experts_per_tok=6)),
    (7168, Routing(num_experts=256, num_experts_per_tok=8, scoring="sigmoid", n_group=8, topk_group=4)),
)
"""Width and routing of the same."""


def main() -> None:
    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only
    for width, each, is_shared in SIZES:
        x, weight = torch.zeros(4, 2 * width, dtype=torch.bfloat16), torch.zeros(width, dtype=torch.bfloat16)
        norm(x[:, width:], None, weight, 1e-6)
        join_norms(x.view(8, width), torch.zeros(4, dtype=torch.int64), weight, x[:, width:], weight, 1e-6)
        parts, shared = torch.zeros(4, each, width, dtype=torch.bfloat16), x[:, :width] if is_shared else None
        combine_norm(Parts(parts, torch.zeros(4, each), shared), x[:, :width].contiguous(), weight, 1e-6)
    for width, routing in ROUTERS:
        x, weight = torch.zeros(4, width).bfloat16(), torch.zeros(routing.num_experts, width).bfloat16()
        bias = torch.zeros(routing.num_experts) if routing.scoring == "sigmoid" else None
        route(scores(x, weight, None), routing, bias)
    for rows in (4, 40):
        made = added_parts(torch.zeros(rows, 4096).bfloat16(), torch.zeros(2048, 4096).bfloat16())
    stream, weight = torch.zeros(40, 2048).bfloat16(), torch.zeros(2048).bfloat16()
    combine_norm(Parts(made, torch.ones(made.shape[:2])), stream, weight, 1e-6)
    spread_logits(torch.zeros(4, 32000).bfloat16(), torch.arange(32000), torch.zeros(128256, dtype=torch.int64))
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
