"""Who follows the prefix cache's events knows what is cached, and no more than that."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stridelm.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvents, Event
from stridelm.cache.ledger import Ledger
from stridelm.cache.prefix import extend
from stridelm.params import SamplingParams, Speculation
from stridelm.types import DraftKV, Request, Span


class Follower:
    """Indexes pages by their parent and their tokens, as routers do, which hash tokens in their own way."""

    def __init__(self) -> None:
        self._pages: dict[bytes, tuple[bytes | None, tuple[int, ...], str | None]] = {}

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._pages.clear()
            elif isinstance(event, BlockRemoved):
                for digest in event.block_hashes:
                    del self._pages[digest]
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        keys = event.extra_keys or [None] * len(event.block_hashes)
        for index, (digest, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
            assert digest not in self._pages
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            self._pages[digest] = parent, tokens, key[0] if key else None
            parent = digest

    def cached(self, tokens: list[int], size: int) -> int:
        """Tokens of the longest cached prefix without a salt; one token is always left."""
        known = {(parent, page): digest for digest, (parent, page, key) in self._pages.items() if key is None}
        parent, length = None, 0
        while length + size < len(tokens):
            found = known.get((parent, tuple(tokens[length : length + size])))
            if found is None:
                break
            parent, length = found, length + size
        return length


def request(name: str, prompt: list[int], salt: str | None = None) -> Request:
    return Request(name, prompt, SamplingParams(cache_salt=salt), Speculation())


def run(ledger: Ledger, one: Request) -> None:
    """Compute all its known tokens."""
    ledger.admit(one)
    with ledger.reserve([Span(one, one.computed, one.known - one.computed)]) as transaction:
        transaction.commit([0])


@given(seed=st.integers(0, 2**30), size=st.integers(1, 4), windowed=st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_follower_knows_what_is_cached(seed: int, size: int, windowed: bool) -> None:
    """Whatever is stored, evicted, flushed or resized, by requests of which some are salted."""
    rng = random.Random(seed)
    groups = {"sliding": 200, "main": 12} if windowed else {"main": 12}
    ledger = Ledger(groups, size, windows={"sliding": 1000} if windowed else None)
    run(ledger, request("before", [0] * size))
    ledger.release(request("before", []))
    events, follower, running = CacheEvents(size), Follower(), list[Request]()
    ledger.tell(events)
    for number in range(25):
        action = rng.random()
        one = request(str(number), [rng.randrange(2) for _ in range(rng.randint(1, 3 * size))], rng.choice((None, "s")))
        if action < 0.6 and ledger.available().cover(ledger.growth(one, ledger.pages_for(one.known))):
            run(ledger, one)
            running.append(one)
        elif action < 0.9 and running:
            ledger.release(running.pop(rng.randrange(len(running))))
        elif action < 0.95:
            ledger.resize(
                "main", ledger.counts()["main"]["total"] + rng.randint(-min(2, ledger.counts()["main"]["free"]), 2)
            )
        else:
            ledger.flush()
        follower.take(events.take())
        prompt = [rng.randrange(2) for _ in range(4 * size)]
        assert follower.cached(prompt, size) == ledger.match(request(f"asks-{number}", prompt))[0]


def test_pages_of_a_request_are_one_event() -> None:
    ledger, events = Ledger({"main": 9}, 2), CacheEvents(2)
    ledger.tell(events)
    assert events.take() == [AllBlocksCleared()]
    names: list[bytes] = []
    extend(names, [1, 2, 3, 4, 5], 2)
    run(ledger, request("a", [1, 2, 3, 4, 5]))
    assert events.take() == [BlockStored(names, None, [1, 2, 3, 4], 2, None, "GPU", None)]
    run(ledger, request("b", [1, 2, 3, 4, 6, 7]))
    [stored] = events.take()
    assert isinstance(stored, BlockStored) and (stored.parent_block_hash, stored.token_ids) == (names[1], [6, 7])


def test_a_salt_is_not_told() -> None:
    """The same tokens under another salt or tenant have names of their own. Events show of a salt only a digest, which
    is the same for all tenants, and nothing of a tenant."""
    ledger, events = Ledger({"main": 12}, 2), CacheEvents(2)
    ledger.tell(events)
    events.take()
    for number, salt in enumerate((None, "me:", "me:secret", "you:secret")):
        one = request(str(number), [1, 2, 3, 4, 5], salt)
        one.tenant = "you" if number == 3 else "me"
        run(ledger, one)
    told = [event for event in events.take() if isinstance(event, BlockStored)]
    assert len({digest for event in told for digest in event.block_hashes}) == 8
    plain, own, mine, yours = (event.extra_keys for event in told)
    assert plain is own is None
    assert mine == yours and mine is not None and mine[0] is not None and mine[1:] == [None]
    assert "secret" not in str(told)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_names_that_only_drafters_use_are_not_told(lookahead: int) -> None:
    """A page that also holds a drafter's KV has another name besides; its eviction is told once, by its own name."""
    ledger, events = Ledger({"main": 3}, 2), CacheEvents(2)
    ledger.tell(events)
    one = request("a", [1, 2, 3, 4, 5])
    one.draft_kv = DraftKV("head", lookahead)
    run(ledger, one)
    ledger.release(one)
    run(ledger, request("b", [7, 8, 9, 10, 11]))
    _, stored, *removed, _ = events.take()
    assert isinstance(stored, BlockStored) and len(stored.block_hashes) == 2
    gone = [digest for event in removed if isinstance(event, BlockRemoved) for digest in event.block_hashes]
    assert gone == stored.block_hashes[::-1]


def test_names_are_the_same_in_every_process() -> None:
    """Two servers name equal pages alike, also after a restart: names depend on nothing but tokens and salt."""
    names: list[bytes] = []
    extend(names, [1, 2, 3, 4], 2)
    salted: list[bytes] = []
    extend(salted, [1, 2, 3, 4], 2, "salt")
    assert [name.hex() for name in names + salted] == [
        "f59df9f51bfcb52f7ae49756810ec78b",
        "654fd87995f0c2779926a78c27aab25c",
        "484b53ac51ce5cf1aa4139f784484a60",
        "2b8bd7e4022a57833ddf3915e0f272d7",
    ]
