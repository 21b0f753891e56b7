"""Simulated acceptance, for benchmarks only: how many tokens a step emits is random, however good the drafts are.

With random weights no draft would ever be accepted; with `acceptance="synthetic:2.5"` a step whose draft is full emits
2.5 tokens on average. vLLM's synthetic rejection sampling is the same idea.

The number is 1 to D + 1, where D is the requested depth: each further token is accepted with the same probability p,
and the first rejected one ends the step. That is a geometric distribution truncated at D + 1, and p is chosen to give
it the requested mean. A draft with fewer valid levels emits fewer.

The number is drawn with the same noise as tokens (kernels/noise.py), in a stream of its own: it depends on the
request's seed, its sample index and the position of the step's first token, and not on the rest of the batch.

Legend: R spans, K nodes, A = MAX_DRAFT_ROWS + 1 numbers of accepted tokens.
"""

from __future__ import annotations

import math

import torch

from stridelm.types import MAX_DRAFT_ROWS, Verdict
from stridelm.verify.attempt import draw, follow
from stridelm.verify.exact import draw_nodes
from stridelm.verify.rule import Rule, VerifyInput

STREAM = 0x4C454E
"""The noise's stream for lengths."""
NUMBERS = MAX_DRAFT_ROWS + 1


class Synthetic(Rule):
    """For candidates: follow the first valid child of each node for the drawn number of levels, then emit the token
    drawn at the leaf."""

    name = "synthetic"
    lossless = False
    simulated = True
    like = "exact"

    def decide(self, inputs: VerifyInput) -> Verdict:
        draft, levels = inputs.draft, draw_accepted(inputs)
        return follow(inputs, draft.valid & (draft.depths <= levels[:, None]), draw_nodes(inputs))


def draw_accepted(inputs: VerifyInput) -> torch.Tensor:
    """[R] int64 how many drafted tokens each span accepts if its draft is full; undefined for padding."""
    return draw(inputs, _log_odds(inputs), inputs.table.known[inputs.slots], STREAM)


def _log_odds(inputs: VerifyInput) -> torch.Tensor:
    """[R, A] float32. Requests with equal options need no copy; a captured step has only such."""
    asked = [span.request.speculation for span in inputs.spans]
    rows = [inputs.table.arena.keep(log_odds, s.acceptance_length or 1.0, s.depth or 0) for s in asked]
    alike = all(row is rows[0] for row in rows)
    return rows[0].expand(len(rows), -1) if alike else torch.stack(rows)


def log_odds(mean: float, depth: int, device: torch.device) -> torch.Tensor:
    """[A] float32: log-probability of 0, 1, .. accepted tokens, where 1 + accepted has this mean; -inf over `depth`."""
    p = chance_of_another(mean, depth)
    odds = [p**n * (1 - p) for n in range(depth)] + [p**depth]
    logs = [math.log(chance) if chance else -math.inf for chance in odds]
    logs += [-math.inf] * (NUMBERS - len(logs))
    return torch.tensor(logs, dtype=torch.float32, device=device)


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
