"""Drafts of several drafters are merged into one."""

from __future__ import annotations

from typing import Any

import torch

from stridelm import SamplingParams
from stridelm.batch import CANDIDATE
from stridelm.config import EngineConfig
from stridelm.draft.base import Group, chain
from stridelm.draft.dispatch import _merge
from stridelm.engine.start import start
from stridelm.params import Speculation
from stridelm.types import Span

CPU = torch.device("cpu")
NOTHING: Any = None


def group(places: list[int]) -> Group:
    return Group((), places, torch.tensor(places), torch.tensor(places), NOTHING)


def test_certain_rows_beside_drawn_ones() -> None:
    """If any part has the distributions of its tokens, the other parts' rows get probability 1 for theirs; if none
    has, the merged draft has none."""
    generator = torch.Generator().manual_seed(0)
    drawn, certain = torch.tensor([[1, 2], [0, 3]]), torch.tensor([[4, 3, 1]])
    probs = torch.rand(2, 2, 5, generator=generator)
    valid = torch.ones(2, 3, dtype=torch.bool)
    parts = [
        (group([3, 0]), chain(2, CANDIDATE, CPU).draft(drawn, valid[:, :2], probs)),
        (group([1]), chain(3, CANDIDATE, CPU).draft(certain, valid[:1])),
    ]
    merged = _merge(4, parts)
    assert merged.probs is not None and merged.probs.shape == (4, 3, 5)
    assert torch.equal(merged.probs[[3, 0], :2], probs)
    assert merged.probs[1].argmax(-1).tolist() == [4, 3, 1] and merged.probs[1].sum() == 3
    assert not merged.probs[2].any() and not merged.probs[:, 2][[0, 3]].any()
    assert _merge(4, parts[1:]).probs is None


def test_a_kind_is_found_out_once() -> None:
    """Requests that ask for the same share what it was settled to, at each depth."""
    engine = start(EngineConfig(device="cpu", drafter="ngram", max_model_len=64))
    asked: list[tuple[str, int]] = []

    def kind(span: Span) -> int:
        asked.append((span.request.id, span.depth))
        return span.depth

    engine.drafters.get("ngram").kind = kind  # type: ignore[method-assign]
    same, other = (SamplingParams(speculation=Speculation("ngram", depth)) for depth in (2, 3))
    requests = [engine.intake.request(id, [1, 2], each) for id, each in (("a", same), ("b", same), ("c", other))]
    for depth in (1, 2, 1, 2):
        spans = tuple(Span(request, 0, 1, depth, depth) for request in requests)
        [(_, group)] = engine.drafters._groups(spans, torch.zeros(3, dtype=torch.int64), [0, 1, 2])
        assert group.places == [0, 1, 2]
    assert asked == [("a", 1), ("c", 1), ("a", 2), ("c", 2)]
