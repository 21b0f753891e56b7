"""The acceptance rule's interface: from the logits of its spans' decision rows to their part of the Verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from stridelm.batch import Draft, ForwardBatch, Verdict
from stridelm.params import Speculation
from stridelm.run.state import TokenTable
from stridelm.sample.sampler import Sampler
from stridelm.types import Span
from stridelm.upload import upload
from stridelm.verify.paths import DraftPaths


@dataclass(frozen=True)
class VerifyInput:
    """The spans of one step that one rule decides, R of them. All tensors are cut down to these spans, except the
    batch's own and the logits."""

    spans: tuple[Span, ...]
    places: list[int]
    """Index of each span in the whole step."""
    slots: torch.Tensor
    """[R] int64 rows of the request table."""
    draft: Draft
    nodes: torch.Tensor
    """[R, K] int64 decision row of the last real row and of each draft row; -1 where there is none."""
    decides: torch.Tensor
    """[R] bool."""
    batch: ForwardBatch
    logits_MV: torch.Tensor
    """Raw logits of all decision rows of the step."""
    sampler: Sampler
    table: TokenTable
    paths: DraftPaths | None = None
    """Of the whole step, if any of its requests has a grammar and the host has read all known tokens."""

    @property
    def covers_step(self) -> bool:
        """Whether these are all spans of the step, so that its decision rows are theirs."""
        return len(self.spans) == len(self.batch.spans)

    @property
    def longest(self) -> int:
        """An upper bound on every request's length, known on the host."""
        return max(span.start + span.real for span in self.spans)

    @property
    def uses_history(self) -> bool:
        """Whether any request's distribution depends on its earlier tokens beyond the model (known on the host)."""
        return any(span.request.params.uses_history for span in self.spans)

    def asked(self, number: Callable[[Speculation], float]) -> torch.Tensor:
        """[R] float32: a number from each request's speculation. Equal numbers need no copy from the host; a captured
        step has only such."""
        values = [number(span.request.speculation) for span in self.spans]
        if len(set(values)) == 1:
            return torch.full((len(values),), values[0], dtype=torch.float32, device=self.slots.device)
        return upload(np.array(values, dtype=np.float32), self.slots.device)


class Rule:
    """Base of all rules."""

    name: ClassVar[str]
    lossless: ClassVar[bool]
    """The output has the same distribution as plain decoding's."""
    coupled: ClassVar[bool] = False
    """The output is plain decoding's, token for token."""
    all_or_nothing: ClassVar[bool] = False
    """The depth changes the output: spans are scheduled at full depth or deferred."""
    trusts_probes: ClassVar[bool] = False
    """The probes' own tokens are emitted: a draft is a window of probes."""
    simulated: ClassVar[bool] = False
    """The number of emitted tokens is drawn at random, whatever the logits are. For benchmarks."""
    like: ClassVar[str | None] = None
    """The rule whose draft rows this one decides too."""
    reads_probs: ClassVar[bool] = False
    """It weighs a guess by the distribution that the guess was drawn from: a drafter that has one draws with noise of
    its own."""
    chains_only: ClassVar[bool] = False
    """It cannot decide a draft that branches."""

    @classmethod
    def works_with(cls, rules: frozenset[str], branches: bool = False) -> bool:
        """Whether rows made for these rules, in drafts that may branch or not, can be decided by this one."""
        return (cls.like or cls.name) in rules and not (cls.chains_only and branches)

    def decide(self, inputs: VerifyInput) -> Verdict:
        """Decide what is emitted, and append it to the token table. At least one of the spans decides."""
        raise NotImplementedError
