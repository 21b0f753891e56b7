"""Names for full pages: a hash chain over tokens, so that equal prefixes, and only those, have equal names.

A salt is hashed before the first token, so that requests with another salt find none of the pages, even for equal
tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT = b""
"""What the first page's name is chained to."""


def chain(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The 128-bit name of a page with these tokens that follows the page named `previous`."""
    return blake2b(array("q", tokens).tobytes(), digest_size=16, key=previous).digest()


def followed(name: bytes, draft_kv: str, behind: Sequence[int]) -> bytes:
    """The name of a page that also holds a drafter's KV, which depends on the tokens after the page (`behind`) too."""
    return blake2b(draft_kv.encode() + array("q", behind).tobytes(), digest_size=16, key=name).digest()


def root_of(salt: str | None) -> bytes:
    """What the first page's name is chained to for requests with this salt."""
    return ROOT if salt is None else blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def extend(names: list[bytes], tokens: Sequence[int], page_size: int, salt: str | None = None) -> None:
    """Add to `names` the names of all full pages of `tokens` that it does not have yet."""
    for page in range(len(names), len(tokens) // page_size):
        previous = names[-1] if names else root_of(salt)
        names.append(chain(previous, tokens[page * page_size : (page + 1) * page_size]))
