"""Simulated acceptance, for benchmarks only: how many tokens a step emits is drawn, whatever the drafts are worth.

With random weights no draft would ever be accepted; with `acceptance="synthetic:2.5"` a step whose draft is full emits
2.5 tokens on average. vLLM's synthetic rejection sampling is the same idea.

The number is 1 to D + 1, where D is the depth asked for: each further token is accepted with one probability p, and
the first that is not ends the step. That is a geometric distribution cut off at D + 1, and p is what gives it the mean
asked for. A draft with fewer live levels emits fewer.

The number is drawn by the same noise as tokens (sample/noise.py), in a stream of its own: it depends on the request's
seed, its sample index and the position of the step's first token, and on nothing that shares the batch.

Legend: R spans, W draft rows, K = W + 1 nodes, A = MAX_DRAFT_ROWS + 1 numbers of accepted tokens, S slots.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch

from stridelm.sample.noise import gumbel
from stridelm.sample.sampler import likeliest
from stridelm.sample.table import SamplingTable
from stridelm.types import CANDIDATE, MAX_DRAFT_ROWS, Draft, Verdict
from stridelm.verify.exact import draw_nodes, walk_and_append
from stridelm.verify.rule import Hearing, Rule
from stridelm.verify.trust import Sureness, Trust

STREAM = 0x4C454E
"""The noise's stream for lengths."""
NUMBERS = MAX_DRAFT_ROWS + 1


class Synthetic(Rule):
    """Candidates: down the first live child of each node, as many levels as were drawn.

    The accepted rows' own tokens are emitted, so that the kept KV is that of the output, and then what the leaf draws.
    """

    name = "synthetic"
    lossless = False
    simulated = True
    like = "exact"
    options = frozenset({"acceptance_length"})

    def decide(self, hearing: Hearing) -> Verdict:
        draft, drawn_RK = hearing.draft, draw_nodes(hearing)
        if not draft.width:
            return walk_and_append(hearing, draft, drawn_RK)
        levels = draw_accepted(hearing)
        short = replace(draft, live=draft.live & (draft.depths <= levels[:, None]))
        return _recounted(walk_and_append(hearing, short, _agreeing(short, drawn_RK)), draft)


class SyntheticTrust(Trust):
    """Trusted windows, cut to the number drawn instead of by confidence."""

    name = "synthetic-trust"
    simulated = True
    like = "trust"
    options = frozenset({"acceptance_length"})

    def sureness(self, hearing: Hearing) -> Sureness:
        """Row j of a window is -j sure, and must be as sure as the last one to be emitted."""
        rows, columns = hearing.nodes.shape
        place = torch.arange(0, -columns, -1, dtype=torch.float32, device=hearing.nodes.device)
        return place.expand(rows, -1), -draw_accepted(hearing).float()


def draw_accepted(hearing: Hearing) -> torch.Tensor:
    """[R] int64 how many drafted tokens each span accepts if its draft is full; on a GPU -1 for padding."""
    slots, sampling = hearing.slots, hearing.sampler.table
    odds_RA, positions = _log_odds(hearing), hearing.table.known[slots]
    if odds_RA.is_cuda:
        return draw_on_gpu(odds_RA, slots, positions, sampling)
    return likeliest(odds_RA + gumbel(sampling.seed[slots], positions, sampling.sample_index[slots], NUMBERS, STREAM))


def draw_on_gpu(
    odds_RA: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, sampling: SamplingTable
) -> torch.Tensor:
    """The same by the kernel that draws tokens, at temperature 1."""
    from stridelm.kernels.draw import draw

    ones_S, always_S = _neutral(len(sampling.seed), slots.device)
    return draw(odds_RA, slots, positions, ones_S, sampling.seed, sampling.sample_index, always_S, stream=STREAM)


def _log_odds(hearing: Hearing) -> torch.Tensor:
    """[R, A] float32. Requests that ask for the same, which is all that a captured step has, need no copy."""
    asked = [span.request.speculation for span in hearing.spans]
    rows = [log_odds(s.acceptance_length or 1.0, s.depth or 0, hearing.slots.device) for s in asked]
    alike = all(row is rows[0] for row in rows)
    return rows[0].expand(len(rows), -1) if alike else torch.stack(rows)


@cache  # for ever: a captured step reads these very tensors
def log_odds(mean: float, depth: int, device: torch.device) -> torch.Tensor:
    """[A] float32: log-probability of 0, 1, .. accepted tokens, where 1 + accepted has the mean; -inf over `depth`."""
    p = chance_of_another(mean, depth)
    odds = [p**n * (1 - p) for n in range(depth)] + [p**depth]
    logs = [math.log(chance) if chance else -math.inf for chance in odds]
    logs += [-math.inf] * (NUMBERS - len(logs))
    return torch.tensor(logs, dtype=torch.float32, device=device)


@cache  # for ever, as above
def _neutral(slots: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[S] temperatures of 1, and [S] that all are drawn with noise."""
    return torch.ones(slots, device=device), torch.ones(slots, dtype=torch.bool, device=device)


def chance_of_another(mean: float, depth: int) -> float:
    """The p with 1 + p + ... + p**depth = mean, by bisection: P(more than n tokens) is p**n for n up to `depth`."""
    low, high = 0.0, 1.0
    for _ in range(64):
        middle = (low + high) / 2
        if sum(middle**n for n in range(depth + 1)) < mean:
            low = middle
        else:
            high = middle
    return high


def _agreeing(draft: Draft, drawn_RK: torch.Tensor) -> torch.Tensor:
    """[R, K] the token drawn at each node; at a node with live children, the first child's."""
    width = draft.width
    row = torch.arange(width, device=drawn_RK.device)
    child = torch.where(draft.live & (draft.roles == CANDIDATE), row, width)
    first_RK = torch.full_like(drawn_RK, width).scatter_reduce_(1, draft.parents + 1, child, "amin")
    return torch.where(first_RK < width, draft.tokens.gather(1, first_RK.clamp(max=width - 1)), drawn_RK)


def _recounted(verdict: Verdict, draft: Draft) -> Verdict:
    """The walk saw a draft cut short; what was drafted and put to the test is counted over all of it."""
    candidates = draft.live & (draft.roles == CANDIDATE)
    tested = (candidates & (draft.parents == verdict.leaf[:, None])).any(1)
    decided = verdict.counts > 0
    drafted = torch.where(decided, candidates.sum(1), 0)
    return replace(verdict, drafted=drafted, reached=verdict.kept + (tested & decided))
