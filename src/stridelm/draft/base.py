"""The drafter's interface, and the shapes of trees.

Before the forward pass, a drafter turns the device state of all its requests into one Draft; afterwards it may observe
the verdict. Drafters are chosen per request, so a batch may contain requests of several. docs/add_a_drafter.md is the
checklist for a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from stridelm.batch import CANDIDATE, Draft, ForwardBatch, Verdict
from stridelm.params import Speculation
from stridelm.types import MAX_DRAFT_ROWS, DraftKV, Found, Request, Span
from stridelm.upload import upload

if TYPE_CHECKING:
    from stridelm.arena import Arena
    from stridelm.cache.layout import LayerStates
    from stridelm.draft.given import Given
    from stridelm.models.layers.decoder import Decoder
    from stridelm.run.eager import Logits
    from stridelm.run.heads import TargetRuntime
    from stridelm.run.state import TokenTable
    from stridelm.sample.sampler import Sampler


@dataclass(frozen=True)
class TargetInfo:
    """What a drafter may know of the model it drafts for."""

    vocab_size: int
    max_length: int
    max_num_seqs: int
    mask_token_ids: tuple[int, ...]
    mask_depth: int | None
    """Deepest window the checkpoint was trained for, if it states one."""
    device: torch.device
    path: Path | None = None
    """Its checkpoint directory."""
    config: Any = None
    """Its transformers config."""
    heads: Mapping[str, Path] = field(default_factory=dict)
    """Drafter -> directory of its weights, named by the user or found in the model's own directory."""
    weighted: bool = True
    """Whether weights are read from files; otherwise they are random."""


@dataclass(frozen=True)
class Group:
    """The spans of one step that one drafter serves: R of them, in the step's order."""

    spans: tuple[Span, ...]
    places: list[int]
    """Index of each span in the whole step."""
    indices: torch.Tensor
    """[R] int64 `places` on the device."""
    slots: torch.Tensor
    """[R] int64 rows of the request table."""
    table: TokenTable
    bounds: torch.Tensor | None = None
    """[R] int64 draft rows that each span has room for, if a captured step reads them from the device."""

    def room(self) -> torch.Tensor:
        """[R] int64 draft rows that each span has room for."""
        return per_span([span.draft for span in self.spans], self.slots.device) if self.bounds is None else self.bounds

    @property
    def arena(self) -> Arena:
        return self.table.arena


@dataclass(frozen=True)
class MemoryNeed:
    """The device memory that a drafter needs."""

    parameters: int = 0
    """Number of its parameters."""
    layers: LayerStates = ()
    """States of its layers that keep KV in the target's pages."""


