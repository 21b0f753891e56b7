"""From a directory of text to token files: makes the tokenizer, the split and the encoding as far as they do not exist
yet."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from stridelm.train.corpus import DUPLICATE_CONTAINMENT, Document, read_documents, split
from stridelm.train.settings import DataSettings
from stridelm.train.tokens import (
    MASK,
    TokenFile,
    encode_documents,
    sample_texts,
    save_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)

logger = logging.getLogger(__name__)

TOKENIZER_BYTES = 60_000_000
"""Bytes of text on which a new tokenizer is trained."""


@dataclass(frozen=True)
class Prepared:
    """Two token files and the tokenizer that wrote them."""

    train: TokenFile
    valid: TokenFile
    tokenizer_dir: Path
    tokenizer: Tokenizer

    @property
    def eos_id(self) -> int:
        return self.train.info.separator

    @property
    def mask_id(self) -> int:
        """Raises ValueError if the tokenizer has no mask token."""
        mask = self.tokenizer.token_to_id(MASK)
        if mask is None:
            raise ValueError(f"the tokenizer in {self.tokenizer_dir} has no {MASK} token; train one with this command")
        return int(mask)


def prepare(
    data: Path, work: Path, tokenizer_dir: Path | None, settings: DataSettings, context: int, seed: int
) -> Prepared:
    """Token files for `data`, stored in `work` and reused from there.

    data: token files (train.bin, valid.bin and their .json), or text already split into train/ and valid/, or a folder
    of text from which whole packages (folders directly under it) are held out. Raises ValueError for data that is none
    of these, and for a tokenizer that does not fit.
    """
    if not data.is_dir():
        raise ValueError(f"no such directory: {data}; give a folder of text, or one with train.bin and valid.bin")
    encoded = (data / "train.bin").is_file()
    if encoded:
        tokenizer_dir = tokenizer_dir or data / "tokenizer"
    elif not (work / "train.bin").is_file() or not (work / "valid.bin").is_file():
        tokenizer_dir = _encode(data, work, tokenizer_dir, settings, context, seed)
    tokenizer_dir = tokenizer_dir or work / "tokenizer"
    tokenizer, folder = load_tokenizer(tokenizer_dir), data if encoded else work
    return Prepared(
        TokenFile(folder / "train.bin", tokenizer),
        TokenFile(folder / "valid.bin", tokenizer),
        tokenizer_dir,
        tokenizer,
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """tokenizer.json of a directory. Raises ValueError if it is not there."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"no {file}; give the tokenizer's directory with --tokenizer")
    return Tokenizer.from_file(str(file))


def _encode(
    data: Path, work: Path, tokenizer_dir: Path | None, settings: DataSettings, context: int, seed: int
) -> Path:
    train, valid = _documents(data, settings, seed)
    if tokenizer_dir is None:
        tokenizer_dir = work / "tokenizer"
        logger.info("training a tokenizer of %d tokens", settings.vocab_size)
        tokenizer = train_tokenizer(sample_texts(train, TOKENIZER_BYTES, seed), settings.vocab_size)
        save_tokenizer(tokenizer, tokenizer_dir, context)
    tokenizer = load_tokenizer(tokenizer_dir)
    for name, documents in (("train", train), ("valid", valid)):
        encode_documents(tokenizer, documents, work / f"{name}.bin", progress=False)
    return tokenizer_dir


def _documents(data: Path, settings: DataSettings, seed: int) -> tuple[list[Document], list[Document]]:
    suffixes = [suffix.strip() for suffix in settings.suffixes.split(",") if suffix.strip()]
    if (data / "train").is_dir() and (data / "valid").is_dir():
        return read_as_is(data / "train", suffixes), read_as_is(data / "valid", suffixes)
    containment = DUPLICATE_CONTAINMENT if settings.near_duplicates else None
    documents = read_documents(data, suffixes, near_duplicates=containment)
    try:
        held_out: float | list[str] = float(settings.held_out)
    except ValueError:
        held_out = [name.strip() for name in settings.held_out.split(",") if name.strip()]
    return split(documents, held_out, seed)


def read_as_is(root: Path, suffixes: Sequence[str]) -> list[Document]:
    """Every file below `root` with one of the suffixes, sorted and unfiltered: this text has already been cleaned and
    split.

    Raises ValueError if there is none.
    """
    paths = sorted(path for path in root.rglob("*") if path.name.endswith(tuple(suffixes)) and path.is_file())
    if not paths:
        raise ValueError(f"no {' or '.join(suffixes)} file under {root}; pass --suffixes")
    named = [(path, path.relative_to(root)) for path in paths]
    return [
        Document(name.parts[0], name.as_posix(), path.read_text(encoding="utf-8", errors="replace"))
        for path, name in named
    ]


def on_device(tokens: TokenFile, device: torch.device) -> torch.Tensor:
    """The whole stream as int32 on the training device, where gathering windows is cheapest."""
    return torch.from_numpy(np.asarray(tokens.tokens).astype(np.int32)).to(device)


def data_facts(prepared: Prepared) -> dict[str, object]:
    """What identifies the data, for a provenance record."""
    return {
        side: {
            "tokens": len(file),
            "documents": file.info.documents,
            "bytes": file.info.bytes,
            "sha256": hashlib.sha256(np.asarray(file.tokens).tobytes()).hexdigest(),
        }
        for side, file in (("train", prepared.train), ("valid", prepared.valid))
    } | {
        "tokenizer": tokenizer_hash(prepared.tokenizer),
        "bytes_per_token": round(prepared.train.bytes_per_token, 4),
    }
