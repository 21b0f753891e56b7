"""What a launch must know about the device it runs on."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has. On a CPU (Triton's interpreter) launches are planned as for an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
