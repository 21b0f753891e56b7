"""The one place where logits become tokens: every token of every output comes from `Verifier.verify`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from stridelm.batch import CANDIDATE, Draft, ForwardBatch, Verdict
from stridelm.run.state import TokenTable
from stridelm.sample.sampler import Sampler
from stridelm.upload import upload
from stridelm.verify import RULES
from stridelm.verify.paths import DraftPaths
from stridelm.verify.rule import Rule, VerifyInput


class Verifier:
    def __init__(self, sampler: Sampler, table: TokenTable) -> None:
        self.sampler = sampler
        self._table = table
        self._rules: dict[str, Rule] = {}

    @torch.inference_mode()
    def verify(
        self, batch: ForwardBatch, draft: Draft, logits_MV: torch.Tensor, paths: DraftPaths | None = None
    ) -> Verdict:
        """Decide every span of the step by its own request's rule, and append what was emitted to the token table.
        paths: of the draft, if all known tokens have been emitted; without it, grammars wait for the device."""
        by_rule: dict[str, list[int]] = {}
        for i, span in enumerate(batch.spans):
            by_rule.setdefault(span.request.speculation.acceptance or "exact", []).append(i)
        parts = []
        for name, indices in by_rule.items():
            inputs = self._inputs(batch, draft, logits_MV, indices, paths)
            # A step that only runs prompt chunks may have no logits at all.
            decides = any(span.decides for span in inputs.spans)
            parts.append((indices, self._rule(name).decide(inputs) if decides else _undecided(inputs)))
        return parts[0][1] if len(parts) == 1 else _merge(len(batch.spans), parts)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Launch once, for padding, what only some requests' own options ask for: none is to wait for a compiler."""
        table = self._table
        none_R = torch.zeros(1, dtype=torch.int64, device=table.known.device)
        one_R1, two_RK, nobody_R = none_R[:, None], none_R.repeat(1, 2), none_R - 1
        one = np.ones((1, 1), dtype=bool)
        draft = Draft(one_R1, one_R1 - 1, one_R1 + CANDIDATE, one_R1 + 1, one_R1 + 1, one_R1 == 0, one, True, 1)
        verdict = self.sampler.ops.follow(
            draft, draft.valid, two_RK, two_RK, none_R == 0, nobody_R, table.tokens, table.known
        )
        table.commit(nobody_R, verdict, none_R, none_R)

    def _rule(self, name: str) -> Rule:
        if name not in self._rules:
            self._rules[name] = RULES.get(name)()
        return self._rules[name]

    def _inputs(
        self, batch: ForwardBatch, draft: Draft, logits_MV: torch.Tensor, indices: list[int], paths: DraftPaths | None
    ) -> VerifyInput:
        spans, nodes, slots, decides = batch.spans, batch.decision_index, batch.request_slots, batch.decides
        if len(indices) < len(spans):
            index = upload(indices, slots.device)
            spans = tuple(spans[i] for i in indices)
            nodes, slots, decides = nodes[index], slots[index], decides[index]
            draft = _select(draft, index, indices)
        rest = (batch, logits_MV, self.sampler, self._table, paths)
        return VerifyInput(spans, indices, slots, draft, nodes, decides, *rest)


def _select(draft: Draft, index: torch.Tensor, indices: list[int]) -> Draft:
    """The draft of some of the step's spans."""
    values = {f.name: getattr(draft, f.name) for f in fields(draft)}
    cut: dict[str, Any] = {name: value[index] for name, value in values.items() if isinstance(value, torch.Tensor)}
    return replace(draft, **cut, candidates=draft.candidates[indices])


def _undecided(inputs: VerifyInput) -> Verdict:
    """The verdict on spans that do not reach their last known token: nothing is emitted and no draft row is kept."""
    none_R = torch.zeros_like(inputs.slots)
    return Verdict(
        tokens=none_R[:, None],
        counts=none_R,
        rows=none_R[:, None] - 1,
        path=none_R[:, None].expand(-1, inputs.draft.width),
        kept=none_R,
        leaf=none_R - 1,
        drafted=none_R,
        accepted=none_R,
        reached=none_R,
    )


def _merge(spans: int, parts: list[tuple[list[int], Verdict]]) -> Verdict:
    """The parts of several rules as one Verdict, padded to the widest."""
    device = parts[0][1].counts.device
    merged: dict[str, torch.Tensor] = {}
    for name in (f.name for f in fields(Verdict)):
        values = [getattr(verdict, name) for _, verdict in parts]
        shape = (spans,) if values[0].dim() == 1 else (spans, max(v.shape[1] for v in values))
        target = torch.zeros(shape, dtype=torch.int64, device=device)
        for (indices, _), value in zip(parts, values, strict=True):
            columns = value.reshape(len(indices), -1)
            target.view(spans, -1)[upload(indices, device), : columns.shape[1]] = columns
        merged[name] = target
    return Verdict(**merged)
