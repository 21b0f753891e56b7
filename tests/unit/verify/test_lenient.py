"""The lossy rules of candidates against a plain loop, and which options they accept."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from test_rejection import check_verdict, children
from test_walk import VOCAB, random_draft

from stridelm.batch import Draft
from stridelm.params import Speculation
from stridelm.verify import RULES, lenient
from support.checks.attempts import give, inputs

Takes = Callable[[list[float], int], bool]


def typical(threshold: float = 0.09, alpha: float = 0.3) -> Takes:
    def takes(p: list[float], token: int) -> bool:
        entropy = -sum(mass * math.log(mass) for mass in p if mass)
        return p[token] > min(threshold, alpha * math.exp(-entropy))

    return takes


def relaxed(topk: int = 10, delta: float = 0.6) -> Takes:
    def takes(p: list[float], token: int) -> bool:
        likelier = sum(mass > p[token] for mass in p)
        return likelier < topk and p[token] >= max(p) - delta and p[token] > 0

    return takes


ASKED = {
    "typical": [
        (Speculation("any", 9, "typical"), typical()),
        (Speculation("any", 9, "typical", posterior_threshold=0.2), typical(threshold=0.2)),
        (Speculation("any", 9, "typical", posterior_threshold=0.4, posterior_alpha=0.8), typical(0.4, 0.8)),
    ],
    "relaxed": [
        (Speculation("any", 9, "relaxed"), relaxed()),
        (Speculation("any", 9, "relaxed", relaxed_topk=2), relaxed(topk=2)),
        (Speculation("any", 9, "relaxed", relaxed_topk=1, relaxed_delta=0.0), relaxed(1, 0.0)),
        (Speculation("any", 9, "relaxed", relaxed_delta=0.2), relaxed(delta=0.2)),
    ],
}


def longest_path(draft: Draft, span: int, p: list[list[float]], takes: Takes) -> list[int]:
    """The rows of the longest path accepted from the last real row on, the first of several."""
    best: list[int] = []
    paths: dict[int, list[int]] = {-1: []}
    for row in children(draft, span):
        parent = int(draft.parents[span, row])
        if parent in paths and takes(p[parent + 1], int(draft.tokens[span, row])):
            paths[row] = [*paths[parent], row]
            best = max(best, paths[row], key=len)
    return best


@pytest.mark.parametrize("width", [1, 6, 30, 64])
@pytest.mark.parametrize("rule", list(ASKED))
def test_the_longest_path_is_taken(rule: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request's draft is decided by its own options, in one call; then comes the token drawn after it."""
    spans, asked = 80, ASKED[rule]
    draft = random_draft(width, spans, width)
    generator = torch.Generator().manual_seed(width)
    p = (1.5 * torch.randn(spans, width + 1, VOCAB, generator=generator)).masked_fill(
        torch.rand(spans, width + 1, VOCAB, generator=generator) < 0.2, -50.0
    )
    p = p.softmax(-1).masked_fill(p == -50.0, 0.0)
    drawn = torch.randint(0, VOCAB, (spans, width + 1), generator=generator)
    decides = torch.rand(spans, generator=generator) < 0.9
    heard = inputs(draft, [speculation for speculation, _ in asked], decides)
    give(monkeypatch, p)
    monkeypatch.setattr(lenient, "draw_nodes", lambda heard: drawn)
    known = heard.table.known.tolist()
    verdict = RULES.get(rule)().decide(heard)
    lengths = []
    for span in range(spans):
        path = longest_path(draft, span, p[span].tolist(), asked[span % len(asked)][1])
        check_verdict(verdict, heard, span, path, known[span])
        if decides[span]:
            assert int(verdict.tokens[span, len(path)]) == int(drawn[span, (path or [-1])[-1] + 1])
        lengths.append(len(path))
    assert max(lengths) > 1 or width == 1


def test_numbers_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: the options give the requests different results."""
    draft = random_draft(3, 200, 6)
    p = (1.5 * torch.randn(200, 7, VOCAB, generator=torch.Generator().manual_seed(0))).softmax(-1).tolist()
    for asked in ASKED.values():
        said = [[longest_path(draft, span, p[span], takes) for span in range(200)] for _, takes in asked]
        assert len({str(paths) for paths in said}) == len(asked)
