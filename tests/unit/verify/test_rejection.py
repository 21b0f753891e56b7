"""Rejection and block verification: the output has the target's distribution, by enumeration and by sampling."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_walk import VOCAB, random_draft

from stridelm import SamplingParams
from stridelm.batch import CANDIDATE, Draft, Verdict
from stridelm.draft.base import TreeShape, chain
from stridelm.kernels import STEP_OPS
from stridelm.kernels.noise import DRAFT
from stridelm.params import Speculation
from stridelm.verify import RULES, attempt, block, rejection
from support.checks.attempts import CPU, P, every_output, give, inputs, plainly, weigh
from support.doubles import lab
from support.doubles.interpreter import INTERPRETED
from support.doubles.lab import LENGTH, ArgmaxTree, Lab, check_joint, trees_registered
from support.doubles.tree_drafter import registered

SAMPLES = 200_000
SHAPES = {"chain": (-1, 0, 1), "siblings": (-1, -1, -1), "tree": (-1, -1, 0, 0), "bush": (-1, 0, -1)}
EXACT = [("rejection", shape) for shape in SHAPES] + [("block", "chain")]
SEEN = [("sampled_chain", "rejection"), ("sampled_tree", "rejection"), ("sampled_chain", "block")]
ON_GPU = [("sampled_tree", "rejection"), ("sampled_chain", "block"), ("noisy_tree", "typical")]


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with trees_registered(), registered(ArgmaxTree):
        yield


# By enumeration


def says(seed: int) -> P:
    """Random distributions over three tokens, a different one after every path; some tokens are impossible."""

    def probabilities(path: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + sum(4**i * (token + 1) for i, token in enumerate(path)))
        logits = torch.randn(3, generator=generator, dtype=torch.float64)
        if int(torch.randint(4, (1,), generator=generator)) == 0:
            logits[int(logits.argmin())] = -torch.inf
        return logits.softmax(0)

    return probabilities


@pytest.mark.parametrize(("rule", "shape"), EXACT)
@pytest.mark.parametrize("seed", range(2))
def test_every_output_of_drawn_drafts(rule: str, shape: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all drafts and all decisions, each output of three tokens has the target's probability."""
    p, q = says(1000 + seed), says(2000 + seed)

    def somewhat(path: tuple[int, ...]) -> torch.Tensor:
        """Siblings need as many possible tokens."""
        return (q(path) + 0.1) / 1.3

    got = every_output(rule, SHAPES[shape], p, q if shape == "chain" else somewhat, 3, monkeypatch)
    torch.testing.assert_close(got[0], plainly(p, 3), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("rule", "shape"), EXACT)
