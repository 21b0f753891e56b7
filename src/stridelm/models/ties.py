"""Whether two matrices that a config.json calls one are one: its files decide.

A config.json may say that embedding and output head share a matrix (`tie_word_embeddings`), and the modules of a
checkpoint may repeat matrices of the model. Files that store both are compared; where they differ, each is used.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from stridelm.models.files import DTYPES, read_headers, read_rows
from stridelm.models.layers.decoder import EMBEDDING, HEAD
from stridelm.models.layers.hf import TENSORS_UNDER, TIED_AS_HEAD

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**26
"""Of a matrix that is compared, at once."""


def settle_tie(config: Any, path: Path) -> None:
    """Make a transformers config say of embedding and head what the files in its directory hold: a head of its own, or
    the matrix of both under the head's name. Files that are absent or cannot be read are reported by what loads them.
    """
    if not config.tie_word_embeddings:
        return
    embedding = getattr(config, TENSORS_UNDER, "model.") + EMBEDDING
    try:
        config.tie_word_embeddings, tied_as_head = _tie(path, embedding, _changed(path))
    except ValueError as error:
        logger.debug("embedding and head of %s are not compared: %s", path, error)
    else:
        setattr(config, TIED_AS_HEAD, tied_as_head)


@lru_cache(maxsize=64)
def _tie(path: Path, embedding: str, changed: int) -> tuple[bool, bool]:
    """(whether embedding and head of a directory are one matrix, whether it has the head's name)."""
    names = dict(read_headers(path))
    if HEAD not in names:
        return True, False
    if embedding not in names:
        return True, True
    if same_matrix(path, embedding, path, HEAD):
        return True, False
    logger.warning(
        "%s: config.json says tie_word_embeddings, but %s differs from %s; the head in the files is used",
        path,
        HEAD,
        embedding,
    )
    return False, False


def same_matrix(path: Path, name: str, other_path: Path, other_name: str) -> bool:
    """Whether two tensors of safetensors directories hold the same numbers, in whatever dtypes. One in eight bits or in
    a pickle counts as another. Raises ValueError for files that cannot be read."""
    if not all(any(each.glob("*.safetensors")) for each in (path, other_path)):
        return False
    stamps = _changed(path), _changed(other_path)
    return _same(path, name, other_path, other_name, stamps)


@lru_cache(maxsize=64)
def _same(path: Path, name: str, other_path: Path, other_name: str, stamps: tuple[int, int]) -> bool:
    ours, theirs = dict(read_headers(path)).get(name), dict(read_headers(other_path)).get(other_name)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return False
    if not {ours.dtype, theirs.dtype} <= {*DTYPES.values()} or not ours.numel():
        return False
    step = max(1, PIECE_BYTES * len(ours) // max(ours.nbytes, theirs.nbytes))
    wide = torch.promote_types(ours.dtype, theirs.dtype)
    with torch.device("cpu"):  # also where a model is being described on the meta device
        return all(
            torch.equal(
                read_rows(path, name, start, start + step).to(wide),
                read_rows(other_path, other_name, start, start + step).to(wide),
            )
            for start in range(0, len(ours), step)
        )


def _changed(path: Path) -> int:
    """When a file in a directory was last changed."""
    return max((file.stat().st_mtime_ns for file in os.scandir(path)), default=0)
