"""Masks of one tenant never hold up the others for long, and a tenant alone has all the time."""

from __future__ import annotations

from collections.abc import Callable

from stridelm.grammar.share import BREAK_S, SHARE, STEP_S, MaskShare
from stridelm.params import SamplingParams, Speculation
from stridelm.types import Request


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def requests(tenant: str, count: int, depth: int = 0) -> list[Request]:
    made = [Request(f"{tenant}{i}", [1], SamplingParams(), Speculation(), tenant=tenant) for i in range(count)]
    for slot, request in enumerate(made):
        request.rows_by_depth = tuple(range(depth + 1))
        request.slot = slot if tenant == "slow" else -1
    return made


def masks(mask_s: float) -> Callable[[int], float | None]:
    return lambda slot: mask_s if slot >= 0 else None


def test_a_tenant_alone_never_rests() -> None:
    share, slow = MaskShare(Clock()), requests("slow", 40)
    for _ in range(50):
        share.rest(slow, masks(10.0))
        assert not any(request.resting for request in slow)
        assert not share.charge("slow", 10.0)


def test_beside_another_masks_have_their_share() -> None:
    """Over many steps masks take SHARE of the time, whatever they cost, and requests without a grammar never rest."""
    clock = Clock()
    share, slow, other = MaskShare(clock), requests("slow", 8), requests("other", 2)
    spent = steps = 0.0
    while clock.now < 60:
        share.rest([*slow, *other], masks(0.04))
        assert not any(request.resting for request in other)
        now = sum(not request.resting for request in slow)
        for _ in range(now):
            share.charge("slow", 0.04)
        spent, steps = spent + 0.04 * now, steps + 1
        clock.now += 0.02 + 0.04 * now
    assert 0.5 * SHARE < spent / clock.now < 1.2 * SHARE


def test_a_step_has_few_of_them() -> None:
    """As many rows' masks as fit into STEP_S by what they took so far, at least one request's."""
    share, other = MaskShare(Clock()), requests("other", 1)
    for mask_s, depth, expected in (0.01, 0, 5), (0.01, 3, 1), (1.0, 0, 1), (1e-5, 0, 20):
        slow = requests("slow", 20, depth)
        share.rest([*slow, *other], masks(mask_s))
        assert sum(not request.resting for request in slow) == expected, (mask_s, depth)


def test_what_suddenly_takes_long_is_ended() -> None:
    share, slow, other = MaskShare(Clock()), requests("slow", 9), requests("other", 1)
    share.rest([*slow, *other], masks(STEP_S / 100))
    taken = [share.charge("slow", BREAK_S / 2) for _ in range(4)]
    assert taken == [False, False, True, True] and not share.charge("other", BREAK_S / 2)
    share.rest([*slow, *other], masks(STEP_S / 100))  # another step
    assert not share.charge("slow", BREAK_S / 2)
