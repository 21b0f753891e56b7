"""What all who ask share is made once for them, after they asked, and not all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stridelm.server import shared
from stridelm.server.shared import Shared


class Work:
    """Numbers the results, and takes a few turns of the loop for each."""

    def __init__(self) -> None:
        self.begun = self.running = 0

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        self.running += 1
        assert self.running == 1, "two at once"
        for _ in range(3):
            await asyncio.sleep(0)
        self.running -= 1
        if number == 2:
            raise ValueError("the second fails")
        return number


def play(scene: Callable[[Work, Shared[int]], Awaitable[None]]) -> None:
    async def played() -> None:
        work = Work()
        await scene(work, Shared(work))

    asyncio.run(asyncio.wait_for(played(), 60))


def test_one_result_for_all_who_wait() -> None:
    """Hundreds who ask together share one result, and those who ask while it is made share the next, even a failure."""

    async def scene(work: Work, result: Shared[int]) -> None:
        first = [asyncio.create_task(result.get()) for _ in range(300)]
        while not work.running:
            await asyncio.sleep(0)
        second = [asyncio.create_task(result.get()) for _ in range(300)]
        assert set(await asyncio.gather(*first)) == {1}
        failed = await asyncio.gather(*second, return_exceptions=True)
        assert all(isinstance(one, ValueError) for one in failed)
        assert await result.get() == 3 == work.begun

    play(scene)


def test_who_leaves_cancels_nothing() -> None:
    """A client that stops waiting takes nothing from the others."""

    async def scene(work: Work, result: Shared[int]) -> None:
        leaving, staying = asyncio.create_task(result.get()), asyncio.create_task(result.get())
        while not work.running:
            await asyncio.sleep(0)
        leaving.cancel()
        assert await staying == 1

    play(scene)


def test_work_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the work nothing is made until the rest is over, for whoever asks; and then it is."""
    monkeypatch.setattr(shared, "REST", 1e9)
    monkeypatch.setattr(shared, "LONGEST_REST_S", 0.5)

    async def scene(work: Work, result: Shared[int]) -> None:
        assert await result.get() == 1
        waiting = asyncio.create_task(result.get())
        began = asyncio.get_running_loop().time()
        while work.begun == 1:
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began > 0.3  # a rest that is left out would take microseconds
        with pytest.raises(ValueError, match="second"):
            await waiting

    play(scene)
