"""Which connections are closed when there are too many, or when they hold too much."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from stridelm.server.limits import Guard, Limits

LIMITS = Limits(connections=40, head_bytes=1, head_s=1, body_s=1, body_idle_s=1, write_s=1, buffered=1000)


@dataclass(eq=False)
class Connection:
    tenant: str
    buffered: tuple[int, int] = (0, 0)
    opened: float = 0.0
    closed: list[Connection] = field(default_factory=list, repr=False)
    """Those that were closed, of all."""
    guard: Guard | None = None

    def look(self, now: float) -> None: ...

    def hang_up(self) -> None:
        self.closed.append(self)
        if self.guard is not None:
            self.guard.unwait(self)


def _held(connections: list[Connection]) -> int:
    return sum(sum(one.buffered) for one in connections)


@pytest.mark.parametrize("kind", range(2))
@pytest.mark.parametrize("seed", range(20))
def test_memory_is_taken_from_who_holds_most(kind: int, seed: int) -> None:
    """Beyond the limit the client that holds most of that kind loses its largest connections, and only as many as
    needed: neither one that holds less, even in the largest connection of all, nor anyone's other kind, if that is
    within its half."""
    draw = random.Random(seed)
    closed: list[Connection] = []

    def holding(size: int, of: int) -> tuple[int, int]:
        return (size, 0) if of == kind else (0, size)

    greedy = [Connection("greedy", holding(draw.randint(20, 60), kind), closed=closed) for _ in range(40)]
    modest = Connection("modest", holding(200, kind), closed=closed)
    others = [Connection("greedy", holding(100, 1 - kind), closed=closed) for _ in range(3)]
    everyone = [*greedy, modest, *others]
    draw.shuffle(everyone)
    Guard(LIMITS).relieve(everyone)
    assert set(closed) < set(greedy) and len(set(closed)) == len(closed)
    kept = [one for one in everyone if one not in closed]
    assert _held(kept) <= 1000 < _held([*kept, closed[-1]])
    assert min(sum(one.buffered) for one in closed) >= max(sum(one.buffered) for one in greedy if one not in closed)


def test_one_client_may_use_all() -> None:
    """Nobody is closed while the sum is within the limit, whatever one client or one kind has of it."""
    closed: list[Connection] = []
    Guard(LIMITS).relieve([Connection("a", (600, 0), closed=closed), Connection("a", (400, 0), closed=closed)])
    assert not closed


def test_an_upload_survives_idle_connections() -> None:
    """Of connections that wait, those of the client with most are closed, longest-waiting first: neither one that has
    waited longest of all, nor the few that have just come."""
    closed: list[Connection] = []
    guard, count = Guard(LIMITS), 0
    for number in range(200):
        one = Connection("modest" if number in (0, 190) else "greedy", opened=number, closed=closed, guard=guard)
        before = len(closed)
        assert guard.has_room(count)
        guard.wait(one)
        count += 1 - (len(closed) - before)
    assert count <= 40 + 5 and len(closed) > 150
    assert {one.tenant for one in closed} == {"greedy"}
    assert [one.opened for one in closed] == sorted(one.opened for one in closed)


def test_those_that_were_refused_go_first() -> None:
    """Connections that linger after an answer keep nobody out, and nobody that waits is closed instead of them."""
    closed: list[Connection] = []
    guard = Guard(LIMITS)
    refused = [Connection("hostile", opened=number, closed=closed, guard=guard) for number in range(3)]
    for one in refused:
        guard.leave(one)
    guard.wait(Connection("modest", closed=closed, guard=guard))
    assert guard.has_room(100) and closed == refused[:1]
    newcomer = Connection("modest", closed=closed, guard=guard)
    assert guard.admits(newcomer, [newcomer, *refused, *[Connection("modest")] * 40]) and closed == refused[:2]
    guard.unwait(refused[2])  # closed by its client
    assert not guard.admits(newcomer, [newcomer, *[Connection("modest")] * 40]) and closed == refused[:2]


def test_a_newcomer_takes_the_place_of_who_has_most() -> None:
    """If all connections have requests, another client's first is served in place of the newest of the client with
    most; a client that has as many as any is refused itself."""
    closed: list[Connection] = []
    guard = Guard(LIMITS)
    everyone = [Connection("greedy", opened=number, closed=closed, guard=guard) for number in range(40)]
    assert guard.has_room(len(everyone))
    everyone.append(newcomer := Connection("greedy", opened=40, closed=closed, guard=guard))
    assert not guard.admits(newcomer, everyone) and not closed
    newcomer.tenant = "modest"
    assert guard.admits(newcomer, everyone)
    assert [one.opened for one in closed] == [39]
    everyone.remove(closed[0])
    assert guard.admits(everyone[0], everyone) and len(closed) == 1  # within the limit again
