"""Memory of a GPU that moves between tensors whose addresses stay: by the driver, under graphs, in a running engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm.cache.backing import Backing, elastic_memory
from stridelm.cache.layout import HeadsKV
from stridelm.cache.pool import Elastic, PagePool
from support.checks.identity import check_identity, mixed_jobs
from support.doubles.stand import Stand
from support.doubles.tight_memory import forced, tight
from support.doubles.tree_drafter import registered
from support.gpu import NEEDS_GPU
from support.oracles.models import VARIANTS

pytestmark = NEEDS_GPU
CUDA = torch.device("cuda:0")
WINDOW, MIB = 9, 2**20
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "max_position_embeddings": 4096,
    },
    "gemma4_text": {**VARIANTS["gemma4_text"]["shared-with-inputs"], "max_position_embeddings": 4096},
}


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


def memory() -> Any:
    found = elastic_memory(CUDA)
    assert found is not None, "the driver maps no memory"
    return found


def filled(backing: Backing, value: int, start: int, end: int) -> bool:
    return bool((backing.bytes[start:end] == value).all())


def test_map_shrink_and_grow_again() -> None:
    """Addresses stay; what is under the smallest size keeps its contents; chunks that come back hold zeros, although
    another tensor wrote to them meanwhile."""
    source = memory()
    chunk = source.chunk
    assert chunk % MIB == 0
    one, other = source.reserve(8 * chunk + 100, 6 * chunk), source.reserve(8 * chunk, chunk)
    address = one.bytes.data_ptr()
    assert one.bytes.shape == (8 * chunk + 100,) and one.bytes.device == CUDA and one.bytes.dtype == torch.uint8
    assert filled(one, 0, 0, 8 * chunk + 100)
    one.bytes[: 6 * chunk] = 7
    source.wait()
    one.resize(2 * chunk + 1)
    other.resize(4 * chunk)
    assert filled(other, 0, 0, 8 * chunk), "what another tensor left there shows"
    other.bytes[: 4 * chunk] = 9
    assert filled(one, 7, 0, 3 * chunk) and filled(one, 0, 3 * chunk, 8 * chunk + 100)
    source.wait()
    other.resize(chunk)
    one.resize(6 * chunk)
    assert one.bytes.data_ptr() == address
    assert filled(one, 7, 0, 3 * chunk) and filled(one, 0, 3 * chunk, 8 * chunk + 100)
    assert filled(other, 9, 0, chunk) and filled(other, 0, chunk, 8 * chunk)


def test_reads_where_there_is_no_memory() -> None:
    """A kernel that reads every reserved byte finds zeros, however often the size changed; nothing faults, and the
    reserved addresses take no memory (others may take some meanwhile, but not each of five times)."""
    source, count = memory(), 4096

    def reserved() -> tuple[Backing, int]:
        free, _ = torch.cuda.mem_get_info(CUDA)
        backing = source.reserve(count * source.chunk, source.chunk)  # 8 GiB of addresses
        return backing, free - torch.cuda.mem_get_info(CUDA)[0]

    backing = next((backing for backing, used in (reserved() for _ in range(5)) if used < 512 * MIB), None)
    assert backing is not None
    for chunks in (1, 5, 0, 3):
        backing.resize(chunks * source.chunk)
        backing.bytes[: chunks * source.chunk] = 1
        words = backing.bytes.view(torch.int64)
        assert int(words.ne(0).sum()) == chunks * source.chunk // 8
        source.wait()


def test_everything_is_given_back() -> None:
    """Once no tensor is left: chunks and addresses. A view keeps both. (Others may take or give back memory of the
    device meanwhile, but not each of five times.)"""

    def kept() -> float:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        source = memory()
        free, _ = torch.cuda.mem_get_info(CUDA)
        backing = source.reserve(256 * source.chunk, 128 * source.chunk)
        if free - torch.cuda.mem_get_info(CUDA)[0] < 128 * source.chunk:
            return float("inf")
        view = backing.bytes[: source.chunk].view(torch.float32)
        del backing, source
        gc.collect()
        view.fill_(2.5)
        assert bool((view == 2.5).all())
        del view
        gc.collect()
        torch.cuda.empty_cache()
        return free - torch.cuda.mem_get_info(CUDA)[0]

    assert any(kept() <= 16 * MIB for _ in range(5))


def test_memory_is_only_moved() -> None:
    """What one tensor gives back is what the other gets: the device has no less free after a hundred re-splits. Others
    may take memory of the device meanwhile, but not each of five times."""
    source = memory()
    one, other = (source.reserve(64 * source.chunk, 32 * source.chunk) for _ in range(2))

    def taken() -> int:
        free, _ = torch.cuda.mem_get_info(CUDA)
        for turn in range(100):
            grown, shrunk = (one, other) if turn % 2 else (other, one)
            source.wait()
            shrunk.resize((turn % 7) * source.chunk)
            grown.resize((64 - turn % 7) * source.chunk)
        return free - torch.cuda.mem_get_info(CUDA)[0]

    assert any(taken() <= 4 * MIB for _ in range(5))


def test_a_captured_graph_survives() -> None:
    """A graph captured before a re-split reads and writes the right pages after it: pages that moved, new pages."""
    source = memory()
    states = (HeadsKV.of(8, 8, 128), HeadsKV.of(8, 8, 128, 64))
    pages = {"full": 512, "window_64": 512}
    pool = PagePool(states, pages, 16, torch.bfloat16, CUDA, elastic=Elastic(source, {"full": 1000, "window_64": 1000}))
    page = torch.ones(1, dtype=torch.int64, device=CUDA)
    keys, written = pool.entries[0]["keys"], torch.zeros(16, 8, 128, dtype=torch.bfloat16, device=CUDA)
    seen = torch.zeros_like(written)
    offset = torch.arange(16, device=CUDA)

    def body() -> None:
        slots = page * 16 + offset
        seen.copy_(keys[slots])
        keys[slots] = written

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        body()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for turn, (count, number) in enumerate(((512, 500), (200, 150), (824, 800), (512, 3))):
        totals = {"full": count, "window_64": 1024 - count}
        assert pool.bytes_at(totals) <= pool.budget
        pool.resize(totals)
        page.fill_(number)
        for value in (turn + 1.0, turn + 0.5):
            written.fill_(value)
            graph.replay()
        assert bool((seen == turn + 1.0).all())
        assert bool((keys[number * 16 : number * 16 + 16] == turn + 0.5).all())
    pool.move("full", {3: 40})
    page.fill_(40)
    graph.replay()
    assert bool((seen == 3.5).all())


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_do_not_change(
    checkpoint: Callable[..., Path],
    model: str,
    temperature: float,
    enforce_eager: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every drafter, with captured steps and without, while memory moves before every other step."""
    stand = Stand(checkpoint(model, **MODELS[model]), "bfloat16", "cuda")
    jobs = mixed_jobs(stand, 8, temperature, ["nothing", "repetition_penalty"], seed=3)
    options: dict[str, Any] = {"enforce_eager": True} if enforce_eager else {}
    llm = tight(stand, 16 * MIB, monkeypatch, page_size=64, max_num_seqs=64, **options)
    for seed in range(2):
        with forced(llm.engine, seed, monkeypatch) as moved:
            check_identity(stand, jobs, llm=llm)
        assert sum(moved) > 5
    assert llm.engine.stats.failed == 0
