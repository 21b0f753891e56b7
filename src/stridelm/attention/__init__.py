"""Attention backends by name. `reference` is plain torch, runs everywhere, and is the oracle for all others."""

from __future__ import annotations

from collections.abc import Callable

from stridelm.attention.base import AttentionBackend
from stridelm.registry import Registry

BACKENDS: Registry[Callable[[], AttentionBackend]] = Registry("attention backend")
BACKENDS.add("reference", "stridelm.attention.reference:ReferenceAttention")
