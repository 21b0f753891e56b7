"""Drafts that branch, grown by a head level by level.

Dynamic trees (EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2): at each level the `draft_topk` most likely nodes, by
the product of the probabilities along their paths, get `draft_topk` children each; the `num_draft_tokens` most likely
of all nodes are the draft. A child is never more likely than its parent, so they form a tree.

Static trees have the same shape every time: a node is the path of ranks that leads to it; `(0, 1)` is the second most
likely child of the most likely one.

At temperatures above 0, under the exact rule, "likely" is measured on the head's logits plus the noise that the target
will use at that position: the highest is the token that the target will most likely draw. Other rules, and greedy
guesses, use the logits as they are.

Legend: R requests, E nodes of a level that grow, B children of each, C nodes generated, W rows of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from stridelm.arena import Arena
from stridelm.batch import CANDIDATE, Draft
from stridelm.draft.base import TreeShape
from stridelm.draft.options import BranchingOptions, LookupOptions, Path
from stridelm.params import Speculation
from stridelm.types import MAX_DRAFT_ROWS


@dataclass(frozen=True)
class Sprout:
    """The nodes of one level that get children, as device tensors, all [R, E] except `hidden`."""

    tokens: torch.Tensor
    hidden_REH: torch.Tensor
    """The head's output from which the nodes were guessed."""
    ancestors: torch.Tensor
    """int64 bitmask over all nodes that have grown so far, themselves included."""
    first: int
    """Index of the first of these nodes among all that have grown."""
    level: int
    """1 for children of the last known token."""


Grow = Callable[[Sprout], torch.Tensor]
"""Returns [R, E, H] the head's output at the nodes."""
Scores = Callable[[torch.Tensor, int], torch.Tensor]
"""([R, E, H], level) -> [R, E, V] float32 log-probabilities of the tokens one level further on."""


def dynamic_rows(depth: int, branches: int, most: int) -> int:
    """Rows of a dynamic tree of this depth: all nodes generated, at most `most`."""
    return min(most, branches + (depth - 1) * branches**2) if depth else 0


def grow_dynamic(
    hidden_RH: torch.Tensor, depth: int, branches: int, rows: int, scores: Scores, grow: Grow, ready: torch.Tensor
) -> Draft:
    """A dynamic tree with `depth` levels and `rows` rows. ready: [R] requests that have a draft at all."""
    requests, device = hidden_RH.shape[0], hidden_RH.device
    values, tokens = _finite(scores(hidden_RH[:, None], 1)[:, 0]).topk(branches)
    all_values, all_tokens = [values], [tokens]
    parents = [torch.full_like(tokens, -1)]
    index = torch.arange(branches, device=device).expand(requests, -1)  # of the growing nodes among all generated
    hidden, above = hidden_RH[:, None].expand(-1, branches, -1), torch.zeros_like(tokens)
    for level in range(1, depth):
        first = (level - 1) * branches
        own = torch.ones_like(above) << (first + torch.arange(branches, device=device))
        sprout = Sprout(tokens, hidden, above | own, first, level)
        hidden = grow(sprout)
        gained, guesses = _finite(scores(hidden, level + 1)).topk(branches)
        came_up = sum(part.shape[1] for part in all_values)
        total = (values[:, :, None] + gained).flatten(1)
        all_values.append(total)
        all_tokens.append(guesses.flatten(1))
        parents.append(index.repeat_interleave(branches, 1))
        values, best = total.topk(branches)
        tokens, index, mother = guesses.flatten(1).gather(1, best), came_up + best, best // branches
        hidden = hidden.gather(1, mother[:, :, None].expand(-1, -1, hidden.shape[2]))
        above = sprout.ancestors.gather(1, mother)
    return _pick(torch.cat(all_values, 1), torch.cat(all_tokens, 1), torch.cat(parents, 1), depth, rows, ready)


def _finite(scores: torch.Tensor) -> torch.Tensor:
    """NaN becomes -inf: it would otherwise rank before its parent."""
    return scores.nan_to_num(nan=float("-inf"), neginf=float("-inf"))


