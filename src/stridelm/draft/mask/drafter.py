"""Mask-token decoding: the model itself proposes, through rows of mask tokens (arXiv 2602.06019).

Trusted (`acceptance="trust"`): a chain of k - 1 probes follows the real rows; the verifier emits the tokens of the last
real row and of the probes, unchecked. Verified (`acceptance="exact"`): the last step's probe tokens become a chain of
candidates, and every node of it has probes of its own, so that there are new proposals after whatever prefix is
accepted.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from stridelm.batch import PROBE, Draft, ForwardBatch, Verdict
from stridelm.draft.base import Drafter, Group, TargetInfo, TreeShape, chain
from stridelm.draft.guess import Guessing
from stridelm.draft.mask.tree import verified_parents, verified_rows
from stridelm.draft.options import GuessOptions
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.run.heads import TargetRuntime
from stridelm.sample.rows import Rows
from stridelm.sample.sampler import Sampler
from stridelm.types import MAX_DRAFT_ROWS, Request, Span
from stridelm.verify import RULES

MAX_VERIFIED_DEPTH = max(d for d in range(MAX_DRAFT_ROWS) if verified_rows(d) <= MAX_DRAFT_ROWS)


class MaskDrafter(Drafter):
    name = "mask"
    rules = frozenset({"exact", "trust"})
    default_depth = 2

    def __init__(self, target: TargetInfo, sampler: Sampler, runtime: TargetRuntime | None = None) -> None:
        super().__init__(target, sampler, runtime)
        slots, device = target.max_num_seqs + 1, target.device
        self._proposals = torch.zeros(slots, MAX_VERIFIED_DEPTH, dtype=torch.int64, device=device)
        """[S, D] what the last step's probes proposed, from the position after the last known token on."""
        self._ready = torch.zeros(slots, dtype=torch.int64, device=device)
        """[S] how many of them are valid."""

    @classmethod
    def why_not(cls, target: TargetInfo) -> str | None:
        if not target.mask_token_ids:
            return "the checkpoint names no mask token; give mask_token_id if it was trained with one"
        return None

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        depth = self.default_depth if speculation.depth is None else speculation.depth
        trusted = _is_trusted(speculation)
        method = speculation.read(GuessOptions).draft_sample_method
        if method is not None and (trusted or Guessing.of(speculation) is Guessing.DRAWN):
            why = (
                "emits the probes' tokens" if trusted else "weighs a guess by its distribution, so masks guess greedily"
            )
            raise ValueError(
                f"draft_sample_method {method!r} would have no effect with acceptance {speculation.rule!r}, which "
                f"{why}; leave it out or choose another acceptance"
            )
        most = MAX_DRAFT_ROWS if trusted else MAX_VERIFIED_DEPTH
        if depth > most:
            rule = speculation.acceptance or "exact"
            raise ValueError(f"depth {depth} is over {most}, the deepest that mask with acceptance {rule!r} can run")
        if 1 < len(self.target.mask_token_ids) < depth:
            raise ValueError(
                f"depth {depth} needs as many mask ids, {len(self.target.mask_token_ids)} are given; "
                f"lower depth or give a single mask_token_id"
            )
        return tuple(d if trusted else verified_rows(d) for d in range(depth + 1))

    def admit(self, request: Request) -> None:
        self._ready[request.slot].fill_(0)

    def kind(self, span: Span) -> Hashable:
        speculation = span.request.speculation
        return (_is_trusted(speculation), span.depth, Guessing.of(speculation) is Guessing.COUPLED)

    def propose(self, group: Group) -> Draft:
        depth, device = group.spans[0].depth, group.slots.device
        rows = len(group.spans)
        ids = self.target.mask_token_ids
        masks = group.arena.keep(_mask_row, ids * depth if len(ids) == 1 else ids[:depth])
        if _is_trusted(group.spans[0].request.speculation):
            valid = torch.ones(rows, depth, dtype=torch.bool, device=device)
            return group.arena.keep(chain, depth, PROBE).draft(masks.expand(rows, -1), valid)
        tokens = torch.cat((self._proposals[group.slots, :depth], masks.repeat(depth + 1).expand(rows, -1)), dim=1)
        ready = torch.arange(depth, device=device) < self._ready[group.slots][:, None]
        # Node 0, the last real row, always exists; a candidate's probes are valid if the candidate is.
        nodes = torch.cat((torch.ones_like(ready[:, :1]), ready), dim=1)
        valid = torch.cat((ready, nodes.repeat_interleave(depth, dim=1)), dim=1)
        return group.arena.keep(_verified_shape, depth).draft(tokens, valid)

    def observe(self, group: Group, batch: ForwardBatch, logits: Logits, verdict: Verdict) -> None:
        depth = group.spans[0].depth
        if depth == 0 or _is_trusted(group.spans[0].request.speculation):
            self._ready.index_fill_(0, group.slots, 0)
            return
        node = verdict.leaf[group.indices] + 1
        first = depth + node * depth
        columns = 1 + first[:, None] + torch.arange(depth, device=node.device)
        # A node that was cut off has no probes: row 0 is read in their place, whose proposals will be rejected.
        rows = batch.decision_index[group.indices].gather(1, columns).clamp(min=0).flatten()
        positions = batch.positions[batch.decisions[rows]] + 1
        slots = [span.request.slot for span in group.spans for _ in range(depth)]
        # A proposal that is drawn with its position's noise is verified with the same noise. A rule that weighs
        # proposals treats it as a point mass, and then the most likely token is best. Penalties see only the known
        # tokens, not the proposals in between: an approximation that can only lower acceptance.
        coupled = Guessing.of(group.spans[0].request.speculation) is Guessing.COUPLED
        guess = self.sampler.draw if coupled else self.sampler.argmax
        guesses = guess(
            logits.decisions.index_select(0, rows), Rows(group.slots.repeat_interleave(depth), positions), slots
        )
        self._proposals[group.slots, :depth] = guesses.view(-1, depth)
        self._ready.index_fill_(0, group.slots, depth)


def _is_trusted(speculation: Speculation) -> bool:
    return RULES.get(speculation.acceptance or "exact").trusts_probes


def _mask_row(ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[depth] the mask token of each offset."""
    return torch.tensor(ids, dtype=torch.int64, device=device)


def _verified_shape(depth: int, device: torch.device) -> TreeShape:
    parents, roles = verified_parents(depth)
    return TreeShape.of(parents, roles, device)
