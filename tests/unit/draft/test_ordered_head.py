"""Logits of the best centroids' tokens, however they are computed, are those of transformers' own module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantMaskedEmbedder

from stridelm.draft.frozen_kv.ordered import Centroids, OrderedHead

WIDTH, VOCAB, COUNT, BEST = 16, 48, 12, 3
WAYS: dict[str, dict[str, Any]] = {"gathered": {}, "in turn": {"in_turn": True}, "whole": {"whole": F.linear}}


@pytest.fixture
def theirs() -> Any:
    text = SimpleNamespace(hidden_size=WIDTH, vocab_size=VOCAB)
    config = SimpleNamespace(num_centroids=COUNT, centroid_intermediate_top_k=BEST, get_text_config=lambda: text)
    torch.manual_seed(0)
    module = Gemma4AssistantMaskedEmbedder(config)
    module.token_ordering = torch.randperm(VOCAB)
    return module


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_as_transformers(theirs: Any, way: str, rows: int) -> None:
    """For few rows and for more than it pays to gather for; the others' logits are below any number."""
    ours = OrderedHead(WIDTH, VOCAB, Centroids(COUNT, BEST))
    ours.scores.weight.copy_(theirs.centroids.weight)
    ours.weight.copy_(torch.randn(VOCAB, WIDTH))
    ours.ids = theirs.token_ordering.view(COUNT, -1)
    for name, value in WAYS[way].items():
        setattr(ours, name, value)
    x = torch.randn(rows, WIDTH)
    said = ours(x)
    have = said.isfinite()
    assert bool((have.sum(1) == BEST * VOCAB // COUNT).all())
    wanted = theirs(x[None], ours.weight)[0]
    torch.testing.assert_close(said[have], wanted[have], atol=1e-5, rtol=1e-5)
    # what transformers gives the others is one number, below all of them
    assert wanted[~have].unique().numel() == 1 and bool((wanted[~have].max() < wanted[have]).all())


def test_what_serves_where() -> None:
    """On a CPU row by row; elsewhere a promise of equal bits takes the whole product."""
    head = OrderedHead(WIDTH, VOCAB, Centroids(COUNT, BEST))
    head.choose_products(deterministic=True)
    assert head.in_turn and head.whole is None
    away = OrderedHead(WIDTH, VOCAB, Centroids(COUNT, BEST)).to("meta")
    away.choose_products(deterministic=False)
    assert not away.in_turn and away.whole is None
    away.choose_products(deterministic=True)
    assert not away.in_turn and away.whole is not None
