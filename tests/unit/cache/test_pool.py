"""The tensors behind the pages: written by slot, moved by slot, and no larger than memory."""

from __future__ import annotations

import pytest
import torch

from stridelm.cache.pool import PagePool, bytes_per_token, page_count
from stridelm.models.layers.decoder import LayerKV

LAYOUT = (LayerKV("main", 2, 8), LayerKV("other", 1, 4), LayerKV("main", 3, 8, window=5))
CPU = torch.device("cpu")


def pool() -> PagePool:
    return PagePool(LAYOUT, {"main": 5, "other": 3}, 4, torch.float32, CPU)


def test_shapes() -> None:
    """One more page than is handed out, for what padding writes; zeroed, so that reading it is harmless."""
    tensors = pool()
    assert [tuple(k.shape) for k in tensors.keys] == [(24, 2, 8), (16, 1, 4), (24, 3, 8)]
    assert all(bool((t == 0).all()) for t in (*tensors.keys, *tensors.values))


def test_compact_moves_a_group() -> None:
    """An accepted path is moved as if read first and written then, in all layers of its group and in no other."""
    tensors = pool()
    for t in (*tensors.keys, *tensors.values):
        t.copy_(torch.arange(t.shape[0], dtype=t.dtype)[:, None, None].expand_as(t))
    before = [t.clone() for t in (*tensors.keys, *tensors.values)]
    tensors.compact("main", torch.tensor([7, 9, 13, 0, 0]), torch.tensor([6, 7, 8, 0, 0]))
    for layer, after, old in zip((*LAYOUT, *LAYOUT), (*tensors.keys, *tensors.values), before):
        expected = old.clone()
        if layer.group == "main":
            expected[6], expected[7], expected[8] = old[7], old[9], old[13]
        assert torch.equal(after, expected)


def test_page_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pages as the fraction of free memory holds, and no more than are of use; none is an error."""
    monkeypatch.setattr("stridelm.cache.pool.free_memory", lambda device: 1_000_000)
    per_token = bytes_per_token(LAYOUT, torch.bfloat16)
    assert per_token == 2 * 2 * (2 * 8 + 1 * 4 + 3 * 8)
    assert page_count(LAYOUT, 4, torch.bfloat16, CPU, 0.5, 10_000) == 500_000 // (4 * per_token)
    assert page_count(LAYOUT, 4, torch.bfloat16, CPU, 0.5, 7) == 7
    with pytest.raises(ValueError, match="raise kv_memory_fraction or free memory"):
        page_count(LAYOUT, 4, torch.bfloat16, CPU, 1e-6, 7)