def _pick(
    values_RC: torch.Tensor,
    tokens_RC: torch.Tensor,
    parents_RC: torch.Tensor,
    depth: int,
    rows: int,
    ready: torch.Tensor,
) -> Draft:
    """The most likely nodes as a draft, in the order in which they were generated."""
    requests, count = values_RC.shape
    # Stable: of an equally likely parent and child, the parent was generated first.
    chosen = values_RC.sort(dim=1, descending=True, stable=True).indices[:, :rows].sort(1).values
    row = torch.arange(rows, device=chosen.device).expand(requests, -1)
    row_of = torch.full((requests, count + 1), -1, device=chosen.device).scatter_(1, chosen + 1, row)
    parents = row_of.gather(1, parents_RC.gather(1, chosen) + 1)  # shifted by one for the root, -1
    ancestors, depths = torch.ones_like(row) << row, torch.ones_like(row)
    above = parents
    for _ in range(depth - 1):
        ancestors = ancestors | torch.where(above >= 0, torch.ones_like(row) << above.clamp(min=0), 0)
        depths = depths + (above >= 0)
        above = torch.where(above >= 0, parents.gather(1, above.clamp(min=0)), -1)
    return Draft(
        tokens=tokens_RC.gather(1, chosen),
        parents=parents,
        roles=torch.full_like(row, CANDIDATE),
        depths=depths,
        ancestors=ancestors,
        valid=ready[:, None].repeat(1, rows),
        candidates=np.ones((requests, rows), dtype=bool),
        is_chain=False,
        max_depth=depth,
    )


@dataclass(frozen=True)
class StaticTree:
    """The paths of a tree's nodes, level by level. Every node's parent and its siblings of lower rank are included."""

    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: tuple[Path, ...]) -> StaticTree:
        """Raises ValueError for paths that do not form a tree, or form one of more than 64 rows."""
        ordered = tuple(sorted(set(paths), key=lambda path: (len(path), path)))
        known = {(), *ordered}
        for path in ordered:
            if not path or any(rank < 0 for rank in path):
                raise ValueError(f"token_tree: {path} is not a path of ranks, such as (0, 1)")
            elder = (*path[:-1], path[-1] - 1)
            lacking = path[:-1] if path[:-1] not in known else elder if path[-1] and elder not in known else None
            if lacking is not None:
                raise ValueError(f"token_tree: {path} needs {lacking} in the tree too; add it")
        if not ordered or len(ordered) > MAX_DRAFT_ROWS:
            raise ValueError(f"token_tree has {len(ordered)} nodes; give 1 to {MAX_DRAFT_ROWS}")
        return cls(ordered)

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    def rows(self, depth: int) -> int:
        """Number of nodes in the first `depth` levels."""
        return sum(len(path) <= depth for path in self.paths)

    def cut(self, depth: int) -> StaticTree:
        return self if depth == self.depth else StaticTree(tuple(p for p in self.paths if len(p) <= depth))

    @property
    def inner(self) -> tuple[Path, ...]:
        """Nodes with children, level by level."""
        mothers = {path[:-1] for path in self.paths}
        return tuple(path for path in self.paths if path in mothers)


def grow_static(
    hidden_RH: torch.Tensor, tree: StaticTree, scores: Scores, grow: Grow, ready: torch.Tensor, arena: Arena
) -> Draft:
    """A draft of this tree's shape. ready: [R] requests that have a draft at all."""
    requests = hidden_RH.shape[0]
    mothers: tuple[Path, ...] = ((),)
    hidden_REH = hidden_RH[:, None]
    grown: tuple[Path, ...] = ()
    tokens: list[torch.Tensor] = []
    for level in range(1, tree.depth + 1):
        nodes = tuple(path for path in tree.paths if len(path) == level)
        top = scores(hidden_REH, level).topk(1 + max(path[-1] for path in nodes)).indices
        plan = arena.keep(_plan, nodes, mothers, grown, tree)
        here = top[:, plan.mother, plan.rank]
        tokens.append(here)
        if level == tree.depth:
            break
        ancestors = plan.ancestors.expand(requests, -1)
        sprout = Sprout(here[:, plan.inner], hidden_REH[:, plan.mother[plan.inner]], ancestors, len(grown), level)
        hidden_REH = grow(sprout)
        mothers = tuple(path for path in nodes if path in tree.inner)
        grown += mothers
    return arena.keep(_shape, tree).draft(torch.cat(tokens, 1), ready[:, None].repeat(1, len(tree.paths)))


@dataclass(frozen=True)
class _Plan:
    """A level of a static tree on the device."""

    mother: torch.Tensor
    """Index of each node's parent among the nodes that grew in the level above."""
    rank: torch.Tensor
    inner: torch.Tensor
    """Indices of the nodes that grow."""
    ancestors: torch.Tensor
    """[1, E] their bitmasks over all nodes that have grown."""


