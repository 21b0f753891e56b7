"""Page groups with different needs: layers with a window free the pages behind it, and no output changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.cache.ledger import Ledger
from stridelm.params import Speculation
from stridelm.types import Request, Span
from support.checks.identity import check_identity, mixed_jobs
from support.doubles.stand import Job, Stand, all_speculations, assert_same
from support.doubles.tree_drafter import registered
from support.oracles.models import VARIANTS

WINDOW, PAGE_SIZE = 9, 4
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    },
    "gemma4_text": VARIANTS["gemma4_text"]["shared-with-inputs"],
}
"""All layers with the same need, two needs in one model, and layers that keep nothing."""
SLIDING = f"window_{WINDOW}"


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module", params=MODELS)
def stand(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint(request.param, **MODELS[request.param]), "float32")


def held(llm: Any) -> dict[str, int]:
    return {group: counts["held"] for group, counts in llm.engine.ledger.counts().items()}


def test_a_window_is_all_that_is_held(stand: Stand) -> None:
    """For a text of any length and with any drafter, the sliding layers hold the pages of a window, of the rows in
    flight, and one at each end; the output is that of an engine whose prefix cache retains the pages."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    llm = stand.llm(page_size=PAGE_SIZE, enable_prefix_caching=False)
    for number, speculation in enumerate(all_speculations(stand)):
        job = Job([(7 * n) % 60 for n in range(21)], params, speculation)
        one = llm.engine.add(str(number), job.prompt, job.request)
        max_held = 0
        while llm.engine.busy:
            llm.engine.step()
            if one.output_ids:
                max_held = max(max_held, held(llm)[SLIDING])
        rows = 1 + max(one.rows_by_depth)
        assert 0 < max_held <= -(-(WINDOW + rows) // PAGE_SIZE) + 1, speculation
        assert one.output_ids == stand.tokens(job.prompt, params), speculation


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_identity_on_little_memory(stand: Stand, temperature: float) -> None:
    """Mixed drafters and parameters, chunks, prefix hits and preemptions, on a pool that is short of both groups."""
    jobs = mixed_jobs(stand, 10, temperature, ["nothing", "repetition_penalty", "logprobs"], seed=3)
    preempted, has_full = 0, "mistral" not in stand.path.name
    for pages in (45, 60, 110) if has_full else (9, 14, 30):
        llm = stand.llm(page_size=PAGE_SIZE, num_pages=pages, max_num_batched_tokens=40, max_num_seqs=8)
        check_identity(stand, jobs, llm=llm)
        preempted += llm.engine.stats.preemptions
    assert preempted or not has_full  # without a full group the need is known in advance, and reserved from the start


def test_a_prefix_is_found_by_its_window(stand: Stand) -> None:
    """A prompt that continues a cached text hits its prefix although max_held of its sliding pages were evicted."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    llm = stand.llm(page_size=PAGE_SIZE, num_pages=40)
    prompt = [(11 * n) % 60 for n in range(60)]
    (first,) = llm.generate(prompt, params)
    sliding = llm.engine.ledger._pages[SLIDING]
    sliding.drop(sliding.take(sliding.free + 12))  # the oldest are evicted
    longer = [*prompt, *first.outputs[0].token_ids]
    again = stand.run([Job(longer, params)], llm)[0]
    assert_same(again, stand.plain(longer, params))
    metrics = again.outputs[0].metrics
    assert metrics is not None and metrics.cached_tokens >= 60


def test_long_context_on_a_short_pool(checkpoint: Callable[..., Path]) -> None:
    """A model whose layers all slide serves a context that its pool could never hold."""
    stand = Stand(checkpoint("mistral", sliding_window=WINDOW), "float32")
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    prompt = [(5 * n) % 60 for n in range(100)]
    llm = stand.llm(page_size=PAGE_SIZE, num_pages=8, drafter_model=[], mask_token_id=None)
    assert set(held(llm)) == {SLIDING}
    (output,) = stand.run([Job(prompt, params)], llm)
    assert_same(output, stand.plain(prompt, params))


# The ledger


def stored(ledger: Ledger, one: Request, rows: int) -> None:
    with ledger.reserve([Span(one, one.computed, rows)]) as transaction:
        transaction.commit([0])


def test_a_hit_needs_a_window_of_one_group_and_all_of_the_other() -> None:
    ledger = Ledger({"full": 40, "sliding": 40}, 2, windows={"sliding": 5})
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]

    def request(name: str) -> Request:
        return Request(name, prompt, SamplingParams(), Speculation())

    one = request("one")
    ledger.admit(one)
    stored(ledger, one, 12)
    assert ledger.table(one, "sliding")[:4] == [0, 0, 0, 0]
    assert all(ledger.table(one, "sliding")[4:]) and all(ledger.table(one, "full"))
    ledger.release(one)
    assert ledger.match(request("two"))[0] == 10
    lost = next(iter(ledger._pages["sliding"]._idle))  # the oldest: the prompt's first page
    ledger._pages["sliding"]._forget(lost)
    assert ledger.match(request("three"))[0] == 10
    lost = ledger._pages["full"]._page_of[next(iter(ledger._pages["full"]._page_of))]
    ledger._pages["full"]._forget(lost)
    assert ledger.match(request("four"))[0] == 0
