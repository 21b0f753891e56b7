"""A wrong page index is detected before it is used, and the error names its request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import SamplingParams
from stridelm.batch import Geometry
from stridelm.cache.layout import HeadsKV
from stridelm.cache.pool import PagePool, draft_places
from stridelm.run.trap import PageFault, PageTrap
from support.checks.identity import LENGTH, check_identity, mixed_jobs, trusting_neighbours
from support.checks.trap import PAGE_SIZE, WRONG_PAGES, Spoiler, check_names_the_entry, engine_of
from support.doubles.bounds import BOUNDS, bounds_registered
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered
from support.oracles.attention import Case, Piece, geometry, make, random_pieces

WAYS = (("host", "ledger"), (BOUNDS, "ledger"), (BOUNDS, "device"))
"""The backend, and which copy of a page table is corrupted."""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with bounds_registered(), registered():
        yield


# By itself

LAYOUT = (
    HeadsKV.of(1, 1, 4, group="other"),
    HeadsKV.of(2, 2, 8, group="main"),
    HeadsKV.of(3, 3, 8, group="main"),
    HeadsKV.of(1, 1, 4, group="other"),
)
FIRST = {"other": 0, "main": 1}


def batch(case: Case, shape: Geometry) -> Any:
    """The runner's input: rows at their storage index's slot, padding at the null slot."""
    rows = [(i, case.pieces[i].start + row, row - case.pieces[i].real) for i, row in case.rows]
    slots = [0 if own in case.pieces[i].dead else case.slot(i, storage) for i, storage, own in rows]
    counts = [piece.real + len(piece.parents) for piece in case.pieces]
    spans = [type("S", (), {"request": type("R", (), {"id": f"r{i}"})}) for i in range(len(counts))]
    fields = {"geometry": shape, "spans": spans, "row_counts": counts}
    return type("B", (), {**fields, "slots": {group: torch.tensor(slots) for group in FIRST}})


def check(spoilt: Any, pool: PagePool) -> None:
    PageTrap(pool).check(spoilt, *draft_places(spoilt.geometry))


@pytest.mark.parametrize("seed", range(10))
def test_every_wrong_index_is_found(seed: int) -> None:
    """In random steps: any entry that is read, any slot that is written; entries that are not read may be anything."""
    rng = random.Random(seed)
    page_size = rng.choice((1, 3, 16))
    case = make(random_pieces(seed, 5, longest=40), page_size=page_size, seed=seed)
    last = len(case.keys) // page_size - 1
    pool = PagePool(LAYOUT, {"main": last, "other": last}, page_size, case.dtype, torch.device("cpu"))
    for table in case.tables:
        table += [10**6] * 3  # stale

    def step(group: str = "main", span: int = 0, index: int = -1, page: int = 10**6) -> Any:
        shape = geometry(case)
        shape.tables = {name: shape.tables["main"].clone() for name in FIRST}
        shape.tables[group][span, index] = page
        return batch(case, shape)

    check(step(), pool)
    for group, first in FIRST.items():
        where = f"layer {first}, page group {group}"
        span = rng.randrange(len(case.pieces))
        index = rng.randrange(-(-case.pieces[span].storage // page_size))
        for page in (0, -1, last + 1, 2**31 - 1):
            says = f"request r{span}, {where}: entry {index} of its page table is page {page}; the group has pages 1 to"
            with pytest.raises(PageFault, match=f"^{says} {last}\\."):
                check(step(group, span, index, page), pool)
        row = rng.randrange(len(case.rows))
        for slot in ((last + 1) * page_size, -1, int(step().slots[group][row]) + 1):
            wrong = step()
            wrong.slots[group][row] = slot
            if slot == 1 and page_size > 1:
                check(wrong, pool)  # padding may write anywhere in the null page
                continue
            says = (
                f"request r{case.rows[row][0]}, {where}: row {row} writes to slot {slot} of page {slot // page_size},"
            )
            with pytest.raises(PageFault, match=f"^{says} which is not its own"):
                check(wrong, pool)


def test_two_writers() -> None:
    """Requests may read the same pages, but never write to the same slot in one step."""
    case = make([Piece(9, 1), Piece(5, 2), Piece(9, 1)])
    pool = PagePool(LAYOUT, {"main": 50, "other": 50}, 4, case.dtype, torch.device("cpu"))

    def step() -> Any:
        shape = geometry(case)
        shape.tables["other"] = shape.tables["main"]
        return batch(case, shape)

    case.tables[2][:2] = case.tables[0][:2]
    check(step(), pool)
    case.tables[2][2] = page = case.tables[0][2]
    with pytest.raises(
        PageFault, match=f"^request r2, .*: row 3 writes to slot .* of page {page}, as row 0 of request r0"
    ):
        check(step(), pool)


# In an engine


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


@pytest.mark.parametrize("page", WRONG_PAGES)
@pytest.mark.parametrize(("backend", "where"), WAYS)
def test_names_the_entry(stand: Stand, backend: str, where: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_names_the_entry(stand, backend, where, page, monkeypatch)


@pytest.mark.parametrize(("backend", "where"), WAYS)
def test_table_of_another(stand: Stand, backend: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of the same length, where one writes to the other's page: both are named."""
    llm = engine_of(stand, backend)
    engine = llm.engine
    for name in "ab":
        engine.add(name, [ord(name) % 60, 1, 2, 3, 4], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    spoiler = Spoiler(llm, where, monkeypatch)
    for _ in range(2):
        engine.step()
    first, second = engine.queue.running
    spoiler.page, spoiler.is_last = engine.ledger.table(first, "full")[first.computed // PAGE_SIZE], True
    with pytest.raises(PageFault, match=r"^request b, .* row 1 writes to slot .*, as row 0 of request a does"):
        engine.step()
    while engine.busy:
        engine.step()
    assert second.output_ids == stand.tokens(second.prompt_ids, second.params)


@pytest.mark.parametrize("backend", ["host", BOUNDS])
def test_healthy(stand: Stand, backend: str) -> None:
    """Trees, chains, trusted windows, a warm prefix cache and preemptions: no error, and no change in the output."""
    jobs = mixed_jobs(stand, 8, 0.7, ["nothing", "samples", "repetition_penalty", "stop_token_ids"], seed=4)
    lossy = trusting_neighbours(stand, 0.7)[:2]
    longest = max(len(job.prompt) for job in [*jobs, *lossy]) + LENGTH + 64
    llm = engine_of(stand, backend, num_pages=longest // PAGE_SIZE + 1)
    check_identity(stand, jobs, lossy, llm=llm)
    assert llm.engine.stats.preemptions > 0
    roomy = engine_of(stand, backend)
    check_identity(stand, jobs, llm=roomy)
    warm = check_identity(stand, jobs, llm=roomy)
    assert any(output.metrics is not None and output.metrics.cached_tokens > 0 for output in warm)


def test_is_off_by_default(stand: Stand) -> None:
    assert stand.llm().engine.runner.trap is None
