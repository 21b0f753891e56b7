"""Attention backends by name. `reference` runs everywhere and is the oracle for all others; `host` is for CPUs."""

from __future__ import annotations

from stridelm.attention.base import AttentionBackend
from stridelm.registry import Registry

BACKENDS: Registry[type[AttentionBackend]] = Registry("attention backend")
BACKENDS.add("reference", "stridelm.attention.reference:ReferenceAttention")
BACKENDS.add("host", "stridelm.attention.host:HostAttention")
