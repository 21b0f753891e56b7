"""The tensors behind the pages: written by slot, moved by slot, and sized to fit in memory."""

from __future__ import annotations

import pytest
import torch

from stridelm.cache.layout import HeadsKV, LatentKV, Shared, bytes_per_token, in_eight_bits
from stridelm.cache.pool import KvShare, MemoryBudget, PagePool, free_memory
from support.doubles.means import MeanState

LAYOUT = (
    HeadsKV.of(4, 2, 8, group="main"),
    HeadsKV("other", None, heads=2, kv_heads=1, key_dim=4, value_dim=6, scale=1.0),
    MeanState("main", 5, width=7),
)
CPU, GPU = torch.device("cpu"), torch.device("cuda:1")
MIB = 2**20


def pool() -> PagePool:
    return PagePool(LAYOUT, {"main": 5, "other": 3}, 4, torch.float32, CPU)


def test_shapes() -> None:
    """One page more than is handed out, which padding writes to; zeroed, so that reading it is harmless."""
    tensors = pool()
    shapes = [{name: tuple(tensor.shape) for name, tensor in entries.items()} for entries in tensors.entries]
    assert shapes == [
        {"keys": (24, 2, 8), "values": (24, 2, 8)},
        {"keys": (16, 1, 4), "values": (16, 1, 6)},
        {"rows": (24, 7)},
    ]
    assert all(bool((t == 0).all()) for t in tensors.tensors)


def test_compact_moves_a_group() -> None:
    """An accepted path is moved as if all was read before any write, in all layers of its group and in no other."""
    tensors = pool()
    for t in tensors.tensors:
        t.copy_(torch.arange(t.shape[0], dtype=t.dtype).view(-1, *[1] * (t.dim() - 1)).expand_as(t))
    before = [t.clone() for t in tensors.tensors]
    tensors.compact("main", torch.tensor([7, 9, 13, 0, 0]), torch.tensor([6, 7, 8, 0, 0]))
    groups = ("main", "main", "other", "other", "main")
    for group, after, old in zip(groups, tensors.tensors, before, strict=True):
        expected = old.clone()
        if group == "main":
            expected[6], expected[7], expected[8] = old[7], old[9], old[13]
        assert torch.equal(after, expected)


def test_shared_entries_are_kept_once() -> None:
    """A layer that reads another's entries has that layer's tensors, which are counted, listed and moved once."""
    own = HeadsKV.of(4, 2, 8, 9)
    shared = Shared(own.group, 9, 0, HeadsKV.of(8, 2, 8, scale=1.0))
    assert shared.read == HeadsKV.of(8, 2, 8, 9, scale=1.0)
    assert bytes_per_token((own, shared), torch.float32) == bytes_per_token((own,), torch.float32)
    both = PagePool((own, shared), {own.group: 5}, 4, torch.float32, CPU)
    assert both.entries[0] is both.entries[1] and len(both.tensors) == 2
    keys = both.entries[0]["keys"]
    keys.copy_(torch.arange(24.0)[:, None, None].expand_as(keys))
    both.compact(own.group, torch.tensor([7, 9]), torch.tensor([6, 7]))
    assert keys[5:9, 0, 0].tolist() == [5, 7, 9, 8]


def test_eight_bits() -> None:
    """Entries take a byte a number, whatever the model's dtype, and move like others; a layer that reads another's has
    the same scales. A kind of layer that cannot be stored so says what to do."""
    layout = (HeadsKV.of(4, 2, 8, 9), LatentKV("main", None, 4, 6, 4, 1.0))
    shared = Shared(layout[0].group, 9, 0, HeadsKV.of(8, 2, 8, scale=1.0))
    stored = in_eight_bits((*layout, shared), {0: (0.5, 0.25), 1: (2.0, 3.0)})
    for dtype in (torch.bfloat16, torch.float32):
        assert bytes_per_token(stored, dtype) == 2 * 2 * 8 + 10
    own, latent, reader = (state.read for state in stored)
    assert isinstance(own, HeadsKV) and isinstance(latent, LatentKV) and isinstance(reader, HeadsKV)
    assert (own.key_scale, own.value_scale) == (reader.key_scale, reader.value_scale) == (0.5, 0.25)
    assert latent.key_scale == latent.one_head.key_scale == latent.one_head.value_scale == 2.0
    assert latent.one_head.stored == reader.stored == torch.float8_e4m3fn
    both = PagePool(stored, {own.group: 5, "main": 5}, 4, torch.float32, CPU)
    assert {tensor.dtype for tensor in both.tensors} == {torch.float8_e4m3fn} and both.dtype == torch.float32
    keys = both.entries[0]["keys"]
    keys.copy_(torch.arange(24.0).clamp(max=16)[:, None, None].expand_as(keys))
    both.compact(own.group, torch.tensor([7, 9]), torch.tensor([6, 7]))
    assert keys[5:9, 0, 0].tolist() == [5, 7, 9, 8]
    with pytest.raises(ValueError, match="MeanState cannot be stored in eight bits; leave kv_cache_dtype at 'auto'"):
        in_eight_bits(LAYOUT)


