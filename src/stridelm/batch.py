"""One step's rows and its verdict as tensors: what drafters, the model, attention and verification exchange.

Nothing here imports torch at run time; tensors are named in annotations only.

Legend for tensor shapes: S slots of the request table, R spans of a step, W width of the widest draft of a step, N rows
of a step, M decision rows of a step (rows from whose logits a token may be drawn), K = W + 1 maximum tokens that a span
can emit.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

    from stridelm.types import Span

CANDIDATE = 0
"""Role of a draft row that holds a guessed token, to be checked against its parent's verdict."""
PROBE = 1
"""Role of a draft row that holds a mask token: its logits propose tokens, and it is never committed."""


@dataclass(slots=True)
class Draft:
    """Rows that fill the spans' bounds: one tree per span, children after their parents.

    Siblings hold different tokens. A row whose parent is not valid is not valid either.
    """

    tokens: torch.Tensor
    """[R, W] int64 token ids."""
    parents: torch.Tensor
    """[R, W] int64 row of the parent in this tree; -1 is the span's last real row."""
    roles: torch.Tensor
    """[R, W] int64, CANDIDATE or PROBE."""
    depths: torch.Tensor
    """[R, W] int64: distance from the last real row; a child of it has depth 1."""
    ancestors: torch.Tensor
    """[R, W] int64 bitmask: bit j is set if row j is the row itself or one of its ancestors."""
    valid: torch.Tensor
    """[R, W] bool."""
    candidates: np.ndarray
    """[R, W] bool, on the host, which knows every tree's shape: the rows that are candidates if they are valid."""
    is_chain: bool = True
    """Every candidate j has depth j + 1 and exactly the ancestors 0..j, so an accepted path is already in place."""
    max_depth: int = 0
    """Host-side bound on the depth of a valid candidate."""
    probs: torch.Tensor | None = None
    """[R, W, V] float32: the distribution that each row's token was drawn from; None: every row is a point mass
    on its token."""
    source: torch.Tensor | None = None
    """[R] int64 which of its drafter's sources each draft comes from; None: the first."""

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def valid_candidates(self) -> torch.Tensor:
        """[R, W] bool."""
        return self.valid & (self.roles == CANDIDATE)


@dataclass(slots=True)
class ForwardBatch:
    """Plan and draft as tensors, as the model and attention see them.

    Rows are ordered by span, a span's real rows before its draft rows.
    """

    ids: torch.Tensor
    """[N] int64."""
    positions: torch.Tensor
    """[N] int64: a draft row's position is its parent's plus one."""
    slots: dict[str, torch.Tensor]
    """Page group -> [N] int64 index into the pool where the row's KV is written (0, the null slot, for padding)."""
    geometry: Geometry
    spans: tuple[Span, ...]
    request_slots: torch.Tensor
    """[R] int64 row of each span's request in the request table."""
    decisions: torch.Tensor
    """[M] int64: rows of the batch from which a token may be drawn."""
    decision_span: torch.Tensor
    """[M] int64 span of each decision row."""
    decision_draft: torch.Tensor
    """[M] int64 draft row of each decision row, -1 for the last real row."""
    decision_index: torch.Tensor
    """[R, K] int64: decision row of the last real row (column 0) and of draft row j (column j + 1); -1 where none."""
    decision_host: np.ndarray
    """[M, 2] host copy of `decision_span` and `decision_draft`."""
    reals: torch.Tensor
    """[R] int64 real rows of each span, exact."""
    decides: torch.Tensor
    """[R] bool."""
    grid: bool = False
    """Every span has K decision rows, in order: decision row r K + j is node j of span r."""
    every_row: bool = False
    """The decision rows are all rows, in order."""
    prompt_rows: torch.Tensor | None = None
    """[P] int64 rows that are followed by another prompt token, for requests that read their prompt's rows."""
    whole: tuple[bool, ...] | None = None
    """Of each span, whether the last states of all its rows are needed, and not only those of its decision rows; None:
    of every span."""

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows of each span in this batch, padding included."""
        return self.geometry.bounds


@dataclass(slots=True)
class Geometry:
    """All that attention may read. Real row i of a span sees storage [0, start + i]; a draft row sees the
    `base = start + real` real entries and the draft rows of its own span that are set in its bitmask."""

    bounds: tuple[int, ...]
    """Maximum rows of each span, which lay out the rows of the batch; without padding, the exact numbers."""
    firsts: torch.Tensor
    """[R] int32 first row of each span."""
    counts: torch.Tensor
    """[R] int32: real rows, and the draft rows that there is room for."""
    starts: torch.Tensor
    """[R] int32 KV entries committed before the span."""
    reals: torch.Tensor
    """[R] int32."""
    draft_rows: torch.Tensor
    """[N] int64 draft row of each row; negative for real rows."""
    ancestors: torch.Tensor
    """[N] int64 bitmask over the span's draft rows; 0 for real rows and padding."""
    positions: torch.Tensor
    """[N] int64."""
    tables: dict[str, torch.Tensor]
    """Page group -> [R, P] int32 page ids of each span's request, enough for what the span may write."""
    page_size: int
    max_keys: int
    """Upper bound on the entries that any row sees."""
    is_chain: bool
    """The ancestors of every draft row are contiguous in storage."""
    ends: tuple[int, ...] = ()
    """Upper bound on the entries that each span's rows see; empty where only `max_keys` is known."""
    kept: dict[Hashable, object] = field(default_factory=dict)
    """Cache for what a backend derives from this geometry. A captured step keeps its geometry, and with it the tensors
    that its graph reads, whereas a shared cache might evict them."""


@dataclass(frozen=True, slots=True)
class Onward:
    """The rows of a step whose last states are needed."""

    rows: torch.Tensor
    """[M] int64, span after span; there may be none."""
    geometry: Geometry
    """What attention reads for these rows alone."""


@dataclass(slots=True)
class States:
    """Hidden states of a step's rows, for drafters that read them. Rows that did not go on are zero where they have no
    state."""

    final: torch.Tensor
    """[N, H] after the final norm: what the head turns into logits."""
    inputs: dict[int, torch.Tensor]
    """Layer -> [N, H] the residual stream that it reads, for the layers that are tapped."""


@dataclass(slots=True)
class Verdict:
    """What verification decided, on the device. `path[r, :kept[r]]` are the draft rows to commit, in order."""

    tokens: torch.Tensor
    """[R, K] int64 emitted tokens."""
    counts: torch.Tensor
    """[R] int64 number of emitted tokens; 0 for spans that do not decide."""
    rows: torch.Tensor
    """[R, K] int64 decision row that each emitted token was drawn from."""
    path: torch.Tensor
    """[R, W] int64 accepted draft rows."""
    kept: torch.Tensor
    """[R] int64 number of draft rows whose KV is kept."""
    leaf: torch.Tensor
    """[R] int64 draft row that the next step grows from, -1 for the last real row."""
    drafted: torch.Tensor
    """[R] int64 number of tokens that were drafted."""
    accepted: torch.Tensor
    """[R] int64 number of drafted tokens that were emitted."""
    reached: torch.Tensor
    """[R] int64 number of draft positions that were checked: the accepted ones, and the rejected one if there is
    any."""
