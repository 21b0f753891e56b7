"""Compiles kernels that write and read KV for an H100 that is not there, and prints as JSON what they became: those for
KV in eight bits, or those of plans that say how many programs a processor has room for.

Run as a process of its own, since it changes Triton for good: python -m support.checks.kv_compiles eight|planned
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stridelm.attention import paged_step
from stridelm.attention.triton import TritonHeads
from stridelm.attention.triton_latents import TritonLatents
from stridelm.cache.layout import FULL, HeadsKV, LatentKV, LayerState
from stridelm.kernels import attention_plan
from stridelm.kernels.ops import LatentRope, QKRope
from stridelm.kernels.triton_rows import TritonOps
from support.checks.before_waiting import known_of
from support.doubles.absent_gpu import Driver, registers, stack_bytes

FOUND: list[dict[str, Any]] = []
CASE: dict[str, Any] = {}
"""What is compiled, of which all that is found says so."""
STATES = (HeadsKV.of(32, 8, 128), LatentKV(FULL, None, 16, 512, 64, 0.07))
PLANNED = HeadsKV.of(32, 8, 128), HeadsKV.of(32, 4, 128, window=100), HeadsKV.of(16, 16, 64), HeadsKV.of(8, 4, 256)
"""Whose programs on a processor are compared with those that plans count on."""
STACKS: list[attention_plan.Stack] = []
"""Of what is compiled, if it is one of those."""
ROWS, LENGTH = 3, 64
CPU = torch.device("cpu")


def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
    def launch(*args: Any, **options: Any) -> None:
        made = kernel.warmup(*args, grid=grid, **{**options, "DEPENDENT": True, "launch_pdl": True})
        code = made.asm["ptx"]
        FOUND.append(
            {
                **CASE,
                **known_of(kernel, made),
                "shared": made.metadata.shared,
                "dtype": str(next((each.dtype for each in args if isinstance(each, torch.Tensor)), None)),
                "conversions": len(re.findall(r"cvt\S*e4m3x2", code)),
                "wgmma": len(re.findall(r"wgmma\.mma_async", code)),
                "stack": stack_bytes(made.asm["cubin"]),
            }
        )
        if STACKS and kernel.__name__ == "attend":
            FOUND[-1].update(_resident(made, options))

    return launch


def _resident(made: Any, options: dict[str, Any]) -> dict[str, Any]:
    """How many programs run at once on a processor of Hopper, and how many plans count on."""
    threads = 32 * options["num_warps"]
    fit = min(65536 // (registers(made.asm["cubin"]) * threads), (228 << 10) // (made.metadata.shared + 1024))
    shape = attention_plan.Shape(options["BLOCK_M"], options["BLOCK_B"], options["num_warps"], options["num_stages"])
    return {"keys": shape.keys, "shared_keys": options["PARTIAL"], "fit": fit, "counted": STACKS[0].resident(shape)}


def ends(stack: attention_plan.Stack, device: torch.device) -> list[tuple[int, attention_plan.Shape, int]]:
    """The forms of the lowest and of the highest tiles: the others are between them."""
    found = list(attention_plan.forms(stack, device))
    return [*found[:2], *found[-2:]]


def compile_all(state: LayerState, dtype: torch.dtype, deterministic: bool) -> None:
    kind = TritonLatents if isinstance(state, LatentKV) else TritonHeads
    CASE.update(kind=kind.__name__, deterministic=deterministic)
    kind.warm_up(state, dtype, deterministic, 16, CPU)  # type: ignore[arg-type]
    if deterministic:  # rows are written alike
        return
    pool = {name: torch.zeros(16, *shape, dtype=state.stored) for name, shape in state.tensors().items()}
    place = torch.arange(ROWS)
    if isinstance(state, LatentKV):
        angles = torch.zeros(LENGTH, state.rope_dim // 2)
        rope = LatentRope(place, angles, angles, torch.ones(state.rank).to(dtype), 1e-6, True)
        queries = torch.zeros(ROWS, state.heads, state.rope_dim).to(dtype)
        rows = torch.zeros(ROWS, state.rank + state.rope_dim).to(dtype)
        TritonOps().rope_and_store_latent(queries, rows, rope, pool["latents"], place, 0.5)
    else:
        assert isinstance(state, HeadsKV)
        angles = torch.zeros(LENGTH, state.key_dim // 2)
        qkv = torch.zeros(ROWS, state.heads + 2 * state.kv_heads, state.key_dim).to(dtype)
        turn = QKRope(state.heads, state.kv_heads, place, angles, angles)
        TritonOps().rope_and_store(qkv, turn, pool["keys"], pool["values"], place, 0.5, 0.5)


def main() -> None:
    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only
    with patch.object(attention_plan, "multiprocessors", lambda device: 132):
        {"eight": compile_eight, "planned": compile_planned}[sys.argv[1]]()
    print(json.dumps(FOUND))


def compile_eight() -> None:
    with patch.object(paged_step, "forms", ends):
        for state in STATES:
            for deterministic in (False, True):
                compile_all(state.in_eight_bits(1.0, 1.0), torch.bfloat16, deterministic)
        for dtype in (torch.float16, torch.float32):
            compile_all(STATES[0].in_eight_bits(1.0, 1.0), dtype, False)


def compile_planned() -> None:
    for state in PLANNED:
        STACKS[:] = [paged_step.stack_of(state, torch.bfloat16, False)]
        TritonHeads.warm_up(state, torch.bfloat16, False, 16, CPU)


if __name__ == "__main__":
    main()
