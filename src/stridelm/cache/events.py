"""The prefix cache's gains and losses, in the form of vLLM's KV events (vllm/distributed/kv_events.py, 0.33).

The events are those of one page group: the one with full attention, if there is one, since no cached prefix is longer
than what that holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from stridelm.cache.prefix import root_of
from stridelm.types import Request

MEDIUM = "GPU"  # vLLM's word for the memory that the engine itself reads, whatever the device


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive pages that can be found from now on. Fields without a default are always encoded."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """The hash of the page before them; None if they begin a prefix."""
    token_ids: list[int]
    """`block_size` for each of them."""
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[list[str] | None] | None = None
    """A list per page of what is hashed besides tokens: for the first page of a salted prefix, a digest of the client's
    own salt. Its tenant, which is in the hash too, is left out: routers look a prefix up by its tokens."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Pages that can no longer be found."""

    block_hashes: list[bytes]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No page can be found."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class CacheEvents:
    """Collects events until they are taken. The ledger calls it as its pages change."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._stored: set[bytes] = set()
        """Names of the pages that can be found."""
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken

    def stored(self, request: Request, names: Sequence[bytes], begin: int, end: int, tokens: Sequence[int]) -> None:
        """The request has named its pages from number `begin` up to `end`; some may have been stored by another.

        names: of its pages from the first on. tokens: its own, likewise.
        """
        salt = request.params.cache_salt
        if salt is not None:  # a client with a key has its tenant in front (server/engine_client.py)
            salt = salt.removeprefix(f"{request.tenant}:") or None
        for known, pages in groupby(range(begin, end), lambda index: names[index] in self._stored):
            if not known:
                first, *more = pages
                self._add(names, first, first + len(more) + 1, tokens, salt)

    def _add(self, names: Sequence[bytes], first: int, end: int, tokens: Sequence[int], salt: str | None) -> None:
        self._stored.update(names[first:end])
        keys: list[list[str] | None] | None = None
        if salt is not None and first == 0:
            keys = [[root_of(salt).hex()], *[None] * (end - 1)]
        self._events.append(
            BlockStored(
                block_hashes=list(names[first:end]),
                parent_block_hash=names[first - 1] if first else None,
                token_ids=list(tokens[first * self._page_size : end * self._page_size]),
                block_size=self._page_size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=keys,
            )
        )

    def removed(self, digest: bytes) -> None:
        """A page can no longer be found by this hash, which may be one under which only drafters' requests find it."""
        if digest not in self._stored:
            return
        self._stored.remove(digest)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(digest)
        else:
            self._events.append(BlockRemoved([digest], MEDIUM))

    def cleared(self) -> None:
        """Nothing is cached any more. What was not taken yet says nothing then."""
        self._stored.clear()
        self._events = [AllBlocksCleared()]
