"""Trees, drawn tokens and token tables for the kernels of kernels/walk.py, and what the rules make of them."""

from __future__ import annotations

import random

import torch

from stridelm.draft.base import TreeShape
from stridelm.run.state import TokenTable
from stridelm.types import CANDIDATE, PROBE, Draft, Verdict
from support.attention import random_tree

VOCAB, SPANS, LENGTH = 6, 14, 40
NUMBERS = ("counts", "kept", "leaf", "drafted", "accepted", "reached")


def random_draft(rng: random.Random, width: int) -> Draft:
    """Trees of all shapes, with probes and dead rows; live siblings hold different tokens."""
    shapes, tokens, live = [], [], []
    for _ in range(SPANS):
        parents = tuple(random_tree(rng, width)) if rng.random() < 0.5 else tuple(range(-1, width - 1))
        roles, said, alive = [], [], []
        for row, parent in enumerate(parents):
            under_probe = parent >= 0 and roles[parent] == PROBE
            roles.append(PROBE if under_probe or rng.random() < 0.1 else CANDIDATE)
            taken = {said[other] for other in range(row) if parents[other] == parent}
            free = [token for token in range(VOCAB) if token not in taken]
            said.append(rng.choice(free or range(VOCAB)))
            alive.append(bool(free) and (parent < 0 or alive[parent]) and rng.random() < 0.95)
        shapes.append(TreeShape.of(parents, roles, CPU))
        tokens.append(said)
        live.append(alive)
    draft = shapes[0].draft(torch.tensor(tokens), torch.tensor(live))
    for name in ("parents", "roles", "depths", "ancestors"):
        setattr(draft, name, torch.stack([getattr(shape, name) for shape in shapes]))
    draft.max_depth = max(shape.max_depth for shape in shapes)
    return draft


def agreeable(rng: random.Random, draft: Draft) -> torch.Tensor:
    """[R, K] drawn tokens that many of the candidates hold; -1 where nothing is drawn."""
    drawn = torch.tensor([[rng.randrange(VOCAB) for _ in range(draft.width + 1)] for _ in range(SPANS)])
    candidates = draft.live & (draft.roles == CANDIDATE)
    drawn[:, 1:][~candidates] = -1
    for span, row in candidates.nonzero().tolist():
        if rng.random() < 0.6:
            drawn[span, draft.parents[span, row] + 1] = draft.tokens[span, row]
    return drawn


class Tables:
    """A token table twice: as the kernel leaves it, and as TokenTable does. Half the requests are padding."""

    def __init__(self, rng: random.Random, spans: int) -> None:
        self.padding = torch.tensor([rng.random() < 0.2 for _ in range(spans)])
        self.slots = torch.tensor(rng.sample(range(spans + 3), spans)).masked_fill(self.padding, -1)
        self.decides = torch.tensor([rng.random() < 0.8 for _ in range(spans)])
        self.ours, self.theirs = (TokenTable(spans + 3, LENGTH, CPU) for _ in range(2))
        for table in (self.ours, self.theirs):
            table.tokens.copy_(torch.arange(table.tokens.numel()).view(table.tokens.shape) + 1000)
            table.known.copy_(torch.arange(spans + 3) * 2)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.decides, self.slots, self.ours.tokens, self.ours.known

    def check(self, got: Verdict, wanted: Verdict) -> None:
        """The same verdicts as far as they say anything, 0 beyond, and the same table."""
        real = ~self.padding
        self.theirs.append(self.slots[real], wanted.tokens[real], wanted.counts[real])
        assert torch.equal(self.ours.tokens, self.theirs.tokens)
        assert torch.equal(self.ours.known, self.theirs.known)
        for name in NUMBERS:
            assert torch.equal(getattr(got, name)[real], getattr(wanted, name)[real]), name
        assert not bool(got.counts[self.padding].any()) and not bool(got.kept[self.padding].any())
        for name, counts in (("tokens", got.counts), ("rows", got.counts), ("path", got.kept)):
            said, expected = getattr(got, name), getattr(wanted, name)
            assert said.dtype == torch.int64
            within = torch.arange(said.shape[1]) < counts[:, None]
            narrow = min(said.shape[1], expected.shape[1])
            assert not bool(within[:, narrow:].any())
            assert torch.equal(said[:, :narrow][within[:, :narrow]], expected[:, :narrow][within[:, :narrow]]), name
            assert not bool(said[~within].any()), name


def trusted(drawn: torch.Tensor, nodes: torch.Tensor, decides: torch.Tensor, sure: torch.Tensor) -> Verdict:
    """What verify/trust.py makes of windows whose rows it has drawn and judged."""
    live = nodes >= 0
    sure = live & sure
    sure[:, 0] = True
    counts = torch.where(decides, sure.long().cumprod(1).sum(1), 0)
    drafted, zero, accepted = live[:, 1:].sum(1), torch.zeros_like(counts), (counts - 1).clamp(min=0)
    path = zero[:, None].expand(-1, drawn.shape[1] - 1)
    reached = torch.minimum(accepted + 1, drafted)
    return Verdict(drawn, counts, nodes, path, zero, zero - 1, drafted, accepted, reached)
