"""Attention from its definition, and random steps to test it on, for the CPU's and the GPU's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from stridelm.attention import BACKENDS, flash_infer
from stridelm.batch import Geometry
from stridelm.cache.layout import HeadsKV, LatentKV

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Maximum deviation from float64, for values up to 4. bfloat16 has eight significant bits."""
INEXACT = ("flashinfer",)
"""Backends that do not promise equal bits, and refuse if they are required."""


def backends(device: str) -> list[str]:
    """Every registered backend that runs on the device and promises equal bits."""
    return [name for name in BACKENDS if BACKENDS.get(name).device in (None, device) and name not in INEXACT]


@dataclass
class Piece:
    """One span: `real` rows after `start` committed entries, and a draft tree given by parents (-1: the last real row).
    Rows in `dead` are padding."""

    start: int
    real: int
    parents: tuple[int, ...] = ()
    dead: frozenset[int] = frozenset()

    def path(self, row: int) -> list[int]:
        """A draft row's ancestors and itself, first to last."""
        return [] if row < 0 else [*self.path(self.parents[row]), row]

    @property
    def base(self) -> int:
        return self.start + self.real

    @property
    def storage(self) -> int:
        return self.base + len(self.parents)


@dataclass(frozen=True)
class HeadMatrices:
    """Random matrices by which heads expand latents: an `Expansion`."""

    weight_HXR: torch.Tensor
    """Of keys, and below them those of values, of one width."""
    expands: bool = True
    """Whether latents may be expanded."""

    @classmethod
    def of(cls, case: Case, width: int) -> HeadMatrices:
        assert case.latent is not None
        numbers = torch.Generator().manual_seed(width)
        weight = torch.randn(case.heads, 2 * width, case.latent.rank, generator=numbers, dtype=torch.float64)
        return cls((weight * case.latent.rank**-0.5).to(case.device, case.dtype))

    @property
    def width(self) -> int:
        return self.weight_HXR.shape[1] // 2

    def absorb(self, q_NHD: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nhd,hdr->nhr", q_NHD, self.weight_HXR[:, : self.width])

    def values(self, mixed_NHR: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nhr,hdr->nhd", mixed_NHR, self.weight_HXR[:, self.width :])

    def absorbs_few(self, q_NHD: torch.Tensor) -> None:
        """Its products are not our kernel's."""

    def expand(self, latents_LR: torch.Tensor, first: int, last: int) -> torch.Tensor:
        assert self.expands, "latents were expanded"
        return torch.einsum("lr,hxr->lhx", latents_LR, self.weight_HXR[first:last])


@dataclass
class Case:
    """A step, the pool of one layer and the queries of its rows. Every piece has its own request."""

    pieces: list[Piece]
    kv: HeadsKV
    heads: int
    page_size: int
    dtype: torch.dtype
    device: str
    tables: list[list[int]]
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    rows: list[tuple[int, int]] = field(default_factory=list)
    """(piece, row in it) of each row of the batch; draft rows are numbered on from the real ones."""
    latent: LatentKV | None = None
    """The layer's state if keys are latent rows and values the latents in them; `kv` describes the same as heads."""

    def slot(self, piece: int, index: int) -> int:
        return self.tables[piece][index // self.page_size] * self.page_size + index % self.page_size

    def attend(self, backend: str) -> torch.Tensor:
        """[N, H, D] as the backend computes it."""
        made = BACKENDS.get(backend)(backend not in INEXACT)
        made.check((self.latent or self.kv,), self.dtype)
        mixer: Any = made.prepare(geometry(self)).mixer(self.latent or self.kv)
        if self.latent is None:
            return mixer.attend(self.kv, self.queries, self.keys, self.values)
        latent, turned = self.queries.split((self.latent.rank, self.latent.rope_dim), dim=2)
        return mixer.attend(self.latent, latent, turned, self.keys[:, 0])

    def attend_from_heads(
        self, backend: str, matrices: HeadMatrices, *, deterministic: bool = False, shape: Geometry | None = None
    ) -> torch.Tensor:
        """[N, H, V] over latents, from each head's own query to its own values, as the backend computes it. shape: of
        the step, if it is not the case's."""
        assert self.latent is not None
        state = replace(self.latent, expands=(matrices.width, matrices.width))
        made = BACKENDS.get(backend)(deterministic)
        made.check((state,), self.dtype)
        mixer: Any = made.prepare(shape or geometry(self)).mixer(state)
        query, turned = self.queries[..., : matrices.width], self.queries[..., state.rank :]
        return mixer.values(state, query, turned, self.keys[:, 0], matrices)

    def expanded(self, matrices: HeadMatrices) -> Case:
        """The same attention over each head's own keys and values, in float64."""
        assert self.latent is not None
        wide, rank = matrices.width, self.latent.rank
        rows = self.keys[:, 0].double() * self.latent.key_scale
        both = torch.einsum("lr,hxr->lhx", rows[:, :rank], matrices.weight_HXR.double())
        tails = rows[:, None, rank:].expand(-1, self.heads, -1)
        return replace(
            self,
            kv=replace(self.latent.one_head, kv_heads=self.heads, value_dim=wide, key_scale=1.0, value_scale=1.0),
            keys=torch.cat((both[..., :wide], tails), 2),
            values=both[..., wide:],
            queries=torch.cat((self.queries[..., :wide], self.queries[..., rank:]), 2),
            latent=None,
        )


def make(
    pieces: Sequence[Piece],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    value_dim: int | None = None,
    window: int | None = None,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    scales: tuple[float, float] | None = None,
) -> Case:
    """Random keys, values and queries, on pages in random order. Entries after a span are random too. scales: of keys
    and values in eight bits."""
    rng = random.Random(seed)
    counts = [-(-piece.storage // page_size) for piece in pieces]
    pages = list(range(1, sum(counts) + 3))
    rng.shuffle(pages)
    tables = [[pages.pop() for _ in range(count)] for count in counts]
    generator = torch.Generator().manual_seed(seed)
    slots = (sum(counts) + 3) * page_size
    rows = [(i, row) for i, piece in enumerate(pieces) for row in range(piece.real + len(piece.parents))]

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    wide = value_dim or head_dim
    state = HeadsKV("main", window, heads, kv_heads, head_dim, wide, head_dim**-0.5)
    state = state if scales is None else state.in_eight_bits(*scales)
    return Case(
        list(pieces),
        state,
        heads,
        page_size,
        dtype,
        device,
        tables,
        stored(noise(slots, kv_heads, head_dim), state.key_scale, state),
        stored(noise(slots, kv_heads, wide), state.value_scale, state),
        noise(len(rows), heads, head_dim) * 2,
        rows,
    )


def make_latent(
    pieces: Sequence[Piece],
    *,
    heads: int = 4,
    rank: int = 32,
    rope_dim: int = 8,
    window: int | None = None,
    **options: Any,
) -> Case:
    """The same for a layer with latent rows."""
    made = make(pieces, heads=heads, kv_heads=1, head_dim=rank + rope_dim, window=window, **options)
    latent = LatentKV("main", window, heads, rank, rope_dim, made.kv.scale)
    latent = latent if made.kv.stored is None else latent.in_eight_bits(made.kv.key_scale, made.kv.value_scale)
    return replace(made, kv=latent.one_head, values=made.keys[..., :rank], latent=latent)


def stored(entries: torch.Tensor, scale: float, state: HeadsKV) -> torch.Tensor:
    """As a layer like this keeps them."""
    return entries if state.stored is None else (entries.double() / scale).clamp(-448, 448).to(state.stored)


def geometry(case: Case) -> Geometry:
    """The geometry that the batch builder would make for the step."""
    draft, ancestors, positions, ordered = [], [], [], []
    for i, row in case.rows:
        piece = case.pieces[i]
        own = row - piece.real
        path = piece.path(own) if own >= 0 else []
        valid = own not in piece.dead
        draft.append(max(own, -1))
        mask = sum(1 << member for member in path) if valid else 0
        ancestors.append(mask - (1 << 64) if mask >> 63 else mask)
        positions.append(piece.start + row if own < 0 else piece.base - 1 + len(path))
        ordered.append(own >= 0 and valid and path != list(range(own + 1)))

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=case.device)

    counts = [piece.real + len(piece.parents) for piece in case.pieces]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    width = max(len(table) for table in case.tables)
    padded = [table + [0] * (width - len(table)) for table in case.tables]

    def of_spans(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=case.device)

    return Geometry(
        bounds=tuple(counts),
        firsts=of_spans([end - count for end, count in zip(ends, counts)]),
        counts=of_spans(counts),
        starts=of_spans([piece.start for piece in case.pieces]),
        reals=of_spans([piece.real for piece in case.pieces]),
        draft_rows=tensor(draft),
        ancestors=tensor(ancestors),
        positions=tensor(positions),
        tables={"main": of_spans(padded)},
        page_size=case.page_size,
        max_keys=max(piece.start + count for piece, count in zip(case.pieces, counts)),
        is_chain=not any(ordered),
        ends=tuple(piece.start + count for piece, count in zip(case.pieces, counts)),
    )


def naive(case: Case, soft_cap: float | None = None) -> torch.Tensor:
    """[N, H, D] float64: softmax(q k / sqrt(D)) v over what each row may see; NaN for dead rows."""
    out = torch.full((*case.queries.shape[:2], case.kv.value_dim), float("nan"), dtype=torch.float64)
    per_head = case.heads // case.kv.kv_heads
    keys = case.keys.cpu().double() * case.kv.key_scale
    values = case.values.cpu().double() * case.kv.value_scale
    for n, (i, row) in enumerate(case.rows):
        piece = case.pieces[i]
        own = row - piece.real
        if own in piece.dead:
            continue
        seen = list(range(piece.base)) + [piece.base + member for member in piece.path(own)]
        if own < 0:
            seen = seen[: piece.start + row + 1]
        # In order of position, so the last `window` of them are those inside the window.
        if case.kv.window is not None:
            seen = seen[-case.kv.window :]
        slots = torch.tensor([case.slot(i, index) for index in seen])
        q = case.queries[n].cpu().double()
        k = keys[slots].repeat_interleave(per_head, 1)
        v = values[slots].repeat_interleave(per_head, 1)
        scores = torch.einsum("hd,lhd->hl", q, k) * case.kv.scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        out[n] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
    return out


def random_tree(rng: random.Random, rows: int) -> tuple[int, ...]:
    """Parents of a random tree, from chains to stars."""
    eager = rng.choice((0.0, 0.5, 0.9, 1.0))
    return tuple(row - 1 if rng.random() < eager else rng.randrange(-1, row) for row in range(rows))


def random_pieces(seed: int, count: int, longest: int = 200, rows: int = 64) -> list[Piece]:
    """Decodes, chunks, whole prompts, chains and trees in random mixtures."""
    rng = random.Random(seed)
    pieces = []
    for _ in range(count):
        start = rng.choice((0, rng.randrange(longest)))
        real = rng.choice((1, 1, rng.randrange(1, 8), rng.randrange(1, longest)))
        parents = random_tree(rng, rng.choice((0, 0, 1, 5, rng.randrange(rows), rows)))
        dead = {row for row in range(len(parents)) if rng.random() < 0.1}
        for row, parent in enumerate(parents):
            if parent in dead:
                dead.add(row)
        pieces.append(Piece(start, real, parents, frozenset(dead)))
    return pieces


def check_attention(backend: str, case: Case) -> None:
    """The backend agrees with the definition at every valid row, and is finite at the others; or it refuses the case,
    for which it has no kernels."""
    if backend == "flashinfer" and (
        case.dtype not in flash_infer.DTYPES or case.kv.key_dim not in flash_infer.HEAD_DIMS
    ):
        with pytest.raises(ValueError, match="the flashinfer backend"):
            case.attend(backend)
        return
    check_values(case.attend(backend), naive(case))


def check_values(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Values agree with those of `naive`."""
    assert got.shape == wanted.shape and bool(got.isfinite().all())
    valid = ~wanted.isnan()
    worst = float((got.cpu().double() - wanted)[valid].abs().max())
    assert worst <= CLOSE[got.dtype], worst


def part(case: Case, pieces: Sequence[tuple[int, Piece]]) -> Case:
    """The same requests and pool with other spans: (request, its span). Only real rows are compared."""
    index = {row: n for n, row in enumerate(case.rows)}
    rows, wanted = [], []
    for number, (i, piece) in enumerate(pieces):
        shift = piece.start - case.pieces[i].start
        for row in range(piece.real):
            rows.append((number, row))
            wanted.append(index[i, row + shift])
    picked = torch.tensor(wanted, device=case.device)
    return replace(
        case,
        pieces=[piece for _, piece in pieces],
        tables=[case.tables[i] for i, _ in pieces],
        queries=case.queries[picked],
        rows=rows,
    )


def check_row_invariance(backend: str, case: Case, seed: int = 0) -> None:
    """Every real row has the same bits in its chunk, in smaller chunks, by itself, and beside other spans."""
    rng = random.Random(seed)
    together = case.attend(backend)
    where = {row: n for n, row in enumerate(case.rows)}
    for i, piece in enumerate(case.pieces):
        cuts = sorted({0, piece.real, *(rng.randrange(piece.real) for _ in range(3))})
        chunks = [(i, Piece(piece.start + a, b - a)) for a, b in pairwise(cuts)]
        singles = [(i, Piece(piece.start + row, 1)) for row in rng.sample(range(piece.real), min(piece.real, 4))]
        for spans in (*([chunk] for chunk in chunks), *([single] for single in singles), [*chunks, *singles]):
            smaller = part(case, spans)
            got = smaller.attend(backend)
            for n, (number, row) in enumerate(smaller.rows):
                shift = smaller.pieces[number].start - piece.start
                assert torch.equal(got[n], together[where[i, row + shift]]), (piece, spans)


def check_path_invariance(backend: str, case: Case) -> None:
    """A candidate has the bits that the real row in its place has once its path is committed."""
    together = case.attend(backend)
    where = {row: n for n, row in enumerate(case.rows)}
    for i, piece in enumerate(case.pieces):
        for own in range(len(piece.parents)):
            if own in piece.dead:
                continue
            path = piece.path(own)
            moved = replace(case, keys=case.keys.clone(), values=case.values.clone())
            for depth, row in enumerate(path):
                target, source = case.slot(i, piece.base + depth), case.slot(i, piece.base + row)
                moved.keys[target], moved.values[target] = case.keys[source], case.values[source]
            last = Piece(piece.base + len(path) - 1, 1)
            moved.pieces, moved.tables, moved.rows = [last], [case.tables[i]], [(0, 0)]
            n = where[i, piece.real + own]
            moved.queries = case.queries[n : n + 1]
            assert torch.equal(moved.attend(backend)[0], together[n]), (piece, own)
