"""Options of trusted windows (rule.py)."""

from __future__ import annotations

from dataclasses import dataclass

from stridelm.options import Options
from stridelm.values import option


@dataclass(frozen=True)
class TrustOptions(Options):
    """Without `confidence`, whole windows are emitted."""

    confidence: float | None = option(
        None,
        "with trust: emit only leading tokens whose max softmax is at least this",
        low=0.0,
        high=1.0,
        open_low=True,
    )
