"""Which products of a library give our kernel's bits: each is tried once, and counts as other bits until then."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from stridelm.kernels.ahead import only_compiles

_AGREED: dict[Hashable, bool] = {}


def agree(key: Hashable, both: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether both products have the same bits, as was seen at the first call with this key, which says what is
    multiplied.

    Nothing can be tried while a graph is being captured, kernels are only compiled, or there is no memory for it.
    """
    if key not in _AGREED:
        if only_compiles() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return False
        try:
            _AGREED[key] = torch.equal(*both())
        except torch.OutOfMemoryError:
            return False
    return _AGREED[key]