def test_every_output_of_every_certain_draft(rule: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for every single draft that was not drawn at random."""
    p = says(1000)
    got = every_output(rule, SHAPES[shape], p, None, 3, monkeypatch)
    torch.testing.assert_close(got, plainly(p, 3).expand_as(got), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("rule", "shape"), EXACT)
def test_what_a_draft_says_of_itself(rule: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certain row may also be given by probabilities, and those of a drawn row leave out its siblings' tokens."""
    parents, count, vocab = SHAPES[shape], 500, 5
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(count, len(parents) + 1, vocab, generator=generator).softmax(-1)
    q = torch.randn(count, len(parents), vocab, generator=generator).softmax(-1)
    chances = torch.rand(count, len(parents) + 1, generator=generator, dtype=torch.float64)
    tokens = torch.rand(count, vocab, generator=generator).argsort(1)[:, : len(parents)]
    valid = torch.ones_like(tokens, dtype=torch.bool)
    tree = TreeShape.of(parents, [CANDIDATE] * len(parents), CPU)
    fewer = q.clone()
    for row, parent in enumerate(parents):
        q[:, row] = q[:, parents.index(parent)]
        before = [other for other in range(row) if parents[other] == parent]
        fewer[:, row] = q[:, row].scatter(1, tokens[:, before], 0.0)
        fewer[:, row] /= fewer[:, row].sum(1, keepdim=True)
    certain = torch.zeros_like(q).scatter_(2, tokens[:, :, None], 1.0)
    for one, other in ((None, certain), (q, fewer)):
        got = weigh(rule, tree.draft(tokens, valid, one), p, chances, monkeypatch)
        wanted = weigh(rule, tree.draft(tokens, valid, other), p, chances, monkeypatch)
        assert torch.equal(got[0], wanted[0]) and len(got[0].unique()) > 2
        torch.testing.assert_close(got[1], wanted[1])


# Against plain loops

Said = tuple[list[int], list[float]]
"""(accepted rows, weights of the next token) of one span."""


def plain_rejection(draft: Draft, span: int, p: list[list[float]], q: Any, chance: list[float]) -> Said:
    """Tries one child after another."""
    path: list[int] = []
    at, left = -1, p[0]
    refused: set[int] = set()
    for row in children(draft, span):
        if int(draft.parents[span, row]) != at:
            continue
        x, drawn = int(draft.tokens[span, row]), [0.0] * len(left)
        if q is None:
            drawn[x] = 1.0
        else:
            kept = sum(mass for token, mass in enumerate(q[span][row]) if token not in refused)
            drawn = [0.0 if token in refused else mass / kept for token, mass in enumerate(q[span][row])]
        if chance[row + 1] < left[x] / drawn[x]:
            at, left, refused = row, p[row + 1], set()
            path.append(row)
        else:
            rest = [max(a - b, 0.0) for a, b in zip(left, drawn)]
            left = [mass / sum(rest) for mass in rest]
            refused.add(x)
    return path, left


def plain_block(draft: Draft, span: int, p: list[list[float]], q: Any, chance: list[float]) -> Said:
    """By the formulas of the module's docstring."""
    rows = list(itertools.takewhile(lambda row: row in children(draft, span), range(draft.width)))
    w, best = [1.0], (0, p[0])
    for row in rows:
        x = int(draft.tokens[span, row])
        w.append(min(w[-1] * p[row][x] / (1.0 if q is None else q[span][row][x]), 1.0))
    for i in range(len(rows) + 1):
        if i == len(rows):
            h, weights = w[i], p[i]
        else:
            x = int(draft.tokens[span, i])
            drawn = [float(t == x) for t in range(len(p[i]))] if q is None else q[span][i]
            weights = [max(w[i] * a - b, 0.0) for a, b in zip(p[i], drawn)]
            h = sum(weights) / (sum(weights) + 1 - w[i])
        if chance[i] <= h:
            best = (i, weights)
    return rows[: best[0]], [mass / sum(best[1]) for mass in best[1]]


def children(draft: Draft, span: int) -> list[int]:
    return [j for j in range(draft.width) if draft.valid[span, j] and draft.roles[span, j] == CANDIDATE]


PLAIN = {"rejection": plain_rejection, "block": plain_block}


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize(("rule", "width"), [("rejection", 1), ("rejection", 6), ("rejection", 30), ("block", 6)])
def test_verdicts(rule: str, width: int, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down any tree, with siblings, probes and dead rows; the rest of the verdict follows, and what is emitted is in
    the table."""
    spans = 60
    draft = random_draft(width, spans, width) if rule == "rejection" else random_chains(spans, width)
    generator = torch.Generator().manual_seed(width)
    p = (2 * torch.randn(spans, width + 1, VOCAB, generator=generator)).softmax(-1)
    q = (p[:, :-1] + 0.1 * torch.rand(spans, width, VOCAB, generator=generator)).div(1 + 0.05 * VOCAB)
    q /= q.sum(-1, keepdim=True)
    draft.probs = q if drawn else None
    chance = torch.rand(spans, width + 1, generator=generator, dtype=torch.float64) ** 2
    decides = torch.rand(spans, generator=generator) < 0.9
    heard = inputs(draft, [Speculation("any", 9, rule)], decides, vocab=VOCAB)
    give(monkeypatch, p, chance)
    known = heard.table.known.tolist()
    verdict = RULES.get(rule)().decide(heard)
    longest = 0
    for span in range(spans):
        weighed = p[span].tolist(), q.tolist() if drawn else None, chance[span].tolist()
        path, weights = PLAIN[rule](draft, span, *weighed)
        check_verdict(verdict, heard, span, path, known[span])
        if decides[span]:
            assert weights[int(verdict.tokens[span, len(path)])] > 0
        longest = max(longest, len(path))
    assert longest > 1 or width == 1


def check_verdict(verdict: Verdict, heard: Any, span: int, path: list[int], known: int) -> None:
    """Exactly these rows are accepted, and everything else follows from them."""
    draft, table = heard.draft, heard.table
    numbers = [int(getattr(verdict, f)[span]) for f in ("counts", "kept", "accepted", "reached", "drafted", "leaf")]
    if not heard.decides[span]:
        assert numbers[:5] == [0] * 5 and table.known[span] == known
        return
    leaf = path[-1] if path else -1
    below = any(int(draft.parents[span, row]) == leaf for row in children(draft, span))
    count = len(path) + 1
    assert numbers == [count, count - 1, count - 1, count - 1 + below, len(children(draft, span)), leaf]
    assert verdict.path[span, : len(path)].tolist() == path
    assert verdict.tokens[span, : len(path)].tolist() == draft.tokens[span, path].tolist()
    assert verdict.rows[span, :count].tolist() == [int(heard.nodes[span, row + 1]) for row in (-1, *path)]
    assert table.tokens[span, known : known + count].tolist() == verdict.tokens[span, :count].tolist()
    assert table.known[span] == known + count


def random_chains(spans: int, width: int) -> Draft:
    """Of all lengths, over a small vocabulary."""
    generator = torch.Generator().manual_seed(width)
    tokens = torch.randint(0, VOCAB, (spans, width), generator=generator)
    lengths = torch.randint(0, width + 1, (spans, 1), generator=generator)
    return chain(width, CANDIDATE, CPU).draft(tokens, torch.arange(width) < lengths)


# By sampling


@pytest.mark.parametrize(
    ("drafter", "rule", "samples"),
    [*((*case, SAMPLES) for case in SEEN), ("argmax_tree", "rejection", SAMPLES // 5)],
)
def test_joint(drafter: str, rule: str, samples: int) -> None:
    """The first three tokens of 200,000 requests have the target's joint distribution."""
    seen = Lab({"drafter": drafter, "acceptance": rule})
    check_joint(seen, samples)
    assert seen.accepted > samples // 5


def test_block_accepts_more() -> None:
    """Of the same drafts."""
    labs = [Lab({"drafter": "sampled_chain", "acceptance": rule}) for rule in ("rejection", "block")]
    for each in labs:
        each.sample(10)
    assert labs[1].accepted > 1.02 * labs[0].accepted


@INTERPRETED
@pytest.mark.parametrize(("drafter", "rule"), ON_GPU)
def test_the_kernels_say_the_same(drafter: str, rule: str) -> None:
    """The GPU's code, run by Triton's interpreter."""
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, min_p=0.05, presence_penalty=0.4)
    asked = {"drafter": drafter, "acceptance": rule}
    plain, triton = (Lab(asked, params, size=8, ops=STEP_OPS.get(name)()) for name in ("plain", "triton"))
    assert torch.equal(triton._round(5), plain._round(5)) and triton.accepted == plain.accepted > 0


# Mutations.


def one_uniform_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of an attempt are decided by the same uniform number."""
    for module in (rejection, block):
        monkeypatch.setattr(module, "chances", lambda heard: attempt.chances(heard)[:, :1].expand_as(heard.nodes))


def not_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual after a refused sibling is not normalised."""
    monkeypatch.setattr(rejection, "normalised", lambda weights, otherwise: weights)


def with_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sibling is weighed as if it could have had the token of the previous one."""
    monkeypatch.setattr(rejection, "drafted_at", lambda draft, row, refused: draft.probs[:, row])


def drafts_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after the path is drawn with the noise that the draft was drawn with."""
    monkeypatch.setattr(attempt, "RESIDUAL", DRAFT)


def chances_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are accepted with the noise that they were drawn with."""
    monkeypatch.setattr(attempt, "ACCEPT", DRAFT)


def no_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position is drafted with the same noise in every attempt."""
    monkeypatch.setattr(lab, "attempt_stream", lambda kind, known: kind)


def ratio_of_certain_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were not drawn at random are accepted as if they were."""
    monkeypatch.setattr(ArgmaxTree, "claims", True)


def whole_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after a refused row is drawn from the target's whole distribution instead of the residual."""
    for module in (rejection, block):
        monkeypatch.setattr(module, "less", lambda p, q, token: p)


Mutation = Callable[[pytest.MonkeyPatch], None]
CAUGHT: list[tuple[Mutation, str, str]] = [
    (one_uniform_for_all, "sampled_chain", "rejection"),
    (one_uniform_for_all, "sampled_chain", "block"),
    (not_normalised, "sampled_tree", "rejection"),
    (with_replacement, "sampled_tree", "rejection"),
    (drafts_noise, "sampled_chain", "rejection"),
    (drafts_noise, "sampled_chain", "block"),
    (chances_noise, "sampled_chain", "rejection"),
    (no_attempts, "sampled_chain", "block"),
    (ratio_of_certain_rows, "argmax_tree", "rejection"),
    (whole_target, "sampled_chain", "rejection"),
    (whole_target, "sampled_chain", "block"),
]


@pytest.mark.parametrize(("mutation", "drafter", "rule"), CAUGHT)
def test_joint_catches(mutation: Mutation, drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square of the joint distribution detects a rule that is broken in this way."""
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match="chi-square"):
        check_joint(Lab({"drafter": drafter, "acceptance": rule}), SAMPLES // 5)
