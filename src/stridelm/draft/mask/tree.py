"""The tree of verified mask-token decoding at depth d (at most k = d + 1 tokens per step).

    row        0 .. d-1           then, for node 0 (the last real row), 1, .., d: d probes each
    role       candidates         probes of node 0   probes of node 1 ...
    parent     -1, 0, 1, ..       a chain hanging from the node

In total d + (d + 1) d rows. Candidates come first, so an accepted path is already in place.
"""

from __future__ import annotations

from stridelm.batch import CANDIDATE, PROBE


def verified_rows(depth: int) -> int:
    """Draft rows of the tree at this depth."""
    return depth + (depth + 1) * depth


def verified_parents(depth: int) -> tuple[list[int], list[int]]:
    """(parents, roles) of the tree's rows."""
    parents, roles = list(range(-1, depth - 1)), [CANDIDATE] * depth
    for node in range(depth + 1):
        previous = node - 1
        for _ in range(depth):
            parents.append(previous)
            roles.append(PROBE)
            previous = len(parents) - 1
    return parents, roles
