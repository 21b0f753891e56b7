"""Row operations, attention and a step's other operations, in the fastest form that a device has.

`ops.py` defines the row operations; `plain.py` implements them in torch, as the reference that every other
implementation is tested against and that training differentiates. `host/` compiles them for a CPU, `triton_rows.py` for
a GPU. `step_ops.py`, `plain_step.py`, `host/step.py` and `triton_step.py` do the same for a step's other operations.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from stridelm.kernels.ops import Ops
from stridelm.kernels.step_ops import StepOps
from stridelm.registry import Registry

OPS: Registry[type[Ops]] = Registry("kernel set")
OPS.add("plain", "stridelm.kernels.plain:PlainOps")
OPS.add("host", "stridelm.kernels.host.ops:HostOps")
MADE_FOR = {"cpu": "host", "cuda": "triton"}
"""Device type -> the set made for it, if it is registered. Listed here so that choosing one imports no other."""
STEP_OPS: Registry[type[StepOps]] = Registry("set of step operations")
STEP_OPS.add("plain", "stridelm.kernels.plain_step:PlainStepOps")
STEP_OPS.add("host", "stridelm.kernels.host.step:HostStepOps")
if find_spec("triton"):  # a dependency of torch's CUDA builds
    OPS.add("triton", "stridelm.kernels.triton_rows:TritonOps")
    STEP_OPS.add("triton", "stridelm.kernels.triton_step:TritonStepOps")


def ops_for(device: torch.device, dtype: torch.dtype) -> Ops:
    """The set made for a device, if it supports the dtype; else the plain one."""
    name = MADE_FOR.get(device.type, "plain")
    return OPS.get(name if name in OPS and dtype in OPS.get(name).dtypes else "plain")()


def step_ops_for(device: torch.device) -> StepOps:
    """The set made for a device, if there is one; else the plain one."""
    name = MADE_FOR.get(device.type, "plain")
    return STEP_OPS.get(name if name in STEP_OPS else "plain")()
