"""Lines in which tenants take turns."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from stridelm.server.fair_line import FairLine, Lane, LineFull

TENANTS = "abcd"


@pytest.mark.parametrize("places", [None, 1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_who_holds_nothing_is_served_within_a_round(places: int | None, seed: int) -> None:
    """Such a tenant can always join, whatever the others have in line, and each of them is served at most once before
    it. Nobody takes more places than there are, and each tenant's items keep their order."""
    draw, line = random.Random(seed), FairLine[int](places, waiting=8)
    running: list[str] = []
    waiting: dict[str, list[int]] = {tenant: [] for tenant in TENANTS}
    before: dict[str, Counter[str]] = {}
    """Tenant that held nothing when it joined -> who was served since."""
    for number in range(600):
        tenant = draw.choice("aaaaaabcd")
        if draw.random() < 0.6:
            holds_nothing = not waiting[tenant] and tenant not in running
            if line.join(tenant, number):
                waiting[tenant].append(number)
                if holds_nothing:
                    before[tenant] = Counter()
            else:
                assert len(waiting[tenant]) == 8 and not holds_nothing
        elif running and draw.random() < 0.7:
            running.remove(ended := draw.choice(running))
            line.finish(ended)
        elif waiting[tenant] and draw.random() < 0.2:
            left = draw.choice(waiting[tenant])
            waiting[tenant].remove(left)
            assert line.leave(tenant, left) and not line.leave(tenant, left)
            before.pop(tenant, None)
        served = line.next()
        if served is None:
            assert not any(waiting.values()) or len(running) == places
            continue
        who, item = served
        assert item == waiting[who].pop(0)
        running += [who] if places is not None else []
        for other, counts in before.items():
            counts[who] += other != who
            assert max(counts.values(), default=0) <= 1
        before.pop(who, None)


def test_half_of_the_places_while_another_waits() -> None:
    """A tenant alone has every place; once another waits, each place that is given back goes to it until both have as
    many."""
    line = FairLine[int](places=4)
    for number in range(20):
        line.join("a", number)
    assert [line.next() for _ in range(5)] == [*(("a", number) for number in range(4)), None]
    for number in range(20):
        line.join("b", number)
    for _ in range(2):
        line.finish("a")
        assert (line.next() or "")[0] == "b"
    for ended in "abbaabab":
        line.finish(ended)
        assert (line.next() or "")[0] == ended


def test_a_lane_leaks_no_place() -> None:
    """However tasks end, also if cancelled while they wait or in the moment in which they get a place, all places are
    there in the end; more than may wait are refused."""

    async def run(seed: int) -> None:
        draw, lane = random.Random(seed), Lane(places=2, waiting=6)
        busy, most, refused = 0, 0, 0

        async def work(tenant: str) -> None:
            nonlocal busy, most, refused
            try:
                async with lane.place(tenant):
                    busy += 1
                    most = max(most, busy)
                    try:
                        for _ in range(draw.randrange(4)):
                            await asyncio.sleep(0)
                    finally:
                        busy -= 1
            except LineFull:
                refused += 1

        tasks = []
        for _ in range(200):
            tasks.append(asyncio.ensure_future(work(draw.choice("aab"))))
            if draw.random() < 0.4:
                draw.choice(tasks).cancel()
            if draw.random() < 0.6:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most == 2 and busy == 0 and refused
        await asyncio.wait_for(asyncio.gather(lane.enter("a"), lane.enter("b")), 5)

    for seed in range(10):
        asyncio.run(run(seed))
