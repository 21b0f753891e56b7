"""Trees, drawn tokens and token tables, for walks with Triton and with torch."""

from __future__ import annotations

import random

import torch

from stridelm.batch import CANDIDATE, PROBE, Draft, Verdict
from stridelm.draft.base import TreeShape
from stridelm.kernels.plain_step import PlainStepOps
from stridelm.kernels.step_ops import StepOps
from stridelm.run.state import TokenTable
from support.oracles.attention import random_tree

VOCAB, SPANS = 6, 14
SLOTS, LENGTH = SPANS + 3, 40
NUMBERS = ("counts", "kept", "leaf", "drafted", "accepted", "reached")
SKELETON = ("parents", "roles", "depths", "ancestors")


def random_draft(rng: random.Random, width: int, device: str = "cpu") -> Draft:
    """Trees and chains, with probes and invalid rows; valid siblings hold different tokens."""
    shapes, tokens, valid = [], [], []
    for _ in range(SPANS):
        parents = tuple(random_tree(rng, width)) if rng.random() < 0.5 else tuple(range(-1, width - 1))
        roles: list[int] = []
        said: list[int] = []
        alive: list[bool] = []
        for row, parent in enumerate(parents):
            under_probe = parent >= 0 and roles[parent] == PROBE
            roles.append(PROBE if under_probe or rng.random() < 0.1 else CANDIDATE)
            taken = {said[other] for other in range(row) if parents[other] == parent}
            free = [token for token in range(VOCAB) if token not in taken]
            said.append(rng.choice(free or range(VOCAB)))
            alive.append(bool(free) and (parent < 0 or alive[parent]) and rng.random() < 0.95)
        shapes.append(TreeShape.of(parents, roles, torch.device(device)))
        tokens.append(said)
        valid.append(alive)
    draft = shapes[0].draft(torch.tensor(tokens, device=device), torch.tensor(valid, device=device))
    for name in SKELETON:
        setattr(draft, name, torch.stack([getattr(shape, name) for shape in shapes]))
    draft.max_depth = max(shape.max_depth for shape in shapes)
    return draft


def agreeable(rng: random.Random, draft: Draft) -> torch.Tensor:
    """[R, K] drawn tokens that match many of the candidates; -1 where nothing is drawn."""
    drawn = torch.tensor([[rng.randrange(VOCAB) for _ in range(draft.width + 1)] for _ in range(SPANS)])
    candidates = (draft.valid & (draft.roles == CANDIDATE)).cpu()
    parents, tokens = draft.parents.tolist(), draft.tokens.tolist()
    drawn[:, 1:][~candidates] = -1
    for span, row in candidates.nonzero().tolist():
        if rng.random() < 0.6:
            drawn[span, parents[span][row] + 1] = tokens[span][row]
    return drawn.to(draft.tokens.device)


def random_nodes(rng: random.Random, width: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([[rng.randrange(1000) for _ in range(width + 1)] for _ in range(SPANS)], device=device)


def random_choice(rng: random.Random, width: int, device: str = "cpu") -> torch.Tensor:
    """[R, W] bool: which rows some rule would keep."""
    return torch.tensor([[rng.random() < 0.7 for _ in range(width)] for _ in range(SPANS)], device=device)


def check_follow(width: int, device: str, ops: StepOps, seeds: int) -> None:
    """Down the first rows that are kept, whatever was drawn."""
    longest = 0
    for seed in range(seeds):
        rng = random.Random(100 * width + seed)
        draft, tables = random_draft(rng, width, device), Tables(rng, device)
        rest = random_choice(rng, width, device), agreeable(rng, draft), random_nodes(rng, width, device)
        verdict = ops.follow(draft, *rest, *tables.arguments())
        tables.check(verdict, PlainStepOps().follow(draft, *rest, *tables.twins()))
        longest = max(longest, int(verdict.kept.max()))
    assert longest >= min(width, 2)


class Tables:
    """Requests, some of them padding, and two copies of their token table: one for Triton, one for torch."""

    def __init__(self, rng: random.Random, device: str = "cpu") -> None:
        self.padding = torch.tensor([rng.random() < 0.2 for _ in range(SPANS)], device=device)
        self.slots = torch.tensor(rng.sample(range(SLOTS), SPANS), device=device).masked_fill(self.padding, -1)
        self.decides = torch.tensor([rng.random() < 0.8 for _ in range(SPANS)], device=device)
        self.ours, self.theirs = (TokenTable(SLOTS, LENGTH, torch.device(device)) for _ in range(2))
        for table in (self.ours, self.theirs):
            table.tokens.copy_(torch.arange(table.tokens.numel()).view(table.tokens.shape) + 1000)
            table.known.copy_(torch.arange(SLOTS + 1) * 2)

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.decides, self.slots, self.ours.tokens, self.ours.known

    def twins(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.decides, self.slots, self.theirs.tokens, self.theirs.known

    def check(self, got: Verdict, wanted: Verdict) -> None:
        """The verdicts agree wherever they are defined, Triton's is 0 beyond, and the token tables are equal."""
        real = ~self.padding
        assert torch.equal(self.ours.tokens, self.theirs.tokens)
        assert torch.equal(self.ours.known, self.theirs.known)
        for name in NUMBERS:
            assert torch.equal(getattr(got, name)[real], getattr(wanted, name)[real]), name
        assert not bool(got.counts[self.padding].any()) and not bool(got.kept[self.padding].any())
        for name, counts in (("tokens", got.counts), ("rows", got.counts), ("path", got.kept)):
            said, expected = getattr(got, name), getattr(wanted, name)
            assert said.dtype == torch.int64
            within = torch.arange(said.shape[1], device=said.device) < counts[:, None]
            assert not bool(said[~within].any()), name
            shared = min(said.shape[1], expected.shape[1])  # torch's is only as wide as its deepest tree
            assert not bool(within[:, shared:].any())
            of_real = within[:, :shared] & real[:, None]
            assert torch.equal(said[:, :shared][of_real], expected[:, :shared][of_real]), name
