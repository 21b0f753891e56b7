"""Attention backends by name. `reference` runs everywhere and is the oracle for all others; `host` is for CPUs,
`triton` for GPUs, and `flashinfer` for GPUs where it is installed."""

from __future__ import annotations

from importlib.util import find_spec

from stridelm.attention.base import AttentionBackend
from stridelm.registry import Registry

BACKENDS: Registry[type[AttentionBackend]] = Registry("attention backend")
BACKENDS.add("reference", "stridelm.attention.reference:ReferenceAttention")
BACKENDS.add("host", "stridelm.attention.host:HostAttention")
MADE_FOR = {"cpu": "host", "cuda": "triton"}
"""Device type -> the backend made for it, if it is registered: listed here, so that choosing one imports no other."""
if find_spec("triton"):  # torch installs it along with CUDA
    BACKENDS.add("triton", "stridelm.attention.triton:TritonAttention")
if find_spec("flashinfer"):  # the extra `flashinfer`
    BACKENDS.add("flashinfer", "stridelm.attention.flash_infer:FlashInferAttention")
