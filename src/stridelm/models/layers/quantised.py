"""Quantised weights: which formats can be read, told by what a checkpoint says about itself, before any weight is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REMEDY = "give the checkpoint that they were quantised from"
DETAILS = ("quant_algo", "format", "fmt", "bnb_4bit_quant_type", "bits")
"""Fields of a description that tell formats of one method apart."""


def refuse_unread(stated: Any, source: str, methods: Sequence[str] = ()) -> None:
    """Raise ValueError, with the format's name, if a description of weights is of one that cannot be read.

    source: whose weights they are, for the message. methods: values of `quant_method` that can be read.
    """
    if not stated:
        return
    known = stated if isinstance(stated, Mapping) else {}
    method = known.get("quant_method")
    if method in methods:
        return
    details = [f"{name} {known[name]}" for name in DETAILS if known.get(name) is not None]
    name = f"{method or 'a method without a name'}{f' ({details[0]})' if details else ''}"
    supported = f" (supported: {', '.join(methods)})" if methods else ""
    raise ValueError(f"the weights of {source} are quantised by {name}, which cannot be read{supported}; {REMEDY}")
