"""Simulated acceptance, for benchmarks only: how many tokens a step emits is random, however good the drafts are.

With random weights no draft would ever be accepted; with `acceptance="synthetic:2.5"` a step whose draft is full emits
2.5 tokens on average. vLLM's synthetic rejection sampling is the same idea.

How many tokens a request's draft accepts is distributed as sample/length.py says. A draft with fewer valid levels emits
fewer.

The number is drawn with the same noise as tokens (kernels/noise.py), in a stream of its own: it depends on the
request's seed, its sample index and the position of the step's first token, and not on the rest of the batch.

Legend: R spans, K nodes.
"""

from __future__ import annotations

import torch

from stridelm.batch import Verdict
from stridelm.verify.attempt import draw, follow
from stridelm.verify.exact import draw_nodes
from stridelm.verify.rule import Rule, VerifyInput

STREAM = 0x4C454E
"""The noise's stream for lengths."""


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
    slots = inputs.slots
    return draw(inputs, inputs.sampler.table.length_odds[slots], inputs.table.known[slots], STREAM)