class Drafter:
    """Base of all drafters. Subclasses state what they are and override what they need."""

    name: ClassVar[str]
    rules: ClassVar[frozenset[str]] = frozenset({"exact"})
    """Acceptance rules that the drafter's rows are made for."""
    default_depth: ClassVar[int] = 0
    takes: ClassVar[str | None] = None
    """A few words on the weights that drafter_model may name for it; None: it has none of its own."""
    branches: ClassVar[bool] = False
    """Its candidates may have siblings."""
    host_bound: ClassVar[bool] = False
    """It proposes on the host, from tokens that the host has read. Its requests are planned only when they have nothing
    in flight, and a captured step of theirs begins after the draft. All other drafters work on device tensors alone."""
    keeps_kv: ClassVar[bool] = False
    """It keeps KV of its own: it observes prompt chunks too, with all its spans as one Group, and pages that it has not
    written are a prefix miss for its requests."""
    follows: ClassVar[bool] = False
    """It guesses chains with layers of its own, and `observe` keeps these up to date whoever drafts, so that another
    drafter may draft with it."""
    looks_ahead: ClassVar[bool] = False
    """Where steps land before the next is planned, it is asked what it will draft (`found`), and rows are planned for
    that alone."""
    needs_states: ClassVar[bool] = False
    """It guesses from what steps have computed of the request's last tokens, so it has nothing in the step that ends a
    prompt."""
    must_propose: ClassVar[bool] = False
    """Of one that follows: `propose` does a part of that, so it may be left out for no request that drafts."""

    def __init__(self, target: TargetInfo, sampler: Sampler, runtime: TargetRuntime | None = None) -> None:
        """runtime: the target as it runs; None where there is no model."""
        self.target = target
        self.sampler = sampler

    def join(self, get: Callable[[str], Drafter]) -> None:
        """Called once it is made. get: returns the engine's drafter of a name, for those that draft with another."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Where its drafts come from, in the order of `Draft.source`."""
        return (self.name,)

    @property
    def reads_every_row(self) -> bool:
        """Whether `observe` reads the states of all rows that are kept, and not only of the one from which the next
        step grows (StepOps.keep_leaves). Of a model whose last layers store nothing, others have none
        (run/onward.py)."""
        return False

    @property
    def draft_kv(self) -> DraftKV | None:
        """What the ledger must know about its KV; None if it keeps none."""
        return None

    @classmethod
    def recognises(cls, given: Given) -> bool:
        """Whether a directory holds weights for this drafter."""
        return False

    @classmethod
    def why_not(cls, target: TargetInfo) -> str | None:
        """Why this drafter cannot serve the target, with the remedy; None if it can."""
        return None

    @classmethod
    def weights_of(cls, target: TargetInfo) -> str | None:
        """The drafter whose weights it drafts with; None if it needs none. `why_not` has no objection."""
        return cls.name if cls.takes else None

    @classmethod
    def check_weights(cls, target: TargetInfo, model: Decoder) -> None:
        """Raise ValueError if its weights do not fit, by the names, shapes and dtypes in their files' headers. model:
        the target on the meta device; `why_not` has no objection."""

    @classmethod
    def memory_need(cls, target: TargetInfo, model: Decoder) -> MemoryNeed:
        """The memory to reserve for it, if the engine is started with this drafter."""
        return MemoryNeed()

    @classmethod
    def usual_depth(cls, target: TargetInfo) -> int:
        """The depth of a request that does not specify one."""
        return cls.default_depth

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        """Draft rows needed at depth 0, 1, ..., nondecreasing. Raises ValueError if the depth cannot be run."""
        return (0,)

    def depth_of(self, speculation: Speculation) -> int:
        """The requested depth, or the default. Raises ValueError for more levels than a draft may have rows."""
        depth = self.default_depth if speculation.depth is None else speculation.depth
        if depth > MAX_DRAFT_ROWS:
            raise ValueError(f"depth {depth} is over {MAX_DRAFT_ROWS}, the most rows a draft may have; lower it")
        return depth

    def admit(self, request: Request) -> None:
        """Called when a request takes its slot, whether it is new or was preempted."""

    def leave(self, request: Request) -> None:
        """Called when a request has finished or was aborted: drop its state. Not called at preemption."""

    def forget(self) -> None:
        """Drop all that was learned from requests that have left. Running requests keep their state."""

    def kind(self, span: Span) -> Hashable:
        """Spans of one kind may share a Group; those whose drafts differ in skeleton must differ in kind. Depends on
        the request's speculation and on the draft's depth alone."""
        return None

    def found(self, requests: Sequence[Request], table: TokenTable) -> Sequence[Found]:
        """What each request's next draft will have if there is room for all of it. For drafters that look ahead; all
        requests are running, and nothing of theirs is in flight."""
        raise NotImplementedError

    def propose(self, group: Group) -> Draft:
        """Draft for the group's spans, up to each one's bound. The draft is as wide as the widest bound among them."""
        raise NotImplementedError

    def observe(self, group: Group, batch: ForwardBatch, logits: Logits, verdict: Verdict) -> None:
        """Learn from the step. `batch` and `verdict` cover the whole step; `group.indices` are this drafter's spans."""


