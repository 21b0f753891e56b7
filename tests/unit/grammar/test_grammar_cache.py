"""The cache of compiled grammars that tenants share."""

from __future__ import annotations

import random

import pytest

from stridelm.grammar.cache import GrammarCache


def test_nobody_evicts_what_another_uses() -> None:
    """Of two tenants, one that stays within half of the bytes loses nothing, however much the other puts there; alone,
    a tenant has all of it, and what it used longest ago goes first."""
    cache = GrammarCache[str](1000)
    for number in range(50):
        cache.put(f"alone {number}", number, 100, "a")
    assert [cache.get(f"alone {number}") for number in range(50)] == [None] * 40 + list(range(40, 50))
    cache.get("alone 40")
    for number in range(5):
        cache.put(f"modest {number}", number, 100, "b")
    for number in range(500):
        cache.put(f"greedy {number}", number, 1 + number % 300, "a")
        assert [cache.get(f"modest {own}") for own in range(5)] == list(range(5))


def test_the_longest_unused_goes_first() -> None:
    cache = GrammarCache[str](300)
    for name in "xyz":
        cache.put(name, name, 100)
    cache.get("x")
    cache.put("w", "w", 100)
    assert [cache.get(name) for name in "xyzw"] == ["x", None, "z", "w"]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_held_stays(seed: int) -> None:
    """Whatever is put and held, by whom, in any order: what is held is found, also if it is larger than the cache, and
    what is not takes no more bytes than the limit."""
    draw, cache = random.Random(seed), GrammarCache[int](500)
    sizes = {spec: draw.choice((10, 100, 400, 900)) for spec in range(40)}
    held: list[tuple[int, str]] = []
    put: set[int] = set()
    for _ in range(2000):
        spec, tenant = draw.randrange(40), draw.choice("abc")
        if draw.random() < 0.4:
            cache.put(spec, spec, sizes[spec], tenant)
            put.add(spec)
        elif draw.random() < 0.5:
            found = cache.get(spec) is not None
            assert cache.hold(spec, tenant) == found
            held.append((spec, tenant))
            put = put if found else put - {spec}
        elif held:
            one = held.pop(draw.randrange(len(held)))
            cache.free(*one)
        in_use = {spec for spec, _ in held}
        assert all(cache.get(spec) == spec for spec in in_use & put)
        assert sum(cache.size(spec) for spec in range(40) if spec not in in_use) <= 500
        for tenant in "abc":
            own = {spec for spec, who in held if who == tenant}
            assert cache.held_bytes(tenant) == sum(map(cache.size, own))
