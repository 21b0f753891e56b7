"""A test bench for the verifier: real drafters, rules and sampler, many requests at once, and a model that is a table.

The model's logits are a function of the last three tokens, so the joint distribution of a few output tokens is known
exactly, and a step is so cheap that 200,000 requests can be sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from stridelm import SamplingParams
from stridelm.batch import CANDIDATE, Draft, ForwardBatch, Geometry, States
from stridelm.draft import DRAFTERS
from stridelm.draft.base import Drafter, Group, TargetInfo, TreeShape
from stridelm.draft.dispatch import Drafters
from stridelm.draft.settle import settle
from stridelm.kernels.noise import DRAFT, attempt_stream, gumbel
from stridelm.kernels.step_ops import StepOps
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.run.state import TokenTable
from stridelm.sample.sampler import Sampler
from stridelm.sample.table import SamplingTable
from stridelm.types import Request, Span, Status
from stridelm.verify.verifier import Verifier
from support.doubles.stand import lossless_rules
from support.doubles.tree_drafter import registered
from support.oracles.sampling import probabilities

VOCAB = 4
DEPENDS_ON = 3
LENGTH = 3
"""The number of tokens whose joint distribution is checked."""
PROMPT = (1, 2, 2, 1)


class NoisyTree(Drafter):
    """Guesses from the noise alone, two at every node: as strongly dependent on the target's draw as a draft can be."""

    name = "noisy_tree"
    default_depth = 2
    branches = True

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        return (0, 2, 6)

    def propose(self, group: Group) -> Draft:
        width = max(span.draft for span in group.spans)
        shape = TreeShape.of((-1, -1, 0, 0, 1, 1)[:width], [CANDIDATE] * width, group.slots.device)
        table = self.sampler.table
        guesses = []
        for depth in (1, 2):
            position = group.table.known[group.slots] + depth - 1
            noise = gumbel(table.seed[group.slots], position, table.sample_index[group.slots], self.target.vocab_size)
            guesses.append(noise.topk(2).indices.repeat(1, 2 ** (depth - 1)))
        tokens = torch.cat(guesses, 1)[:, :width]
        return shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))


class BlindTree(NoisyTree):
    """The same tree with guesses that are independent of everything."""

    name = "blind_tree"

    def propose(self, group: Group) -> Draft:
        draft = super().propose(group)
        generator = torch.Generator().manual_seed(int(group.table.tokens.sum()))
        shape = (*draft.tokens[:, ::2].shape, self.target.vocab_size)
        pairs = torch.rand(shape, generator=generator).argsort(-1)[..., :2]
        return replace(draft, tokens=pairs.flatten(1).to(draft.tokens.device))


class SampledTree(Drafter):
    """The same tree drawn from a distribution of the drafter's own, siblings without replacement."""

    name = "sampled_tree"
    default_depth = 2
    branches: ClassVar[bool] = True
    parents: ClassVar[tuple[int, ...]] = (-1, -1, 0, 0, 1, 1)
    siblings: ClassVar[int] = 2
    noise: ClassVar[float] = 1.0
    claims: ClassVar[bool] = True
    """Whether the draft includes the distributions that its tokens were drawn from."""

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        return (0, 2, 6)

    def kind(self, span: Span) -> Hashable:
        return span.depth

    def propose(self, group: Group) -> Draft:
        slots, known, vocab = group.slots, group.table.known[group.slots], self.target.vocab_size
        seeds, samples = self.sampler.table.seed[slots], self.sampler.table.sample_index[slots]
        logits_VV = 1.5 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(1)).to(slots.device)
        last = group.table.tokens[slots].gather(1, known[:, None] - 1)
        tokens, probs = [], []
        for depth in range(group.spans[0].depth):
            q = logits_VV[last].softmax(-1)
            g = gumbel(seeds, known + depth, samples, vocab, attempt_stream(DRAFT, known))
            last = (q.log() + self.noise * g[:, None]).topk(self.siblings).indices.flatten(1)
            tokens.append(last)
            probs.append(q.repeat_interleave(self.siblings, 1))
        drawn = torch.cat(tokens, 1)
        shape = TreeShape.of(self.parents[: drawn.shape[1]], [CANDIDATE] * drawn.shape[1], slots.device)
        valid = torch.ones_like(drawn, dtype=torch.bool)
        return shape.draft(drawn, valid, torch.cat(probs, 1) if self.claims else None)


class SampledChain(SampledTree):
    """A chain of three, drawn in the same way."""

    name = "sampled_chain"
    default_depth = 3
    branches = False
    parents = (-1, 0, 1)
    siblings = 1

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        return (0, 1, 2, 3)


class ArgmaxTree(SampledTree):
    """The most likely tokens of the same distribution, without randomness."""

    name = "argmax_tree"
    noise = 0.0
    claims = False


DRAWN = (SampledTree, SampledChain)
TREES = (NoisyTree, BlindTree, *DRAWN)


