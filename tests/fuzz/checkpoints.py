"""Tiny checkpoints for cases, written once per process: every family, every head, with peaked and flat distributions.

A random head is hardly ever right. So some checkpoints are cyclic: layers add little, and the output head is the
embedding with its rows shifted by one token, so that each token has a successor; heads that read the last token's
embedding then know what comes next, so that paths of accepted drafts are tested too.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fuzz.cases import Checkpoint
from support.checkpoints import assistants, heads
from support.checkpoints.models import write
from support.checkpoints.speaking import byte_level
from support.oracles.models import VARIANTS

CYCLIC_SCALE = 1.5
"""Scale of the layers of a cyclic checkpoint: small against its embedding."""
WIDTHS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
STEP, SHARPNESS = 7, 12.0
"""How many ids further on a token's successor is; how much more peaked than usual the model is."""


@lru_cache(maxsize=1)
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="stride-fuzz-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@lru_cache(maxsize=4096)
def directory(checkpoint: Checkpoint) -> Path:
    """The checkpoint's directory."""
    path = _root() / str(len(list(_root().iterdir())))
    changes: dict[str, Any] = dict(VARIANTS.get(checkpoint.family, {}).get(checkpoint.variant, {}))
    changes |= {"vocab_size": checkpoint.vocab, "seed": checkpoint.seed}
    if checkpoint.widths:
        changes |= zip(WIDTHS, checkpoint.widths)
    changes["scale"] = CYCLIC_SCALE if checkpoint.cyclic else checkpoint.scale
    if checkpoint.modules:
        form, modules = checkpoint.modules[:-1], int(checkpoint.modules[-1])
        kind = None if form == "mimo" else checkpoint.family
        heads.write_mtp(path, form, modules, model_type=kind, **changes)  # type: ignore[arg-type]
    else:
        write(path, checkpoint.family, **changes)
    if checkpoint.cyclic:
        _edit(path, lambda tensors: _turn(tensors, checkpoint))
    if checkpoint.speaks:
        byte_level().save_pretrained(path)
    return path


@lru_cache(maxsize=4096)
def head_directories(checkpoint: Checkpoint) -> list[str]:
    """Directories of the drafters' weights."""
    target = directory(checkpoint)
    return [str(_head(Path(f"{target}-{name}"), target, name, checkpoint)) for name in checkpoint.heads]


def _head(path: Path, target: Path, name: str, checkpoint: Checkpoint) -> Path:
    scale = CYCLIC_SCALE if checkpoint.cyclic else checkpoint.scale
    if name == "modules":
        heads.write_modules(path, target, scale=scale)
    elif name == "assistant":
        assert assistants.write_assistant(path, target, scale=scale) is not None
    elif name == "medusa":
        heads.write_medusa(path, target, scale=scale)
    elif name == "model":
        heads.write_akin(path, target, noise=0.02 if checkpoint.seed % 2 else 0.2)
        if checkpoint.speaks:  # the same tokenizer, which a draft model is required to have
            byte_level().save_pretrained(path)
    else:
        vocab = None if name == "eagle1" else max(4, checkpoint.vocab * 5 // 8)
        heads.write_eagle(path, target, name, draft_vocab=vocab, scale=scale)  # type: ignore[arg-type]
    if checkpoint.cyclic and name in ("modules", "medusa", "eagle1"):
        embedding = heads.tensors_of(target)["model.embed_tokens.weight"]
        _edit(path, lambda tensors: _teach(tensors, embedding))
    return path


def _edit(path: Path, change: Any) -> None:
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})


def _turn(tensors: dict[str, torch.Tensor], checkpoint: Checkpoint) -> None:
    """Make the target cyclic, and make modules shipped with it read only the last token."""
    generator = torch.Generator().manual_seed(checkpoint.seed)
    shape = tensors["model.embed_tokens.weight"].shape
    embedding = torch.randn(shape, generator=generator)
    tensors["model.embed_tokens.weight"] = embedding
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = SHARPNESS / shape[1] * embedding.roll(STEP, 0)
    _teach(tensors, embedding)


def _teach(tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
    """Make heads read the token alone: projections take only its half, and Medusa's heads step on from it."""
    width = embedding.shape[1]
    for name, tensor in tensors.items():
        if name.endswith(("eh_proj.weight", "input_proj.weight", "fc.weight")) and tensor.shape[1] == 2 * width:
            zero, one = torch.zeros(width, width), torch.eye(width)
            tensors[name] = torch.cat((zero, one) if "input_proj" in name else (one, zero), 1)
        elif name[0].isdigit() and tensor.shape == embedding.shape:
            tensors[name] = SHARPNESS / width * embedding.roll(STEP * (2 + int(name[0])), 0)