def _plan(
    nodes: tuple[Path, ...], mothers: tuple[Path, ...], grown: tuple[Path, ...], tree: StaticTree, device: torch.device
) -> _Plan:
    inner = [place for place, path in enumerate(nodes) if path in tree.inner]
    order = (*grown, *(nodes[place] for place in inner))
    masks = [sum(1 << n for n, path in enumerate(order) if nodes[place][: len(path)] == path) for place in inner]
    columns = ([mothers.index(path[:-1]) for path in nodes], [path[-1] for path in nodes], inner)
    mother, rank, grows = (torch.tensor(column, dtype=torch.int64, device=device) for column in columns)
    signed = [mask - (1 << 64) if mask >> 63 else mask for mask in masks]
    return _Plan(mother, rank, grows, torch.tensor([signed], dtype=torch.int64, device=device))


def _shape(tree: StaticTree, device: torch.device) -> TreeShape:
    row_of = {path: row for row, path in enumerate(tree.paths)}
    parents = [row_of.get(path[:-1], -1) for path in tree.paths]
    return TreeShape.of(parents, [CANDIDATE] * len(parents), device)


@dataclass(frozen=True)
class Branching:
    """The shape that a request asks for: a chain, unless `topk` is over 1 or `tree` is given."""

    topk: int = 1
    rows: int = 0
    tree: StaticTree | None = None

    @classmethod
    def of(cls, speculation: Speculation, depth: int) -> Branching:
        """Raises ValueError for options that conflict, or for more rows than a draft may have."""
        asked = speculation.read(BranchingOptions)
        if asked.branches and speculation.read(LookupOptions).looks_up:
            raise ValueError(
                "a looked-up draft replaces a chain; leave prompt_lookup_min out, or draft_topk and token_tree"
            )
        tree, topk, rows = asked.token_tree, asked.draft_topk, asked.num_draft_tokens
        if tree is not None:
            if topk is not None or rows is not None:
                raise ValueError("token_tree fixes the draft, so draft_topk and num_draft_tokens would have no effect")
            static = StaticTree.of(tree)
            if static.depth < depth:
                raise ValueError(f"depth {depth} is over {static.depth}, the levels of token_tree; lower depth")
            return cls(tree=static)
        if topk is None or topk == 1:
            if rows is not None:
                raise ValueError("num_draft_tokens would have no effect on a chain; give draft_topk over 1, or depth")
            return cls()
        rows = rows or min(MAX_DRAFT_ROWS, topk * max(1, depth))
        if rows > MAX_DRAFT_ROWS:
            raise ValueError(f"num_draft_tokens {rows} is over {MAX_DRAFT_ROWS}, the most rows a draft may have")
        attainable = dynamic_rows(depth, topk, MAX_DRAFT_ROWS)
        if depth and rows > attainable:
            raise ValueError(
                f"num_draft_tokens {rows} is over {attainable}, all the nodes there are at depth {depth} with "
                f"draft_topk {topk}; lower it, or raise one of the others"
            )
        grown = topk * (depth - 1)
        if grown > min(rows + 1, MAX_DRAFT_ROWS):
            raise ValueError(
                f"draft_topk {topk} at depth {depth} grows {grown} nodes and num_draft_tokens is {rows}; raise "
                f"num_draft_tokens to {grown - 1} (at most {MAX_DRAFT_ROWS}) or lower one of the others"
            )
        return cls(topk, rows)

    def rows_by_depth(self, depth: int) -> tuple[int, ...]:
        if self.tree is not None:
            return tuple(self.tree.rows(d) for d in range(depth + 1))
        if self.topk > 1:
            return tuple(dynamic_rows(d, self.topk, self.rows) for d in range(depth + 1))
        return tuple(range(depth + 1))

    def grow(
        self, hidden_RH: torch.Tensor, depth: int, scores: Scores, grow: Grow, ready: torch.Tensor, arena: Arena
    ) -> Draft:
        """A tree with `depth` levels; not for a chain. hidden_RH: the head's output that guesses the first level.
        ready: [R] requests that have a draft at all."""
        if self.tree is not None:
            return grow_static(hidden_RH, self.tree.cut(depth), scores, grow, ready, arena)
        return grow_dynamic(hidden_RH, depth, self.topk, dynamic_rows(depth, self.topk, self.rows), scores, grow, ready)
