"""Train the tokenizer of a small model and store a corpus as the flat token file that training reads.

A model of a few million parameters can only afford a few thousand tokens, so every one has to count. The
pre-tokenisation below is shaped for source code: a line break and the indentation after it are one unit,
names keep the character that leads into them (`.append`, `_size`, ` self`), and numbers fall into at most
three digits.

Ids 0..255 are the bytes, then come the merges, and the special tokens are the LAST ids of the vocabulary.
Text that happens to spell a special token (corpora about language models are full of them) is encoded as
ordinary text when a token file is written, so a special id in the file always means what it says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from rich.progress import Progress
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from stridelm.train.corpus import Document

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"  # ends a document; also bos and pad
MASK = "<|mask|>"  # stands for a position still to be predicted; never occurs in data
#: The special tokens in id order. Everything after the mask is reserved, so later uses need no new tokenizer.
SPECIAL_TOKENS = (
    END_OF_TEXT,
    MASK,
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|reserved_{number}|>" for number in range(4)),
)

#: How text is cut before merging; a token never spans two pieces. In order: `__dunder__` names; words with
#: one leading symbol or space; up to three digits; other symbols; a line end with the indentation after it;
#: spaces. A line end is never glued to the symbol before it ("):\\n"): that would save 4 % of the tokens, but
#: a prompt that stops at "def f(x):" would then end on a token that training text rarely continues from.
PATTERN = (
    r"[^\r\n\p{L}\p{N}_]?__\p{L}+(?:_\p{L}+)*__"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[ \t]*(?:\r?\n)+[ \t]*"
    r"|\s+(?!\S)|\s+"
)

_LONGEST_TOKEN = 32  # characters; longer ones would only be comment rulers
_CHUNK = 256  # documents encoded at a time: enough to keep the tokenizer's threads busy, and little memory


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 4096,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    *,
    progress: bool = False,
) -> Tokenizer:
    """Train a byte-level BPE tokenizer of exactly `vocab_size` tokens, the special ones included (as last
    ids).

    It adds no prefix space and no tokens of its own, and decodes every string to exactly what was encoded.
    Raises ValueError if `vocab_size` leaves no room for merges, a special token is repeated, or the texts are
    too few to fill the vocabulary.
    """
    merged_size = vocab_size - len(special_tokens)
    if merged_size <= 256:
        raise ValueError(
            f"vocab_size {vocab_size} cannot hold 256 bytes, {len(special_tokens)} special tokens and any "
            f"merge; use at least {257 + len(special_tokens)}"
        )
    if len(set(special_tokens)) != len(special_tokens):
        raise ValueError(f"special_tokens repeats a token: {list(special_tokens)}; give each once")
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=merged_size,
        min_frequency=2,
        # All bytes, seen or not: otherwise unseen ones would be dropped silently.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=_LONGEST_TOKEN,
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    if reached < merged_size:
        raise ValueError(
            f"the texts only yield {reached + len(special_tokens)} of {vocab_size} tokens; "
            f"give more text or ask for vocab_size={reached + len(special_tokens)}"
        )
    # Added after training: the trainer itself would put them first.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer


def sample_texts(documents: Sequence[Document], max_bytes: int, seed: int = 0) -> list[str]:
    """Texts of randomly chosen documents, at most `max_bytes` of UTF-8 in total: merges settle long before a whole
    corpus is read, and training the tokenizer takes time and memory in proportion."""
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    texts = []
    for document in shuffled:
        max_bytes -= len(document.text.encode())
        if max_bytes < 0:
            break
        texts.append(document.text)
    return texts


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str], context: int = 2048) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` for
    `transformers.AutoTokenizer.from_pretrained(folder)`.

    `context` is the model's context in tokens. `<|endoftext|>` becomes eos, bos and pad, `<|mask|>` the mask
    token. Raises ValueError if the tokenizer lacks either.
    """
    special = [token for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    contents = [token.content for token in special]
    if END_OF_TEXT not in contents or MASK not in contents:
        raise ValueError(f"the tokenizer needs {END_OF_TEXT} and {MASK} among its special tokens; it has {contents}")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "additional_special_tokens": [token for token in contents if token not in (END_OF_TEXT, MASK)],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 (hex) of the tokenizer's definition, by which token files made with another tokenizer are recognised."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


@dataclass(frozen=True)
class TokenFileInfo:
    """The contents of the `.json` beside a token file. `bytes` counts UTF-8 text without the separators, `tokens`
    everything in the file; `separator` is the id that ends every document; `dtype` is a numpy name."""

    tokens: int
    documents: int
    bytes: int
    dtype: str
    separator: int
    vocab_size: int
    tokenizer: str


def encode_documents(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    path: str | os.PathLike[str],
    *,
    progress: bool = True,
) -> TokenFileInfo:
    """Write all documents, each followed by `<|endoftext|>`, as one flat array of token ids at `path`.

    uint16, or uint32 for a vocabulary beyond 65,536; little-endian, no header; the counts go beside it under
    the same name with the suffix `.json`. An interrupted run leaves neither. Raises ValueError if there is
    nothing to write or the tokenizer has no `<|endoftext|>`.
    """
    separator = tokenizer.token_to_id(END_OF_TEXT)
    if separator is None:
        raise ValueError(f"the tokenizer has no {END_OF_TEXT} token to put between documents; add it and retry")
    if not documents:
        raise ValueError("no documents to encode; check the filters of the corpus")
    path = Path(path)
    if path.suffix == ".json":
        raise ValueError(f"{path} would be overwritten by its own description; use another suffix such as .bin")
    path.parent.mkdir(parents=True, exist_ok=True)
    vocab_size = tokenizer.get_vocab_size()
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    identity = tokenizer_hash(tokenizer)
    partial = path.with_name(path.name + ".partial")
    tokens = 0
    try:
        with partial.open("wb") as stream:
            for ids in _encoded(tokenizer, documents, progress):
                np.array([*ids, separator], dtype=dtype).tofile(stream)
                tokens += len(ids) + 1
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    size = sum(len(document.text.encode()) for document in documents)
    info = TokenFileInfo(tokens, len(documents), size, dtype.name, separator, vocab_size, identity)
    partial.replace(path)
    path.with_suffix(".json").write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    logger.info("%s: %d documents, %d tokens, %.3f bytes per token", path, len(documents), tokens, size / tokens)
    return info


def _encoded(tokenizer: Tokenizer, documents: Sequence[Document], progress: bool) -> Iterable[list[int]]:
    """Token ids of each document, with text that spells a special token taken literally."""
    previous = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("tokenizing", total=len(documents))
            texts = (document.text for document in documents)
            while chunk := list(islice(texts, _CHUNK)):
                for encoding in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
                    yield encoding.ids
                bar.advance(task, len(chunk))
    finally:
        tokenizer.encode_special_tokens = previous


class TokenFile:
    """A token file written by `encode_documents`, mapped into memory rather than read.

    Raises ValueError if the file or its description is missing, or they do not belong together.
    """

    def __init__(self, path: str | os.PathLike[str], tokenizer: Tokenizer | None = None) -> None:
        """Open `path`; with `tokenizer`, also require that the file was made with it."""
        self.path = Path(path)
        description = self.path.with_suffix(".json")
        for file in (self.path, description):
            if not file.is_file():
                raise ValueError(f"no such file: {file}; write it with encode_documents")
        try:
            self.info = TokenFileInfo(**json.loads(description.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{description} does not describe a token file ({error}); encode it again") from error
        expected = self.info.tokens * np.dtype(self.info.dtype).itemsize
        if self.path.stat().st_size != expected:
            size = self.path.stat().st_size
            raise ValueError(f"{self.path} has {size} bytes, but its .json describes {expected}; encode it again")
        if tokenizer is not None and tokenizer_hash(tokenizer) != self.info.tokenizer:
            raise ValueError(f"{self.path} was written with another tokenizer; encode the documents again")

    @property
    def tokens(self) -> np.memmap:
        """All token ids in order, read-only: shape [tokens], uint16 or uint32."""
        dtype = np.dtype(self.info.dtype).newbyteorder("<")
        return np.memmap(self.path, dtype=dtype, mode="r", shape=(self.info.tokens,))

    @property
    def bytes_per_token(self) -> float:
        """Text bytes per token of the file, separators counted: nats per token / this = nats per byte."""
        return self.info.bytes / self.info.tokens

    def __len__(self) -> int:
        return self.info.tokens
