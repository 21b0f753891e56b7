"""What a launch must know about the device it runs on."""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has. On a CPU (Triton's interpreter) launches are planned as for an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of it that a program may have; on a CPU as on an H200."""
    if device.type != "cuda":
        return 227 << 10
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])
