"""What a launch must know of the device it runs on."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """How many there are. The interpreter, on a CPU, plans as if it were an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
