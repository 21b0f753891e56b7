"""The checkpoint under load: Llama-3.1-8B's shape without weights, or the built-in model where there is no GPU."""

from __future__ import annotations

import itertools
import json
import shutil
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_decode import speculation
from model_shapes import SHAPES, ModelShape, write_eagle3

from stridelm.builtin import builtin_path
from stridelm.params import Speculation

MASK_TOKEN_ID = 5
LIMITS: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_model_len": 8192, "enable_prefix_caching": False}
"""How every engine and server runs, besides how many requests at once."""
TINY_LIMITS: dict[str, Any] = {**LIMITS, "max_num_batched_tokens": 1024, "max_model_len": 2048}


def engine_options(folder: Path, decodings: Sequence[str], layers: int, *, tiny: bool) -> dict[str, Any]:
    """Options of an engine or server that decodes in these ways, and what it loads, written into the folder."""
    if tiny:
        return dict(TINY_LIMITS)
    return {**LIMITS, **write_model(folder, decodings, layers), "mask_token_id": MASK_TOKEN_ID}


def speculation_options(decoding: str) -> dict[str, Any]:
    """Options of an engine whose requests are decoded in this way unless they ask for another."""
    asked = speculation(decoding)
    asked = Speculation(drafter="none") if isinstance(asked, str) else asked
    depth = "auto" if asked.adaptive else asked.depth
    return {"drafter": asked.drafter or "none", "depth": depth, "acceptance": asked.rule}


def write_model(
    folder: Path, decodings: Iterable[str], layers: int, shape: ModelShape = SHAPES["llama-3.1-8b"]
) -> dict[str, Any]:
    """A checkpoint without weights, with a tokenizer, and the head that these ways of decoding need. Returns the
    options with which an engine runs both."""
    model = folder / "model"
    shape.write(model, layers)
    write_tokenizer(model, shape.config["vocab_size"])
    options = {"model": str(model), "load_format": "dummy", "dtype": "bfloat16", "device": "cuda"}
    if any(decoding.startswith("eagle") for decoding in decodings):
        options["drafter_model"] = str(write_eagle3(folder / "eagle3", layers, shape.config))
    return options


def write_tokenizer(folder: Path, vocab: int) -> None:
    """The built-in model's tokenizer with made-up words for the rest of a vocabulary, so that every id has a text."""
    source = builtin_path()
    shutil.copy(source / "tokenizer_config.json", folder)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    first = len(known) + len(tokenizer["added_tokens"])
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    made_up = (word for word in map("".join, letters) if word not in known)
    known |= dict(zip(made_up, range(first, vocab)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
