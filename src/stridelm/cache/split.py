"""How memory is divided between page groups, decided anew when one of them is short.

A group that is short gets the pages that it lacks and as many again (MARGIN), from groups that have pages to spare:
free ones first, then cached ones. Three things keep pages from moving back and forth: the margin; a donor keeps a part
of its pages (KEPT); and a group that has just been given pages gives none away for a while (`rests`). If nothing could
run otherwise, only the margin is left of these.

Pure: from equal numbers, every rank of a model decides alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

MARGIN = 32
"""A group gets at least this part of its pages (1 / MARGIN) more than it lacks."""
KEPT = 16
"""The part of its pages (1 / KEPT) that a donor keeps available."""


@dataclass(frozen=True)
class GroupPages:
    """One page group, when memory is to be divided."""

    total: int
    most: int
    """Maximum pages that it can have."""
    free: int
    cached: int
    lacking: int
    """Pages that it lacks for what is to run next; below 0, those that it has to spare beside that."""
    reserved: int = 0
    """Pages that running requests may still take."""
    kept: int = 0
    """Pages that it keeps available besides, if more than KEPT asks for."""
    rests: bool = False
    """Whether it was given pages a short while ago."""
    bytes_at: Callable[[int], int] = lambda pages: pages
    """Memory that it takes with so many pages, which never falls with their number."""

    def spare(self, stuck: bool) -> int:
        """Pages that it can give away."""
        if stuck:
            return max(0, min(-self.lacking, self.total - 1))
        if self.rests:
            return 0
        left = min(-self.lacking, self.free + self.cached - self.reserved)
        return max(0, min(left - max(self.kept, self.total // KEPT), self.total - 1))


def split(groups: Mapping[str, GroupPages], budget: int, *, stuck: bool = False) -> dict[str, int] | None:
    """Group -> pages in total, such that no group lacks any; None if that cannot be.

    budget: bytes that all groups may take together. stuck: whether nothing can run as things are.
    """
    short = {name: group for name, group in groups.items() if group.lacking > 0}
    if not short or any(group.total + group.lacking > group.most for group in short.values()):
        return None
    totals = {name: group.total for name, group in groups.items()}
    least = {name: group.total + group.lacking for name, group in short.items()}
    wanted = {name: _with_margin(group) for name, group in short.items()}
    donors = {name: group for name, group in groups.items() if name not in short}
    for cached in (False, True):  # a donor's cached pages are taken when no donor has free ones
        for name, group in sorted(donors.items(), key=lambda donor: -_worth(donor[1], stuck)):
            given = group.spare(stuck) if cached else min(group.spare(stuck), group.free)
            missing = _bytes(groups, totals | wanted) - budget
            totals[name] = _shrunk(group, totals[name], min(totals[name], group.total - given), missing)
    for goal in (least, wanted):
        for name, group in short.items():
            room = budget - _bytes(groups, totals) + group.bytes_at(totals[name])
            counts = range(totals[name] + 1, goal[name] + 1)
            totals[name] += bisect_right(counts, room, key=group.bytes_at)
        if any(totals[name] < least[name] for name in short):
            return None
    return totals


def most_pages(
    need: Mapping[str, int], most: Mapping[str, int], budget: int, bytes_at: Callable[[str, int], int]
) -> dict[str, int]:
    """Group -> the pages that it could have, at most `most`, while the others have those that they need.

    budget: bytes that all groups may take together. bytes_at: memory that a group takes with so many pages.
    """
    found = {}
    for name in need:
        room = budget - sum(bytes_at(other, max(1, pages)) for other, pages in need.items() if other != name)
        found[name] = bisect_right(range(1, most[name] + 1), room, key=partial(bytes_at, name))
    return found


def _with_margin(group: GroupPages) -> int:
    return min(group.most, group.total + group.lacking + max(group.lacking, group.total // MARGIN))


def _worth(group: GroupPages, stuck: bool) -> int:
    """Bytes that the group can give away."""
    return group.bytes_at(group.total) - group.bytes_at(group.total - group.spare(stuck))


def _shrunk(group: GroupPages, total: int, least: int, missing: int) -> int:
    """The greatest number of pages, from `least` to `total`, with which the group takes `missing` bytes less than with
    `total`; `least` if there is none."""
    if missing <= 0:
        return total
    limit = group.bytes_at(total) - missing
    return least + max(0, bisect_right(range(least, total + 1), limit, key=group.bytes_at) - 1)


def _bytes(groups: Mapping[str, GroupPages], totals: Mapping[str, int]) -> int:
    return sum(group.bytes_at(totals[name]) for name, group in groups.items())