@contextmanager
def trees_registered() -> Iterator[None]:
    """TREES are registered while the context lasts."""
    with ExitStack() as stack:
        for tree in TREES:
            stack.enter_context(registered(tree))
        yield


def lossless_cases() -> list[tuple[str, str]]:
    """(drafter, rule): every drafter that can run here, TREES included, under each lossless rule for its rows."""
    with trees_registered():
        return [(name, rule) for name in able_drafters() for rule in lossless_rules(name)]


def able_drafters() -> list[str]:
    """The registered drafters that can draft for a model that is a table."""
    target = lab_target(1, torch.device("cpu"))
    return [name for name in DRAFTERS if DRAFTERS.get(name).why_not(target) is None]


def lab_target(size: int, device: torch.device) -> TargetInfo:
    return TargetInfo(VOCAB, 32, size, (VOCAB - 1,), None, device)


@dataclass
class Lab:
    """`size` requests with the same prompt, drafter and rule, each with its own seed."""

    speculation: dict[str, Any]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    size: int = 2000
    device: str = "cpu"
    model_seed: int = 0
    ops: StepOps | None = None
    accepted: int = 0

    def __post_init__(self) -> None:
        device = torch.device(self.device)
        generator = torch.Generator().manual_seed(self.model_seed)
        shape = (VOCAB,) * (DEPENDS_ON + 1)
        self.logits = (1.5 * torch.randn(shape, generator=generator)).to(device)
        self.target = lab_target(self.size, device)
        self.tokens = TokenTable(self.size, 32, device, self.ops)
        self.table = SamplingTable(self.size, VOCAB, device)
        sampler = Sampler(self.table, self.tokens, self.ops)
        self.drafters = Drafters(self.target, sampler, self.tokens)
        self.verifier = Verifier(sampler, self.tokens)
        chosen = settle(Speculation.of(self.speculation), self.target)
        drafter = self.drafters.get(chosen.drafter or "none")
        rows_by_depth = drafter.rows_by_depth(chosen)
        self.apart = drafter.host_bound or self.params.uses_history
        """Whether the host tells the requests apart; otherwise one of them stands for all."""
        self.requests = [
            Request(
                str(i), list(PROMPT), self.params, chosen, rows_by_depth=rows_by_depth, slot=i, status=Status.RUNNING
            )
            for i in range(self.size)
        ]
        for request in self.requests:
            self.table.set(
                request.slot, request, self.params.stop_token_ids or (), self.params.bad_words_token_ids or ()
            )

    def true_joint(self) -> torch.Tensor:
        """[VOCAB] * LENGTH float64: the probability of each output, by naive processing of the table's rows."""
        joint = torch.zeros((VOCAB,) * LENGTH, dtype=torch.float64)
        for said in itertools.product(range(VOCAB), repeat=LENGTH):
            p = 1.0
            for n, token in enumerate(said):
                context = (*PROMPT, *said[:n])
                row = self.logits[context[-DEPENDS_ON:]].cpu()
                p *= float(probabilities(row, PROMPT, said[:n], self.params, self.params.stop_token_ids or ())[token])
            joint[said] = p
        return joint

    def sample(self, rounds: int) -> torch.Tensor:
        """[VOCAB] * LENGTH int64: how often each output was emitted by `rounds` times `size` requests."""
        counts = torch.zeros(VOCAB**LENGTH, dtype=torch.int64)
        weights = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
        for number in range(rounds):
            said = self._round(seed=1 + number * self.size)
            counts += torch.bincount((said.cpu() * weights).sum(1), minlength=VOCAB**LENGTH)
        return counts.view((VOCAB,) * LENGTH)

    def sample_again(self, count: int) -> torch.Tensor:
        """The same for one request at a time whose seed was used before: drafters have learned only from the output
        of that earlier run. For a lab of size 1."""
        assert self.size == 1
        counts = torch.zeros((VOCAB,) * LENGTH, dtype=torch.int64)
        for seed in range(count):
            self.drafters.forget()
            self._round(seed)
            counts[tuple(self._round(seed)[0].tolist())] += 1
        return counts

    def _round(self, seed: int) -> torch.Tensor:
        """[size, LENGTH] the output of all requests, with seeds from `seed` on."""
        start = len(PROMPT)
        self.table.seed[:-1].copy_(seed + torch.arange(self.size))
        self.tokens.tokens.zero_()
        self.tokens.tokens[:, :start] = torch.tensor(PROMPT)
        self.tokens.known.fill_(start)
        for request in self.requests:
            request.output_ids.clear()
            request.computed = start - 1
            self.drafters.admit(request)
        waiting = torch.arange(self.size, device=self.target.device)
        while len(waiting):
            self._step(waiting)
            waiting = waiting[self.tokens.known[waiting] < start + LENGTH]
        for request in self.requests:
            self.drafters.leave(request)
        return self.tokens.tokens[:-1, start : start + LENGTH]

    def _step(self, slots: torch.Tensor) -> None:
        spans = self._spans(slots)
        draft = self.drafters.propose(spans, slots, hosted=self.drafters.propose_on_host(spans, slots))
        batch = self._batch(spans, slots, draft)
        logits = self._model(batch, draft)
        verdict = self.verifier.verify(batch, draft, logits)
        self.drafters.observe(spans, slots, batch, Logits(logits, None, States(logits, {})), verdict)
        self.accepted += int(verdict.accepted.sum())
        if self.apart:
            for span, tokens, count in zip(spans, verdict.tokens.tolist(), verdict.counts.tolist()):
                span.request.output_ids += tokens[:count]
                span.request.computed += count

    def _spans(self, slots: torch.Tensor) -> tuple[Span, ...]:
        depth = len(self.requests[0].rows_by_depth) - 1
        rows = self.requests[0].rows_by_depth[depth]
        if self.apart:
            requests = [self.requests[slot] for slot in slots.tolist()]
            return tuple(Span(request, request.known - 1, 1, depth, rows) for request in requests)
        return (Span(self.requests[0], len(PROMPT) + LENGTH - 2, 1, depth, rows),) * len(slots)

    def _batch(self, spans: tuple[Span, ...], slots: torch.Tensor, draft: Draft) -> ForwardBatch:
        """Every span has its last real row and as many draft rows as the widest; all of them decide."""
        count, width, device = len(spans), draft.width, slots.device
        span = torch.arange(count, device=device).repeat_interleave(width + 1)
        row = torch.arange(-1, width, device=device).repeat(count)
        rows = torch.arange(count * (width + 1), device=device)
        last = (self.tokens.known[slots] - 1)[:, None]
        positions = torch.cat((last, last + draft.depths), 1).flatten()
        ids = torch.cat((self.tokens.tokens[slots].gather(1, last), draft.tokens), 1).flatten()
        nothing = torch.zeros_like(rows)
        nobody = torch.zeros(0, dtype=torch.int32, device=device)
        unused: dict[str, Any] = dict.fromkeys(("firsts", "counts", "starts", "reals"), nobody)
        geometry = Geometry(
            (),
            **unused,
            draft_rows=row,
            ancestors=nothing,
            positions=positions,
            tables={},
            page_size=1,
            max_keys=0,
            is_chain=False,
        )
        index = rows.view(count, width + 1).clone()
        index[:, 1:][~draft.valid] = -1
        return ForwardBatch(
            ids=ids,
            positions=positions,
            slots={},
            geometry=geometry,
            spans=spans,
            request_slots=slots,
            decisions=rows,
            decision_span=span,
            decision_draft=row,
            decision_index=index,
            decision_host=np.stack((span.cpu().numpy(), row.cpu().numpy()), 1),
            reals=torch.ones_like(slots),
            decides=torch.ones_like(slots, dtype=torch.bool),
        )

    def _model(self, batch: ForwardBatch, draft: Draft) -> torch.Tensor:
        """Look up each row's logits by its last three tokens, found by climbing the tree."""
        spans, node = batch.decision_span, batch.decision_draft.clone()
        back = self.tokens.known[batch.request_slots[spans]] - 1
        context: list[torch.Tensor] = []
        for _ in range(DEPENDS_ON):
            drafted = node >= 0
            place = (spans, node.clamp(min=0)) if draft.width else None
            real = self.tokens.tokens[batch.request_slots[spans], back]
            context.append(real if place is None else torch.where(drafted, draft.tokens[place], real))
            back = torch.where(drafted, back, back - 1)
            node = node if place is None else torch.where(drafted, draft.parents[place], -1)
        return self.logits[tuple(reversed(context))]


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, int, float]:
    """(statistic, degrees of freedom, p-value); cells with an expected count under 5 are pooled into one.

    If something impossible happened, the p-value is 0.
    """
    observed, wanted = counts.flatten().double(), expected.flatten().double() * counts.sum()
    if bool((observed[wanted == 0] > 0).any()):
        return float("inf"), 1, 0.0
    rare = wanted < 5
    if bool(rare.any()) and float(wanted[rare].sum()) > 0:
        observed = torch.cat((observed[~rare], observed[rare].sum()[None]))
        wanted = torch.cat((wanted[~rare], wanted[rare].sum()[None]))
    else:
        observed, wanted = observed[~rare], wanted[~rare]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return statistic, freedom, float(torch.special.gammaincc(half[0], half[1]))


def check_joint(lab: Lab, count: int, least_p: float = 1e-4) -> None:
    """The first LENGTH tokens have the target's joint distribution, by a chi-square test over `count` requests."""
    check_counts(lab, lab.sample(-(-count // lab.size)), least_p)


def check_counts(lab: Lab, counts: torch.Tensor, least_p: float = 1e-4) -> None:
    """The counts fit outputs with the target's distribution."""
    statistic, freedom, p = chi_square(counts, lab.true_joint())
    assert p > least_p, f"chi-square {statistic:.0f}, expected about {freedom}, p = {p:.1e}"