def test_bytes_per_token() -> None:
    """Whatever tensors each layer keeps, in the pool's dtype."""
    assert bytes_per_token(LAYOUT, torch.bfloat16) == 2 * (2 * 2 * 8 + (4 + 6) + 7)
    assert bytes_per_token(LAYOUT, torch.float64) == 4 * bytes_per_token(LAYOUT, torch.bfloat16)


@pytest.mark.parametrize(
    ("free", "activations", "fraction", "cap", "pages"),
    [
        (1_000_000, 0, 0.5, 10_000, 500),
        (1_000_000, 0, 0.5, 7, 7),
        (1_000_000, 400_000, 0.5, 10_000, 300),
        (1_000_000, 400_999, 1.0, 10_000, 599),
        (2_000, 0, 0.5, 10_000, 1),
    ],
)
def test_page_count(free: int, activations: int, fraction: float, cap: int, pages: int) -> None:
    """The number of pages that fit in the fraction of what a step leaves free, but no more than are useful."""
    room = MemoryBudget(CPU, free, activations)
    assert room.page_counts({"full": 1000}, KvShare(fraction), {"full": cap}) == {"full": pages}


@pytest.mark.parametrize("share", [KvShare(0.9), KvShare(0.25), KvShare(1.0), KvShare(0.9, 3000), KvShare(0.5, 1)])
@pytest.mark.parametrize("kv", [1, 999, 26_999, 27_000, 27_001, 10**9])
def test_what_a_share_needs(share: KvShare, kv: int) -> None:
    """So much, and no less, has room for this KV; a margin that is smaller than what the fraction leaves is enough."""
    need = share.needed(kv)
    assert share.of(need) >= kv > share.of(need - 1)
    assert share.of(need) == int(need * share.fraction) or need - share.of(need) == share.margin


def test_page_counts_of_two_groups() -> None:
    """As many as are useful if they fit, else each group's share."""
    sizes, useful = {"full": 1000, "window": 300}, {"full": 500, "window": 20}
    assert MemoryBudget(CPU, 506_000).page_counts(sizes, KvShare(1.0), useful) == useful
    half = MemoryBudget(CPU, 506_000).page_counts(sizes, KvShare(0.5), useful)
    assert half == {"full": 250, "window": 10}
    assert MemoryBudget(CPU, 1300).page_counts(sizes, KvShare(1.0), useful) == {"full": 1, "window": 1}


def test_no_room_for_a_page() -> None:
    """The error says what is free, how much of it a step takes, how much is missing, and what would help."""
    with pytest.raises(ValueError, match="raise kv_memory_fraction or free memory") as plain:
        MemoryBudget(CPU, 4 * MIB).page_counts({"full": 3 * MIB}, KvShare(0.5), {"full": 7})
    assert "0.5 of 4.0 MiB free on cpu is 2.0 MiB, 1.0 MiB less than a page takes" in str(plain.value)
    with pytest.raises(ValueError, match="raise kv_memory_fraction, lower max_num_batched_tokens or free") as beside:
        MemoryBudget(GPU, 4 * MIB, 3 * MIB).page_counts({"full": 3 * MIB}, KvShare(1.0), {"full": 7})
    assert "1.0 MiB free on cuda:1, beside 3.0 MiB for activations and captured steps, is" in str(beside.value)
    assert "2.0 MiB less than a page takes" in str(beside.value)
    with pytest.raises(ValueError, match="0 B free on cuda:1"):
        MemoryBudget(GPU, 4 * MIB, 5 * MIB).page_counts({"full": 1}, KvShare(1.0), {"full": 7})


def test_pages_that_were_asked_for() -> None:
    """They may take all that a step leaves free, and not a byte more."""
    MemoryBudget(GPU, 4 * MIB, MIB).check(3, MIB)
    with pytest.raises(ValueError, match="lower num_pages, lower max_num_batched_tokens or free memory") as caught:
        MemoryBudget(GPU, 4 * MIB - 1, MIB).check(4, MIB)
    assert "num_pages 4 of 1.0 MiB each take 4.0 MiB" in str(caught.value)
    assert "1.0 MiB are missing" in str(caught.value)
    with pytest.raises(ValueError, match="1 B are missing; lower num_pages or free memory"):
        MemoryBudget(CPU, 3 * MIB - 1).check(3, MIB)


def test_what_torch_keeps_of_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts it as used until it is released."""
    kept = [3 * MIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.clear())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * MIB - sum(kept), 8 * MIB))
    assert free_memory(GPU) == 5 * MIB
