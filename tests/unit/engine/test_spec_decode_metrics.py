"""What a request's metrics say of its drafts, against a count of its own over the rows of a trace."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stridelm import LLM, SamplingParams
from stridelm.engine.request_metrics import RequestMetrics
from stridelm.engine.spec_decode_metrics import SpecDecodeMetrics
from stridelm.engine.trace import JsonTracer
from stridelm.llm import RequestOutput
from support.doubles.stand import Job, Stand, all_speculations, speculation
from support.doubles.tree_drafter import NAME as TREE
from support.doubles.tree_drafter import RandomTreeDrafter, registered

LENGTH = 24
COUNTS = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


def jobs_of(stand: Stand) -> list[Job]:
    """One request for every drafter and depth, trees and a lossy one. The first prompt takes three chunks."""
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, seed=3)
    kinds = [*all_speculations(stand), speculation(stand, "mask", "default", "trust")]
    jobs = [Job([5 + i, 6, 7, 8, 6, 7, 8, 6], params, kind) for i, kind in enumerate(kinds)]
    jobs[0].prompt = [(7 * i) % 60 for i in range(150)]
    for job in jobs:
        if job.speculation is not None and job.speculation["drafter"] == TREE:
            RandomTreeDrafter.teach(job.prompt, params.seed, 0, stand.tokens(job.prompt, params))
    return jobs


def run(stand: Stand, level: str) -> list[tuple[RequestOutput, list[tuple[int, int]]]]:
    """Each request with (drafted, accepted) of its steps, those without a draft left out: the guesses among the rows
    that ran, and what was emitted beyond the token that every step emits."""
    llm = stand.llm(
        max_num_batched_tokens=64, page_size=4, enable_prefix_caching=False, per_request_spec_decode_metrics=level
    )
    out = io.StringIO()
    llm.engine.tracer = JsonTracer(llm.engine.ledger, llm.engine.stats, None, out)
    outputs = stand.run(jobs_of(stand), llm)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    found = []
    for output in outputs:
        steps = []
        for line in lines:
            if line["request"] != f"{output.request_id}.0" or not line["decides"]:
                continue
            guess = "probe" if line["acceptance"] == "trust" else "candidate"
            drafted = sum(row["role"] == guess for row in line["rows"])
            if drafted:
                steps.append((drafted, len(line["verdict"]["emitted"]) - 1))
        found.append((output, steps))
    return found


@pytest.fixture(scope="module")
def detailed(stand: Stand) -> list[tuple[RequestOutput, list[tuple[int, int]]]]:
    return run(stand, "detailed")


def histogram(accepted: list[int], most: int) -> tuple[int, ...]:
    """Entry j: how often j was accepted. Only the trees of these tests have more levels than the request's depth."""
    counts = Counter(accepted)
    return tuple(counts[j] for j in range(max(most, *accepted, 0) + 1))


def of(output: RequestOutput) -> SpecDecodeMetrics | None:
    assert output.metrics is not None
    return output.metrics.speculative_decoding


def test_every_verify_step_is_listed(detailed: Any) -> None:
    for output, steps in detailed:
        told = of(output)
        if output.metrics.drafter == "none":
            assert told is None and not steps
            continue
        assert told is not None and told.per_step_drafted is not None and told.per_step_accepted is not None
        assert list(zip(told.per_step_drafted, told.per_step_accepted, strict=True)) == steps, output.metrics
    assert sum(len(steps) for _, steps in detailed) > 100
    assert any(len(steps) < output.metrics.steps for output, steps in detailed if output.metrics.depth)
    assert any(len({drafted for drafted, _ in steps}) > 1 for _, steps in detailed)


def test_counts_are_of_these_steps(detailed: Any) -> None:
    for output, steps in detailed:
        told, depth = of(output), output.metrics.depth
        if told is None:
            continue
        drafted, accepted = sum(d for d, _ in steps), sum(a for _, a in steps)
        assert told.acceptance_histogram == histogram([a for _, a in steps], depth)
        assert len(told.acceptance_histogram) == depth + 1 or output.metrics.drafter == TREE
        by_length = {k: [a for d, a in steps if d == k] for k, _ in steps}
        assert told.acceptance_histogram_by_draft_length == {
            k: histogram(taken, min(k, depth)) for k, taken in by_length.items()
        }
        assert (told.num_spec_steps, told.num_accepted_draft_tokens, told.num_draft_tokens) == (
            len(steps),
            accepted,
            drafted,
        )
        assert told.num_spec_tokens == depth
        assert told.mean_acceptance_length == (1 + accepted / len(steps) if steps else 1)
        assert told.draft_acceptance_rate == (accepted / drafted if steps else 0)
        # What Prometheus is told under vLLM's names.
        assert (output.metrics.drafted, output.metrics.accepted) == (drafted, accepted)
        assert (output.metrics.reached_at[0] if steps else 0) == len(steps)


def test_a_summary_is_the_same_without_the_steps(stand: Stand, detailed: Any) -> None:
    for (output, _), (long, _) in zip(run(stand, "summary"), detailed, strict=True):
        short = of(output)
        if short is None:
            assert of(long) is None
            continue
        assert short.per_step_accepted is short.per_step_drafted is None
        shown = long.metrics.speculative_decoding.as_json()
        assert shown.keys() - short.as_json().keys() == {"per_step_accepted", "per_step_drafted"}
        assert short.as_json().items() <= shown.items()
        assert short.num_spec_steps == short.as_json()["num_spec_steps"]


def test_nothing_is_kept_unless_asked_for(stand: Stand) -> None:
    llm = stand.llm()
    request = llm.engine.intake.request("0", [5, 6, 7], SamplingParams(speculation={"drafter": "mtp"}))
    assert request.stats.verified is None
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, speculation={"drafter": "mtp"})
    [output] = llm.generate([[5, 6, 7]], params)
    assert output.metrics is not None and output.metrics.drafted and of(output) is None


def test_a_request_that_drafts_nothing(stand: Stand) -> None:
    """Null without speculation; zeros where the drafter found nothing, as in vLLM."""
    llm = stand.llm(per_request_spec_decode_metrics="detailed")
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    off, idle = stand.run([Job([5, 9], params, {"drafter": "none"}), Job([5, 9], params, {"drafter": "ngram"})], llm)
    assert of(off) is None
    told = of(idle)
    assert told is not None and not any(told.acceptance_histogram)
    assert len(told.acceptance_histogram) == told.num_spec_tokens + 1
    assert (told.mean_acceptance_length, told.draft_acceptance_rate) == (1.0, 0.0)
    assert [getattr(told, name) for name in COUNTS] == [0, 0, 0]
    assert told.per_step_drafted == told.per_step_accepted == ()


def test_streams_report_as_they_grow(stand: Stand) -> None:
    llm = stand.llm(per_request_spec_decode_metrics="detailed")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, speculation={"drafter": "mtp"})
    seen = [told for output in llm.stream([5, 6, 7, 5, 6], params) if (told := of(output)) is not None]
    lists = [told.per_step_drafted for told in seen]
    assert len(set(lists)) > 3
    for before, after in pairwise(lists):
        assert before is not None and after is not None
        assert after[: len(before)] == before


def test_metrics_cross_to_the_http_process(detailed: Any) -> None:
    for output, _ in detailed:
        crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(output.metrics), type=RequestMetrics)
        assert crossed == output.metrics


@pytest.mark.parametrize("level", ["all", "", None, True])
def test_other_levels_are_refused(level: Any) -> None:
    with pytest.raises(ValueError, match="choose none, summary or detailed"):
        LLM(per_request_spec_decode_metrics=level)
