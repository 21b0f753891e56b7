"""Triton's interpreter, which runs kernels on a CPU when TRITON_INTERPRET=1 is set before triton is imported."""

from __future__ import annotations

import contextlib
import os
from typing import Any


def _teach_numpy() -> None:
    """Triton up to 3.6 turns its scalars, arrays of one element, into loop bounds by int(), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):  # the tests say themselves that there is no triton
        _teach_numpy()
