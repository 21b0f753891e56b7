"""Whether two checkpoints use the same ids for the same tokens."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from stridelm.text.pointers import refuse_pointer

FILE = "tokenizer.json"


@lru_cache(maxsize=64)
def difference(ours: Path, theirs: Path) -> str | None:
    """The first token, by id, that two directories' tokenizers do not share; None if they share all, or if one of the
    directories has no tokenizer.json.

    Special tokens are left out: fine-tuned models often rename them. Raises ValueError for a file that cannot be read.
    """
    if not (ours / FILE).is_file() or not (theirs / FILE).is_file():
        return None
    (our_names, our_special), (their_names, their_special) = _tokens(ours / FILE), _tokens(theirs / FILE)
    ordinary = (our_names.keys() | their_names.keys()) - our_special - their_special
    wrong = [id for id in ordinary if our_names.get(id) != their_names.get(id)]
    if not wrong:
        return None
    first = min(wrong)
    return f"token {first} is {_shown(our_names.get(first))} in {ours} and {_shown(their_names.get(first))} in {theirs}"


def _shown(name: str | None) -> str:
    return "none" if name is None else repr(name)


def _tokens(file: Path) -> tuple[dict[int, str], frozenset[int]]:
    """(id -> token, ids of special tokens)."""
    refuse_pointer(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        added: list[dict[str, Any]] = content.get("added_tokens") or []
        vocab = content["model"]["vocab"]
        # Unigram models list (token, score); all others map tokens to ids.
        named = (
            {id: name for name, id in vocab.items()}
            if isinstance(vocab, dict)
            else dict(enumerate(n for n, _ in vocab))
        )
        named |= {token["id"]: token["content"] for token in added}
        special = frozenset(token["id"] for token in added if token.get("special"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); copy it from the model again") from error
    return named, special
