"""Row operations from their definitions in float64, for the tests of every kernel set."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from stridelm.kernels import OPS
from stridelm.kernels.ops import LatentRope, Ops, QKRope
from stridelm.kernels.plain_fp8 import E4M3
from stridelm.models.layers.rope import Rope, RopeSpec
from support.checks.linear import check_row_bits

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Largest deviation from float64 of values up to 4. Angles are float32 in every dtype."""
POSITIONS, SLOTS = 300, 97


def sets(device: str) -> list[str]:
    """Every registered kernel set that runs on a device."""
    return [name for name in OPS if OPS.get(name).device in (None, device)]


def noise(seed: int, *shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check_norms(ops: Ops, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    x, delta = (noise(seed, rows, width, dtype=dtype, device=device) for seed in (1, 2))
    weight = noise(3, width, dtype=dtype, device=device)
    total = x + delta
    plain = ops.norm(x, weight, 1e-5)
    parts = [torch.cat((delta[:, :apart], x), dim=1)[:, -width:] for apart in (16, width)]
    parts.append(torch.cat((delta[:, :1], x, delta), dim=1)[:, 1 : 1 + width])
    added, normed = ops.add_norm(x.clone(), delta, weight, 1e-5)
    for got, of in ((plain, x), (normed, total), *((ops.norm(part, weight, 1e-5), x) for part in parts)):
        wanted = of.double() / (of.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        assert got.dtype == dtype
        assert float((got.double() - wanted).abs().max()) <= CLOSE[dtype] * max(1.0, float(wanted.abs().max()) / 4)
    assert torch.equal(added, total)
    check_row_bits(lambda part: ops.norm(part, weight, 1e-5), x, counts=(1, 2, 3, rows))
    for part in parts:
        whole = ops.norm(part, weight, 1e-5)
        for first, last in ((0, 1), (0, 3), (rows - 1, rows)):
            assert torch.equal(ops.norm(part[first:last], weight, 1e-5), whole[first:last])
    check_row_bits(lambda part: ops.add_norm(part.clone(), part, weight, 1e-5)[1], x, counts=(1, 2, 3, rows))


def check_joined_norms(ops: Ops, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """In both orders, of a table's rows and of rows as they are, beside states that may lie apart."""
    table, x = (noise(seed, rows, width, dtype=dtype, device=device) for seed in (1, 2))
    first, second = (noise(seed, width, dtype=dtype, device=device) for seed in (3, 4))
    ids = torch.randint(0, rows, (rows,), generator=torch.Generator().manual_seed(5)).to(device)
    apart = torch.cat((table, x), dim=1)[:, width:]
    for of, which in ((table, ids), (table, None)):
        tokens = ops.norm(of if which is None else of[which], first, 1e-5)
        for hidden in (x, apart):
            states = ops.norm(hidden, second, 1e-5)
            for hidden_first, wanted in ((False, (tokens, states)), (True, (states, tokens))):
                got = ops.join_norms(of, which, first, hidden, second, 1e-5, hidden_first=hidden_first)
                assert got.is_contiguous() and torch.equal(got, torch.cat(wanted, dim=1))


def check_spread_logits(ops: Ops, rows: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Into vocabularies of which a head has some tokens, one, or all."""
    for own_vocab in (1, vocab // 3, vocab):
        own = noise(own_vocab, rows, own_vocab, dtype=dtype, device=device)
        ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:own_vocab].to(device)
        places = torch.full((vocab,), own_vocab, device=device)
        places[ids] = torch.arange(own_vocab, device=device)
        wanted = own.new_full((rows, vocab), -math.inf)
        wanted[:, ids] = own
        assert torch.equal(ops.spread_logits(own, ids, places), wanted)


def check_soft_cap(ops: Ops, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Small, large and infinite numbers; one that is not a number stays so."""
    x = noise(1, rows, width, dtype=dtype, device=device) * 40
    x.view(-1)[:4] = torch.tensor([float("inf"), float("-inf"), 0.0, float("nan")], dtype=dtype)
    wanted = 30 * (x.double() / 30).tanh()
    got = ops.soft_cap(x.clone(), 30.0)
    assert got.dtype == dtype and got.shape == x.shape
    rounding = 0.51 * torch.finfo(dtype).eps  # once
    torch.testing.assert_close(got.double(), wanted, rtol=max(rounding, 1e-6), atol=1e-5, equal_nan=True)
    assert ops.soft_cap(x[:0].clone(), 30.0).shape == (0, width)


def check_normed_sums(ops: Ops, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """x and the norm of a delta, with and without a factor of the sum, and a norm of it."""
    x, delta = (noise(seed, rows, width, dtype=dtype, device=device) for seed in (1, 2))
    after, weight = (noise(seed, width, dtype=dtype, device=device) for seed in (3, 4))
    kept = x.clone()

    def normed(of: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return of.double() / (of.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * by.double()

    for factor, then in ((None, None), (None, weight), (0.75, None), (0.75, weight)):
        scale = None if factor is None else torch.tensor([factor], dtype=dtype, device=device)

        def run(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return ops.add_normed(x[: len(part)], part.clone(), after, 1e-5, scale, then)  # noqa: B023

        total, out = run(delta)
        wanted = (x.double() + normed(delta, after)) * (factor or 1.0)
        close = CLOSE[dtype] * max(1.0, float(wanted.abs().max()) / 4)
        assert total.dtype == dtype and float((total.double() - wanted).abs().max()) <= close
        assert (out is None) == (then is None)
        if out is not None and then is not None:
            wanted = normed(total, then)
            close = CLOSE[dtype] * max(1.0, float(wanted.abs().max()) / 4)
            assert out.dtype == dtype and float((out.double() - wanted).abs().max()) <= close
        for count in (1, 2, 3):
            few = run(delta[:count])
            assert torch.equal(few[0], total[:count])
            assert out is None or (few[1] is not None and torch.equal(few[1], out[:count]))
    assert torch.equal(x, kept)


BENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu_tanh": lambda x: x * (1 + ((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()) / 2,
    "gelu": lambda x: x * torch.special.ndtr(x),
}


def check_gate(ops: Ops, rows: int, width: int, dtype: torch.dtype, device: str, activation: str) -> None:
    x = noise(4, rows, 2 * width, dtype=dtype, device=device) * 4
    x[0, 0], x[0, 1], x[1, 0], x[1, 1] = 80, -80, -100, -30000  # an exponential over- or underflows
    gate, up = x.double().chunk(2, dim=-1)
    wanted = BENT[activation](gate) * up
    got = ops.gate(x, activation)
    assert got.dtype == dtype and got.shape == (rows, width)
    assert bool(((got.double() - wanted).abs() <= CLOSE[dtype] * wanted.abs().clamp(min=1)).all())
    check_row_bits(lambda part: ops.gate(part, activation), x, counts=(1, 2, 3, rows))
    alone, given = (half.contiguous() for half in x.chunk(2, dim=1))
    # Rows of a tensor of their own, and parts of longer ones, at multiples of 16 bytes or not.
    for ups in (given, torch.cat((x, x), dim=1)[:, width : 2 * width], torch.stack((alone, given), 1)[:, 1]):
        assert torch.equal(ops.gate(alone, activation, ups), got)
        assert torch.equal(ops.gate(alone[-1:], activation, ups[-1:]), got[-1:])


HEADS = [(6, 2, 64, 64), (3, 3, 16, 16), (8, 1, 80, 80), (4, 2, 24, 24), (6, 2, 64, 32), (8, 1, 80, 24), (4, 2, 24, 22)]
"""(query heads, KV heads, head size, how many dimensions of a head are rotated)."""


def check_turn(
    ops: Ops, rows: int, sizes: tuple[int, int, int, int], norms: bool, dtype: torch.dtype, device: str
) -> None:
    """sizes: as in HEADS."""
    heads, kv_heads, size, turned = sizes
    angles_of = Rope(RopeSpec(turned, 10000.0), POSITIONS)
    angles_of.prepare(device)
    qkv = noise(5, rows, heads + 2 * kv_heads, size, dtype=dtype, device=device)
    weights = noise(6, 2 * size, dtype=dtype, device=device) if norms else None
    generator = torch.Generator().manual_seed(7)
    positions = torch.randint(0, POSITIONS, (rows,), generator=generator).to(device)
    slots = torch.randperm(SLOTS, generator=generator)[:rows].to(device)

    def run(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = (torch.zeros(SLOTS, kv_heads, size, dtype=dtype, device=device) for _ in range(2))
        rope = QKRope(heads, kv_heads, positions[index], angles_of.cos, angles_of.sin, weights, 1e-5)
        return ops.rope_and_store(qkv[index], rope, keys, values, slots[index]), keys, values

    everything = torch.arange(rows, device=device)
    q, keys, values = run(everything)
    x = qkv[:, : heads + kv_heads].double()
    if weights is not None:
        of_queries, of_keys = weights.double().view(2, size)
        weight = torch.cat((of_queries.expand(heads, -1), of_keys.expand(kv_heads, -1)))
        x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(0, turned, 2, device=device).double() / turned)
    low, high, rest = x.split((turned // 2, turned // 2, size - turned), -1)
    pairs = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)[:, None]
    wanted = torch.cat((pairs.real, pairs.imag, rest), -1)
    close = max(CLOSE[dtype], 1e-4) * max(1.0, float(wanted.abs().max()) / 4)
    assert float((q.double() - wanted[:, :heads]).abs().max()) <= close
    assert float((keys[slots].double() - wanted[:, heads:]).abs().max()) <= close
    assert torch.equal(values[slots], qkv[:, heads + kv_heads :])
    if weights is None:  # what is not rotated is copied
        assert torch.equal(q[..., turned:], qkv[:, :heads, turned:])
        assert torch.equal(keys[slots][..., turned:], qkv[:, heads : heads + kv_heads, turned:])
    others = torch.ones(SLOTS, dtype=torch.bool, device=device).index_fill(0, slots, False)
    assert not bool(keys[others].any()) and not bool(values[others].any())
    for count in (1, 2, rows):
        fewer = run(everything[:count])
        assert torch.equal(fewer[0], q[:count])
        assert torch.equal(fewer[1][slots[:count]], keys[slots[:count]])


def check_values(ops: Ops, rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    """Values that are normalised, values that are the keys' projections, and no KV heads. sizes: as in HEADS."""
    heads, kv_heads, size, turned = sizes
    angles_of = Rope(RopeSpec(turned, 10000.0), POSITIONS)
    angles_of.prepare(device)
    qkv = noise(5, rows, heads + 2 * kv_heads, size, dtype=dtype, device=device)
    qk, values_of = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    weights = noise(6, 2 * size, dtype=dtype, device=device)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(7))[:rows].to(device)

    def run(
        x: torch.Tensor, groups: int, norms: torch.Tensor, count: int = rows, **how: bool
    ) -> tuple[torch.Tensor, ...]:
        """(queries, keys, values); the last two of all slots."""
        keys, values = torch.zeros(2, SLOTS, kv_heads, size, dtype=dtype, device=device)
        positions = torch.arange(rows, device=device)[:count] * 3
        rope = QKRope(heads, groups, positions, angles_of.cos, angles_of.sin, norms, 1e-5, **how)
        return ops.rope_and_store(x[:count], rope, keys, values, slots[:count]), keys, values

    q, keys, _ = run(qkv, kv_heads, weights)
    for x, of, how in (
        (qkv, values_of, {"normed_values": True}),
        (qk, qk[:, heads:], {"keys_as_values": True}),
        (qk, qk[:, heads:], {"keys_as_values": True, "normed_values": True}),
    ):
        got = run(x, kv_heads, weights, **how)
        close = CLOSE[dtype] * max(1.0, float(of.abs().max()) / 4)
        assert float((got[0] - q).abs().max()) <= close and float((got[1] - keys).abs().max()) <= close
        wanted = of.double()
        if "normed_values" in how:
            wanted = wanted / (wanted.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        assert float((got[2][slots].double() - wanted).abs().max()) <= close
        assert int((got[2] != 0).any(-1).any(-1).sum()) == rows
        for count in (1, 2):
            fewer = run(x, kv_heads, weights, count, **how)
            assert all(torch.equal(few[slots[:count]], all_[slots[:count]]) for few, all_ in zip(fewer[1:], got[1:]))
            assert torch.equal(fewer[0], got[0][:count])
    alone, *nothing = run(qkv[:, :heads], 0, weights[:size])
    assert float((alone - q).abs().max()) <= CLOSE[dtype] * max(1.0, float(q.abs().max()) / 4)
    assert not any(bool(part.any()) for part in nothing)


def check_latent(
    ops: Ops, rows: int, heads: int, rank: int, width: int, interleaved: bool, dtype: torch.dtype, device: str
) -> None:
    angles_of = Rope(RopeSpec(width, 10000.0), POSITIONS)
    angles_of.prepare(device)
    queries = noise(9, rows, heads, 8 + width, dtype=dtype, device=device)[:, :, 8:]  # as a model passes them: a part
    projected = noise(10, rows, 16 + rank + width, dtype=dtype, device=device)[:, 16:]
    weight = noise(11, rank, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(12)
    positions = torch.randint(0, POSITIONS, (rows,), generator=generator).to(device)
    slots = torch.randperm(SLOTS, generator=generator)[:rows].to(device)

    def run(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        latents = torch.zeros(SLOTS, rank + width, dtype=dtype, device=device)
        rope = LatentRope(positions[:count], angles_of.cos, angles_of.sin, weight, 1e-5, interleaved)
        return ops.rope_and_store_latent(queries[:count], projected[:count], rope, latents, slots[:count]), latents

    q, latents = run(rows)
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(0, width, 2, device=device).double() / width)
    x = torch.cat((queries, projected[:, None, rank:]), 1).double()
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.cat((pairs.real, pairs.imag), -1)
    x = projected[:, :rank].double()
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    wanted = torch.cat((normed, turned[:, -1]), 1)
    close = max(CLOSE[dtype], 1e-4) * max(1.0, float(turned.abs().max()) / 4, float(wanted.abs().max()) / 4)
    assert q.dtype == dtype and float((q.double() - turned[:, :-1]).abs().max()) <= close
    assert float((latents[slots].double() - wanted).abs().max()) <= close
    others = torch.ones(SLOTS, dtype=torch.bool, device=device).index_fill(0, slots, False)
    assert not bool(latents[others].any())
    for count in (1, 2, 3):
        fewer = run(count)
        assert torch.equal(fewer[0], q[:count])
        assert torch.equal(fewer[1][slots[:count]], latents[slots[:count]])


def check_nan(ops: Ops, dtype: torch.dtype, device: str) -> None:
    """A weight that was never loaded yields NaN."""
    weight = torch.full((64,), float("nan"), dtype=dtype, device=device)
    assert bool(ops.norm(noise(8, 2, 64, dtype=dtype, device=device), weight, 1e-5).isnan().all())


SCALES = (0.004, 0.4)
"""Of keys and of values: with the first, some keys are beyond what eight bits hold."""


def check_eight_bits(ops: Ops, rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    """Keys and values in eight bits are those in float32 divided by their scales, limited and rounded once; queries are
    those of other pools. sizes: as in HEADS."""
    heads, kv_heads, size, turned = sizes
    angles_of = Rope(RopeSpec(turned, 10000.0), POSITIONS)
    angles_of.prepare(device)
    qkv = noise(5, rows, heads + 2 * kv_heads, size, dtype=dtype, device=device) * 2
    weights = noise(6, 2 * size, dtype=dtype, device=device)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(7))[:rows].to(device)

    def run(x: torch.Tensor, norms: torch.Tensor | None, stored: torch.dtype, count: int = rows) -> list[torch.Tensor]:
        keys, values = torch.zeros(2, SLOTS, kv_heads, size, device=device).to(stored)
        positions = torch.arange(rows, device=device)[:count] * 3
        rope = QKRope(heads, kv_heads, positions, angles_of.cos, angles_of.sin, norms, 1e-5)
        scales = SCALES if stored == E4M3 else (1.0, 1.0)
        return [ops.rope_and_store(x[:count], rope, keys, values, slots[:count], *scales), keys, values]

    for norms in (None, weights):
        exact = run(qkv.float(), None if norms is None else norms.float(), torch.float32)
        got = run(qkv, norms, E4M3)
        usual = run(qkv, norms, dtype)[0]
        assert float((got[0] - usual).abs().max()) <= CLOSE[dtype] * max(1.0, float(usual.abs().max()) / 4)
        for stored, of, scale in zip(got[1:], exact[1:], SCALES, strict=True):
            check_stored(stored[slots], of[slots], scale)
        assert int((got[1].float() != 0).any(-1).any(-1).sum()) == rows
        for count in (1, 2):
            fewer = run(qkv, norms, E4M3, count)
            assert all(torch.equal(few[slots[:count]], all_[slots[:count]]) for few, all_ in zip(fewer[1:], got[1:]))
    assert float(exact[1].abs().max()) > 448 * SCALES[0]
    spoilt = qkv.clone()
    spoilt[0] = float("nan")
    assert all(bool(part[slots[0]].float().isnan().all()) for part in run(spoilt, None, E4M3)[1:])


def check_eight_bit_latents(
    ops: Ops, rows: int, heads: int, rank: int, width: int, interleaved: bool, dtype: torch.dtype, device: str
) -> None:
    angles_of = Rope(RopeSpec(width, 10000.0), POSITIONS)
    angles_of.prepare(device)
    queries = noise(9, rows, heads, width, dtype=dtype, device=device)
    projected = noise(10, rows, rank + width, dtype=dtype, device=device)
    weight = noise(11, rank, dtype=dtype, device=device)
    positions = torch.arange(rows, device=device) * 3
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(12))[:rows].to(device)

    def run(stored: torch.dtype, as_dtype: torch.dtype, count: int = rows) -> list[torch.Tensor]:
        latents = torch.zeros(SLOTS, rank + width, device=device).to(stored)
        rope = LatentRope(positions[:count], angles_of.cos, angles_of.sin, weight.to(as_dtype), 1e-5, interleaved)
        inputs = queries[:count].to(as_dtype), projected[:count].to(as_dtype)
        scale = SCALES[0] if stored == E4M3 else 1.0
        return [ops.rope_and_store_latent(*inputs, rope, latents, slots[:count], scale), latents]

    got, exact = run(E4M3, dtype), run(torch.float32, torch.float32)
    assert torch.equal(got[0], run(dtype, dtype)[0])
    check_stored(got[1][slots], exact[1][slots], SCALES[0])
    assert int((got[1].float() != 0).any(-1).sum()) == rows
    for count in (1, 2):
        assert torch.equal(run(E4M3, dtype, count)[1][slots[:count]], got[1][slots[:count]])


def check_stored(stored: torch.Tensor, exact: torch.Tensor, scale: float) -> None:
    """Numbers in eight bits are the nearest to those divided by the scale; at most a few, which lie in the middle of
    two, are the second nearest."""
    assert stored.dtype == E4M3
    wanted = (exact.double() / scale).clamp(-448, 448)
    nearest = wanted.to(E4M3).double()
    off = (stored.double() - wanted).abs() - (nearest - wanted).abs()
    assert bool((off <= 1e-4 * wanted.abs()).all())
    assert float((stored.double() != nearest).double().mean()) < 1e-3
