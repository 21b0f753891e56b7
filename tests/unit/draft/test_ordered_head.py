"""Logits of the best centroids' tokens, in every kernel set, are those of transformers' own module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantMaskedEmbedder

from stridelm.draft.frozen_kv.ordered import Centroids, OrderedHead
from stridelm.kernels import OPS
from support.checks.row_ops import sets

WIDTH, VOCAB, COUNT, BEST = 16, 48, 12, 3


@pytest.fixture
def theirs() -> Any:
    text = SimpleNamespace(hidden_size=WIDTH, vocab_size=VOCAB)
    config = SimpleNamespace(num_centroids=COUNT, centroid_intermediate_top_k=BEST, get_text_config=lambda: text)
    torch.manual_seed(0)
    module = Gemma4AssistantMaskedEmbedder(config)
    module.token_ordering = torch.randperm(VOCAB)
    return module


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("name", sets("cpu"))
@torch.no_grad()
def test_as_transformers(theirs: Any, name: str, rows: int) -> None:
    """In every kernel set that runs here; the others' logits are below any number."""
    ours = OrderedHead(WIDTH, VOCAB, Centroids(COUNT, BEST))
    ours.scores.weight.copy_(theirs.centroids.weight)
    ours.weight.copy_(torch.randn(VOCAB, WIDTH))
    ours.ids = theirs.token_ordering.view(COUNT, -1)
    x = torch.randn(rows, WIDTH)
    said = ours(x, OPS.get(name)())
    have = said.isfinite()
    assert bool((have.sum(1) == BEST * VOCAB // COUNT).all())
    wanted = theirs(x[None], ours.weight)[0]
    torch.testing.assert_close(said[have], wanted[have], atol=1e-5, rtol=1e-5)
    # what transformers gives the others is one number, below all of them
    assert wanted[~have].unique().numel() == 1 and bool((wanted[~have].max() < wanted[have]).all())
