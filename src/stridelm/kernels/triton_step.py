"""The operations of a step on a GPU: a launch or a few each, of which none waits for the device, so that a CUDA graph
can capture them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from stridelm.kernels.layout import lay_out
from stridelm.kernels.lookup import followers
from stridelm.kernels.place import place, sources
from stridelm.kernels.step_ops import Move
from stridelm.kernels.triton_rows import Pools, compact
from stridelm.kernels.walk import advance


class TritonStepOps:
    lay_out = staticmethod(lay_out)
    place = staticmethod(place)
    sources = staticmethod(sources)
    advance = staticmethod(advance)
    followers = staticmethod(followers)

    def mover(self, tensors: Sequence[torch.Tensor]) -> Move:
        return partial(compact, Pools.of(tensors))
