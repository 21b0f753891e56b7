"""Shared by the rules that weigh a draft by probabilities: the target's distribution at a node, noise of their own, and
the Verdict for the leaf at which the draft ends.

Each step is one attempt to extend a request. Its noise is not the target's own (stream 0), which depends on the
position and not on the attempt: it is keyed by the attempt too (kernels/noise.py). Accepting and drawing the token
after what was accepted have a stream each.

Legend: R spans, W draft rows, K = W + 1 nodes (the last real row, then the draft rows), V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from stridelm.batch import Draft, Verdict
from stridelm.kernels.noise import ACCEPT, RESIDUAL, attempt_stream, uniforms
from stridelm.sample.rows import Rows
from stridelm.verify.exact import walk_and_append
from stridelm.verify.paths import candidate_history
from stridelm.verify.rule import Rule, VerifyInput


class Weighing(Rule):
    """Base of these rules. They decide the same rows as the exact rule."""

    like = "exact"


def candidate_rows(draft: Draft) -> Iterator[int]:
    """The draft's rows that may be candidates, in order: children come after their parents."""
    yield from np.flatnonzero(draft.candidates.any(0)).tolist()


def tokens_at(draft: Draft, row: int) -> torch.Tensor:
    """[R, 1] a row's tokens."""
    return draft.tokens[:, row, None]


def target_at(inputs: VerifyInput, row: int, *, certain: bool = True) -> torch.Tensor:
    """[R, V] float32: the distribution of the token after a draft row (-1: the last real row). Undefined where the row
    is not valid. certain: a greedy request puts all mass on its argmax; if False, it counts as at temperature 1."""
    batch, draft = inputs.batch, inputs.draft
    rows = inputs.nodes[:, row + 1].clamp(min=0)
    extra = None
    if row >= 0 and inputs.uses_history:
        spans = torch.arange(len(rows), device=rows.device)
        extra = candidate_history(draft, spans, torch.full_like(spans, row))
    picked = Rows(inputs.slots, batch.positions[batch.decisions[rows]] + 1, extra, inputs.longest)
    slots = [span.request.slot for span in inputs.spans]
    logits = inputs.logits_MV.index_select(0, rows)
    if certain:
        return inputs.sampler.probabilities(logits, picked, slots)
    return inputs.sampler.log_probs(logits, picked, slots, noisy=False).exp()


def chances(inputs: VerifyInput) -> torch.Tensor:
    """[R, K] float64: the uniform random number that decides whether a node is accepted, one per node."""
    sampling, known = inputs.sampler.table, inputs.table.known[inputs.slots]
    seeds, samples = sampling.seed[inputs.slots], sampling.sample_index[inputs.slots]
    return uniforms(seeds, known, samples, inputs.nodes.shape[1], attempt_stream(ACCEPT, known))


def end_at(inputs: VerifyInput, leaf: torch.Tensor, weights_RV: torch.Tensor) -> Verdict:
    """Accept the draft down to `leaf` [R] (-1: none of it), and draw the next token by these weights."""
    draft, known = inputs.draft, inputs.table.known[inputs.slots]
    positions = known
    if draft.width:
        positions = known + torch.where(leaf >= 0, draft.depths.gather(1, leaf.clamp(min=0)[:, None])[:, 0], 0)
    drawn = draw(inputs, weights_RV.log(), positions, attempt_stream(RESIDUAL, known))
    return follow(inputs, path_to(draft, leaf), drawn[:, None].repeat(1, draft.width + 1))


def draw(
    inputs: VerifyInput, logs_RV: torch.Tensor, positions: torch.Tensor, stream: int | torch.Tensor
) -> torch.Tensor:
    """[R] int64: one draw per span by these log-weights, at temperature 1; undefined for padding."""
    sampling = inputs.sampler.table
    return inputs.sampler.ops.draw_weighted(
        logs_RV, inputs.slots, positions, sampling.seed, sampling.sample_index, stream
    )


def path_to(draft: Draft, leaf: torch.Tensor) -> torch.Tensor:
    """[R, W] bool: the leaf and its ancestors; no row for -1."""
    if not draft.width:
        return draft.valid
    mask = torch.where(leaf >= 0, draft.ancestors.gather(1, leaf.clamp(min=0)[:, None])[:, 0], 0)
    return ((mask[:, None] >> torch.arange(draft.width, device=mask.device)) & 1) == 1


def follow(inputs: VerifyInput, kept_RW: torch.Tensor, drawn_RK: torch.Tensor) -> Verdict:
    """Follow the first child of each node among the kept rows, whatever its token; the token drawn at the end is last.

    The accepted rows' own tokens are emitted, so the kept KV is that of the output.
    """
    draft, table = inputs.draft, inputs.table
    if not draft.width:
        return walk_and_append(inputs, draft, drawn_RK)
    return inputs.sampler.ops.follow(
        draft, kept_RW, drawn_RK, inputs.nodes, inputs.decides, inputs.slots, table.tokens, table.known
    )