@dataclass(frozen=True)
class TreeShape:
    """A draft tree's skeleton, the same for all requests: parent, depth, ancestors and role of each of W rows."""

    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    roles: torch.Tensor
    candidates: np.ndarray
    is_chain: bool
    max_depth: int
    _repeated: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By number of requests."""

    @classmethod
    def of(cls, parents: Sequence[int], roles: Sequence[int], device: torch.device) -> TreeShape:
        """Build the skeleton. Children come after their parents; raises AssertionError if not, or over 64 rows."""
        assert len(parents) <= MAX_DRAFT_ROWS
        depths: list[int] = []
        ancestors: list[int] = []
        for row, parent in enumerate(parents):
            assert -1 <= parent < row
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            ancestors.append(1 << row | (ancestors[parent] if parent >= 0 else 0))
        candidates = [row for row, role in enumerate(roles) if role == CANDIDATE]
        is_chain = all(ancestors[row] == (1 << (row + 1)) - 1 for row in candidates)
        signed = [mask - (1 << 64) if mask >> 63 else mask for mask in ancestors]
        return cls(
            torch.tensor(parents, dtype=torch.int64, device=device),
            torch.tensor(depths, dtype=torch.int64, device=device),
            torch.tensor(signed, dtype=torch.int64, device=device),
            torch.tensor(roles, dtype=torch.int64, device=device),
            np.array([role == CANDIDATE for role in roles], dtype=bool),
            is_chain,
            max((depths[row] for row in candidates), default=0),
        )

    def draft(self, tokens_RW: torch.Tensor, live_RW: torch.Tensor, probs_RWV: torch.Tensor | None = None) -> Draft:
        """A draft of this shape for R requests. probs_RWV: what the tokens were drawn from; None: point masses."""
        parents, roles, depths, ancestors, candidates = self._for(len(tokens_RW))
        return Draft(
            tokens=tokens_RW,
            parents=parents,
            roles=roles,
            depths=depths,
            ancestors=ancestors,
            valid=live_RW,
            candidates=candidates,
            is_chain=self.is_chain,
            max_depth=self.max_depth,
            probs=probs_RWV,
        )

    def _for(self, requests: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
        """The skeleton of so many requests, which nobody writes to."""
        found = self._repeated.get(requests)
        if found is None:
            parts = (self.parents, self.roles, self.depths, self.ancestors)
            parents, roles, depths, ancestors = (part.expand(requests, -1) for part in parts)
            candidates = np.broadcast_to(self.candidates, (requests, len(self.candidates)))
            found = self._repeated[requests] = parents, roles, depths, ancestors, candidates
        return found


def chain(length: int, role: int, device: torch.device) -> TreeShape:
    """A chain of `length` rows: a tree whose parents are i - 1."""
    return TreeShape.of(range(-1, length - 1), [role] * length, device)


def within_bounds(group: Group, width: int) -> torch.Tensor:
    """[R, width] bool: draft rows that each span has room for."""
    return group.arena.keep(numbers, width) < group.room()[:, None]


def numbers(count: int, device: torch.device) -> torch.Tensor:
    """[0, count) int64."""
    return torch.arange(count, device=device)


def per_span(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """[R] int64 from the host. Equal values need no copy; a captured step has only such."""
    if len(set(values)) == 1:
        return torch.full((len(values),), values[0], dtype=torch.int64, device=device)
    return upload(values, device)


def point_masses(tokens_RW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, W, V] float32: every row has all its probability on its token."""
    certain = torch.zeros(*tokens_RW.shape, vocab_size, device=tokens_RW.device)
    return certain.scatter_(2, tokens_RW[:, :, None], 1.0)


def empty_draft(rows: int, arena: Arena) -> Draft:
    """An empty draft for `rows` spans, as plain decoding has it."""
    return arena.keep(_empty, rows)


def _empty(rows: int, device: torch.device) -> Draft:
    tokens = torch.zeros(rows, 0, dtype=torch.int64, device=device)
    return chain(0, CANDIDATE, device).draft(tokens, tokens.bool())
