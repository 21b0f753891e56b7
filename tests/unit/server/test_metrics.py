"""/metrics counts every token once, under Stride's names and vLLM's, and keeps no state of a sample that has ended."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from stridelm.engine.request_metrics import RequestMetrics
from stridelm.engine.stats import EngineStats
from stridelm.schedule.depth_figures import DepthFigures
from stridelm.server.chunk import Chunk
from stridelm.server.generation import Generation
from stridelm.server.messages import Finish, Report
from stridelm.server.metrics import CONTENT_TYPE, Metrics, Snapshot
from stridelm.stats import DraftCounts

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"
BEGAN = 64.0
"""When requests arrive. It and the times after it are sums of powers of two, so that differences are exact."""

NAMES = {
    "stride_requests_running": "vllm:num_requests_running",
    "stride_requests_waiting": "vllm:num_requests_waiting",
    "stride_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "stride_prompt_tokens_total": "vllm:prompt_tokens_total",
    "stride_generation_tokens_total": "vllm:generation_tokens_total",
    "stride_cached_prompt_tokens_total": "vllm:prefix_cache_hits_total",
    "stride_engine_preemptions_total": "vllm:num_preemptions_total",
    "stride_time_to_first_token_seconds_count": "vllm:time_to_first_token_seconds_count",
    "stride_inter_token_latency_seconds_count": "vllm:inter_token_latency_seconds_count",
    "stride_inter_token_latency_seconds_sum": "vllm:inter_token_latency_seconds_sum",
    "stride_request_latency_seconds_count": "vllm:e2e_request_latency_seconds_count",
    "stride_requests_finished_total": "vllm:request_success_total",
    "stride_request_queue_time_seconds_sum": "vllm:request_queue_time_seconds_sum",
    "stride_request_prefill_time_seconds_sum": "vllm:request_prefill_time_seconds_sum",
    "stride_request_decode_time_seconds_sum": "vllm:request_decode_time_seconds_sum",
    "stride_request_inference_time_seconds_sum": "vllm:request_inference_time_seconds_sum",
    "stride_spec_drafts_total": "vllm:spec_decode_num_drafts_total",
    "stride_spec_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "stride_spec_accepted_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
    "stride_spec_accepted_per_position_total": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}
"""Stride's name -> vLLM's for the same metric."""
OLDER = {
    "stride_kv_usage_ratio": "vllm:gpu_cache_usage_perc",
    "stride_prompt_tokens_total": "vllm:gpu_prefix_cache_queries_total",
    "stride_cached_prompt_tokens_total": "vllm:gpu_prefix_cache_hits_total",
    "stride_cache_config_info": "vllm:cache_config_info",
}
"""Further names of vLLM's."""


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("tiny")


def request(samples: int = 1) -> Generation:
    async def make() -> Generation:
        return Generation("g0", samples)

    generation = asyncio.run(make())
    generation.began = BEGAN
    return generation


def cost(**changes: Any) -> RequestMetrics:
    """For a sample with three steps, two of which had a draft of four tokens: three accepted in one, none in one."""
    plain: dict[str, Any] = {
        "steps": 3,
        "drafted": 8,
        "accepted": 3,
        "accepted_at": (1, 1, 1),
        "reached_at": (2, 1, 1, 1),
        "ttft_s": 0.5,
        "latency_s": 1.0,
        "cached_tokens": 16,
        "preemptions": 0,
        "queued_s": 0.25,
        "seed": 0,
        "drafter": "ngram",
        "acceptance": "exact",
        "acceptance_length": None,
        "lossless": True,
        "simulated": False,
        "depth": 4,
        "by_source": {"lookup": DraftCounts(2, 8, 3, 1)},
    }
    return RequestMetrics(**{**plain, **changes})


def delta(tokens: int, sample: int = 0, reason: str | None = None, **changes: Any) -> tuple[int, Chunk]:
    finish = None if reason is None else Finish(reason, None, cost(**changes))
    return sample, Chunk(list(range(tokens)), finish=finish)


def report(held: int = 0, stats: EngineStats | None = None) -> Report:
    pages = {
        "full": {"free": 10 - held, "cached": 6, "held": held, "total": 16},
        "sliding": {"free": 4, "cached": 0, "held": 0, "total": 4},
    }
    return Report(stats or EngineStats(), running=2, waiting=5, open=7, pages=pages, row_budget=512, page_size=32)


def samples(metrics: Metrics) -> Iterator[Sample]:
    for family in text_string_to_metric_families(metrics.render().decode()):
        yield from family.samples


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The value of the only series with this name that has these labels among its own."""
    found = [s for s in samples(metrics) if s.name == name and labels.items() <= s.labels.items()]
    assert len(found) == 1, (name, labels, found)
    return found[0].value


def total(metrics: Metrics, name: str) -> float:
    found = [s.value for s in samples(metrics) if s.name == name]
    assert found, name
    return sum(found)


def busy(metrics: Metrics) -> None:
    """Make every metric nonzero, with two drafters and all finish reasons."""
    generation = request(3)
    for sample, (reason, drafter) in enumerate((("stop", "ngram"), ("length", "mtp"), ("abort", "ngram"))):
        metrics.prompt(10 + sample)
        metrics.watch(generation, *delta(2, sample), BEGAN + 0.5)
        metrics.watch(generation, *delta(3, sample), BEGAN + 1.0)
        metrics.watch(generation, *delta(0, sample, reason, drafter=drafter, preemptions=1), BEGAN + 2.0)
    metrics.heard(report(held=4, stats=EngineStats(steps=1, rows=2, emitted=3, drafted=4, accepted=5, preemptions=6)))
    metrics.refused(503)
    metrics.restarted()


def test_rows_of_a_step(metrics: Metrics) -> None:
    metrics.heard(report(stats=EngineStats(memory_shortages=2, missing_graphs=3)))
    assert value(metrics, "stride_engine_row_budget") == 512
    assert value(metrics, "stride_engine_missing_graphs") == 3
    assert value(metrics, "stride_engine_memory_shortages_total") == 2
    metrics.engine_down()
    assert value(metrics, "stride_engine_row_budget") == value(metrics, "stride_engine_missing_graphs") == 0


def test_a_delta_of_several_tokens_is_as_many_intervals(metrics: Metrics) -> None:
    generation = request()
    metrics.watch(generation, *delta(3), BEGAN + 0.5)
    metrics.watch(generation, *delta(4), BEGAN + 0.75)
    metrics.watch(generation, *delta(2, reason="stop"), BEGAN + 1.0)
    assert value(metrics, "stride_generation_tokens_total") == 9
    assert value(metrics, "stride_time_to_first_token_seconds_count") == 1
    assert value(metrics, "stride_time_to_first_token_seconds_sum") == 0.5
    between = "stride_inter_token_latency_seconds"
    assert value(metrics, f"{between}_count") == 6, "the tokens that came first have no interval before them"
    assert value(metrics, f"{between}_sum") == 0.5
    assert value(metrics, f"{between}_bucket", le="0.05") == 0
    assert value(metrics, f"{between}_bucket", le="0.075") == 4, "a sixteenth of a second each"
    assert value(metrics, f"{between}_bucket", le="0.1") == 4
    assert value(metrics, f"{between}_bucket", le="0.15") == 6, "an eighth of a second each"
    assert value(metrics, f"{between}_bucket", le="+Inf") == 6


def test_a_time_on_a_bound_belongs_below_it_and_one_above_all_is_counted(metrics: Metrics) -> None:
    generation = request(2)
    metrics.watch(generation, *delta(1, 0), BEGAN + 0.25)
    metrics.watch(generation, *delta(1, 1), BEGAN + 4096)
    first = "stride_time_to_first_token_seconds_bucket"
    assert value(metrics, first, le="0.15") == 0
    assert value(metrics, first, le="0.25") == value(metrics, first, le="180.0") == 1
    assert value(metrics, first, le="+Inf") == 2


def test_samples_of_a_request_have_times_of_their_own(metrics: Metrics) -> None:
    generation = request(2)
    metrics.watch(generation, *delta(1, 0), BEGAN + 0.5)
    metrics.watch(generation, *delta(1, 1), BEGAN + 1.5)
    metrics.watch(generation, *delta(1, 0), BEGAN + 2.5)
    assert value(metrics, "stride_time_to_first_token_seconds_count") == 2
    assert value(metrics, "stride_time_to_first_token_seconds_sum") == 2.0
    assert value(metrics, "stride_inter_token_latency_seconds_count") == 1
    assert value(metrics, "stride_inter_token_latency_seconds_sum") == 2.0


def test_the_end_of_a_sample(metrics: Metrics) -> None:
    generation = request(4)
    ends = (("stop", 1.0, 0), ("length", 2.0, 3), ("length", 4.0, 1))
    for sample, (reason, seconds, preemptions) in enumerate(ends):
        metrics.watch(generation, *delta(1, sample, reason, preemptions=preemptions), BEGAN + seconds)
    for reason, count, seconds in (("stop", 1, 1.0), ("length", 2, 6.0), ("abort", 0, 0.0)):
        assert value(metrics, "stride_requests_finished_total", finished_reason=reason) == count
        assert value(metrics, "vllm:request_success_total", finished_reason=reason) == count
        assert value(metrics, "stride_request_latency_seconds_count", finished_reason=reason) == count
        assert value(metrics, "stride_request_latency_seconds_sum", finished_reason=reason) == seconds
    assert value(metrics, "stride_requests_preempted_total") == 2
    assert value(metrics, "stride_cached_prompt_tokens_total") == 3 * 16
    whole = "vllm:e2e_request_latency_seconds"
    assert value(metrics, f"{whole}_sum") == 7.0
    assert [value(metrics, f"{whole}_bucket", le=le) for le in ("0.75", "1.0", "2.5", "5.0", "+Inf")] == [0, 1, 2, 3, 3]


def test_parts_of_a_samples_time(metrics: Metrics) -> None:
    """As the engine measured them; none of a sample that was never admitted, or that got no token."""
    generation = request(3)
    metrics.watch(generation, *delta(1, 0, "stop", queued_s=0.125, ttft_s=0.5, latency_s=2.0), BEGAN + 2)
    metrics.watch(generation, *delta(0, 1, "abort", queued_s=None, ttft_s=None, latency_s=None), BEGAN + 2)
    metrics.watch(generation, *delta(0, 2, "abort", queued_s=0.5, ttft_s=None, latency_s=1.0), BEGAN + 2)
    for part, seconds in (("queue", 0.125), ("prefill", 0.375), ("decode", 1.5), ("inference", 1.875)):
        assert value(metrics, f"vllm:request_{part}_time_seconds_sum") == seconds
        assert value(metrics, f"vllm:request_{part}_time_seconds_count") == 1


def test_layout_and_hits_of_the_cache(metrics: Metrics) -> None:
    """The page size and the pages of the largest group; nothing while there is no engine."""
    assert value(metrics, "vllm:gpu_prefix_cache_hit_rate") == 0
    metrics.heard(report())
    assert value(metrics, "vllm:cache_config_info", block_size="32", num_gpu_blocks="16") == 1
    metrics.prompt(64)
    metrics.watch(request(), *delta(1, 0, "stop", cached_tokens=16), BEGAN + 1)
    assert value(metrics, "vllm:gpu_prefix_cache_hit_rate") == 0.25
    metrics.engine_down()
    assert not [s for s in samples(metrics) if s.name == "vllm:cache_config_info"]


@pytest.mark.parametrize("tokens", [0, 2])
def test_nothing_is_kept_of_a_sample_that_ended(metrics: Metrics, tokens: int) -> None:
    """A new sample with the same index is counted as new."""
    generation = request(2)
    metrics.watch(generation, *delta(1, 0), BEGAN + 0.5)
    metrics.watch(generation, *delta(1, 1), BEGAN + 0.5)
    metrics.watch(generation, *delta(tokens, 0, "stop"), BEGAN + 1.0)
    assert list(metrics._under_way[generation]) == [1]
    metrics.watch(generation, *delta(1, 0), BEGAN + 8.0)
    assert value(metrics, "stride_time_to_first_token_seconds_count") == 3
    assert value(metrics, "stride_inter_token_latency_seconds_count") == tokens


def test_nothing_is_kept_of_an_abandoned_sample(metrics: Metrics) -> None:
    """One had tokens and one was still waiting when the client left. The latter has no time to first token."""
    generation = request(2)
    generation.abandoned = True
    metrics.watch(generation, *delta(5, 0), BEGAN + 0.5)
    for sample in range(2):
        metrics.watch(generation, *delta(0, sample, "abort", cached_tokens=0), BEGAN + 1.0)
    assert not metrics._under_way[generation]
    assert value(metrics, "stride_requests_finished_total", finished_reason="abort") == 2
    assert value(metrics, "stride_generation_tokens_total") == 5
    assert value(metrics, "stride_time_to_first_token_seconds_count") == 1
    assert value(metrics, "stride_inter_token_latency_seconds_count") == 0
    assert value(metrics, "stride_spec_tokens_total") == 5


def test_what_a_dead_engine_left_unfinished_is_forgotten(metrics: Metrics) -> None:
    """The next engine's samples have the same ids, and their first tokens are first tokens."""
    generation = request()
    metrics.watch(generation, *delta(1), BEGAN + 0.5)
    after = request()
    metrics.watch(after, *delta(1), BEGAN + 1.0)
    assert value(metrics, "stride_time_to_first_token_seconds_count") == 2
    assert value(metrics, "stride_inter_token_latency_seconds_count") == 0
    del generation, after
    gc.collect()
    assert not metrics._under_way


def test_speculation_is_told_apart_by_drafter_and_rule_and_summed_for_vllm(metrics: Metrics) -> None:
    generation = request(4)
    undrafted: dict[str, Any] = {"drafted": 0, "accepted": 0, "accepted_at": (), "reached_at": ()}
    both = {"mtp": DraftCounts(1, 4, 1, 1), "lookup": DraftCounts(1, 4, 2, 1)}
    ends: list[dict[str, Any]] = [
        {},
        {"accepted": 2, "accepted_at": (2,), "reached_at": (2, 2)},
        {"drafter": "mtp", "acceptance": "relaxed", "lossless": False, "by_source": both},
        {"drafter": "none", **undrafted},
    ]
    for sample, changes in enumerate(ends):
        metrics.watch(generation, *delta(4, sample), BEGAN + 0.5)
        metrics.watch(generation, *delta(sample, sample, "stop", **changes), BEGAN + 1.0)

    ngram = {"drafter": "ngram", "acceptance": "exact", "lossless": "true"}
    mtp = {"drafter": "mtp", "acceptance": "relaxed", "lossless": "false"}
    none = {"drafter": "none", "acceptance": "exact", "lossless": "true"}
    figures = ("steps", "tokens", "drafts", "draft_tokens", "accepted_tokens")
    for labels, expected in ((ngram, (6, 9, 4, 16, 5)), (mtp, (3, 6, 2, 8, 3)), (none, (3, 7, 0, 0, 0))):
        assert tuple(value(metrics, f"stride_spec_{name}_total", **labels) for name in figures) == expected, labels
    accepted, reached = "stride_spec_accepted_per_position_total", "stride_spec_reached_per_position_total"
    assert [value(metrics, accepted, **ngram, position=str(at)) for at in range(3)] == [3, 1, 1]
    assert [value(metrics, reached, **ngram, position=str(at)) for at in range(4)] == [4, 3, 1, 1]

    counted = ("drafts", "draft_tokens", "accepted_tokens")
    names = [f"stride_spec_{name}_per_source_total" for name in counted]
    assert [value(metrics, name, **mtp, source="mtp") for name in names] == [1, 4, 1]
    assert [value(metrics, name, **mtp, source="lookup") for name in names] == [1, 4, 2]
    assert [value(metrics, name, **ngram, source="lookup") for name in names] == [4, 16, 6]

    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 6
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == 24
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 8
    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, by_position, position=str(at)) for at in range(3)] == [4, 2, 2]


def test_the_engines_gauges(metrics: Metrics) -> None:
    metrics.heard(report(held=9))
    metrics.heard(report(held=4))
    assert value(metrics, "stride_requests_running") == 2
    assert value(metrics, "stride_requests_waiting") == 5
    for state, pages in (("free", 6), ("cached", 6), ("held", 4)):
        assert value(metrics, "stride_kv_pages", group="full", state=state) == pages
    assert value(metrics, "stride_kv_pages", group="sliding", state="free") == 4
    assert value(metrics, "stride_kv_usage_ratio") == 0.25, "of the fuller group: 4 of 16, and cached ones can be had"


def test_the_engines_counts_go_on_when_it_starts_again(metrics: Metrics) -> None:
    def counts() -> list[float]:
        names = ("steps", "emitted_tokens", "finished_requests", "preemptions")
        return [value(metrics, f"stride_engine_{name}_total") for name in names]

    metrics.heard(report(stats=EngineStats(steps=10, emitted=30, finished=2)))
    metrics.heard(report(stats=EngineStats(steps=15, emitted=40, finished=2, preemptions=1)))
    assert counts() == [15, 40, 2, 1]
    metrics.heard(report(stats=EngineStats(steps=15, emitted=40, finished=2, preemptions=1)))
    assert counts() == [15, 40, 2, 1], "nothing has happened"
    metrics.heard(report(stats=EngineStats(steps=4, emitted=50, finished=2)))
    assert counts() == [19, 90, 4, 1], "fewer steps are another engine's, and so is all that it counted"
    metrics.heard(report(stats=EngineStats(steps=5, emitted=51, finished=3, preemptions=2)))
    assert counts() == [20, 91, 5, 3]
    assert value(metrics, "vllm:num_preemptions_total") == 3


def test_why_steps_are_not_captured(metrics: Metrics) -> None:
    """By reason, and on and on when the engine starts again, from whatever it counts."""
    for uncaptured in ({"prompt": 3}, {"prompt": 5, "grammar": 1}):
        metrics.heard(report(stats=EngineStats(steps=9, captures=2, compilations=1, uncaptured=uncaptured)))
    metrics.engine_down()
    metrics.heard(report(stats=EngineStats(steps=1, captures=2, uncaptured={"prompt": 1})))
    assert value(metrics, "stride_engine_uncaptured_steps_total", reason="prompt") == 6
    assert value(metrics, "stride_engine_uncaptured_steps_total", reason="grammar") == 1
    assert value(metrics, "stride_engine_captures_total") == 4


def test_chosen_depths_follow_the_engine(metrics: Metrics) -> None:
    """Added up over restarts; the estimate of what speculation gains is the latest."""
    metrics.heard(report(stats=EngineStats(steps=9)))  # depths are not chosen
    for count in (2, 5):
        figures = DepthFigures(depths={"0": count, "3": 1}, drafted=3, spared=3 * count, gain=1.5)
        figures.compare((0.5 * count, 0.25 * count), (4.0, 3.0))
        metrics.heard(report(stats=EngineStats(steps=9 + count, depths=figures)))
    metrics.engine_down()
    metrics.heard(report(stats=EngineStats(steps=1, depths=DepthFigures(depths={"0": 1}, gain=1.25))))
    assert value(metrics, "stride_engine_draft_depths_total", depth="0") == 6
    assert value(metrics, "stride_engine_draft_depths_total", depth="3") == 1
    assert value(metrics, "stride_engine_draft_rows_total", state="run") == 3
    assert value(metrics, "stride_engine_draft_rows_total", state="spared") == 15
    assert value(metrics, "stride_engine_compared_step_seconds_total", source="predicted") == 2.5
    assert value(metrics, "stride_engine_compared_step_seconds_total", source="measured") == 1.25
    assert value(metrics, "stride_engine_compared_step_tokens_total", source="measured") == 3
    assert value(metrics, "stride_engine_speculation_gain_ratio") == 1.25


def test_an_unknown_gain_is_left_out(metrics: Metrics) -> None:
    """0 would say that nothing is emitted any more. Of several processes at most one knows it."""

    def shown() -> list[float]:
        total = Metrics("tiny")
        for part in (Metrics("tiny"), metrics, Metrics("tiny")):
            total.add(msgspec.msgpack.decode(msgspec.msgpack.encode(part.snapshot()), type=Snapshot))
        found, added = (
            [sample.value for sample in samples(each) if sample.name == "stride_engine_speculation_gain_ratio"]
            for each in (metrics, total)
        )
        assert found == added
        return found

    assert shown() == [], "no engine has started"
    for figures, expected in ((None, []), (DepthFigures(), []), (DepthFigures(gain=1.25), [1.25])):
        metrics.heard(report(stats=EngineStats(depths=figures)))
        assert shown() == expected
    metrics.engine_down()
    assert shown() == [], "the engine has stopped"


def test_the_servers_own_counts(metrics: Metrics) -> None:
    for status in (400, 503, 400):
        metrics.refused(status)
    metrics.restarted()
    metrics.prompt(7)
    metrics.prompt(5)
    assert value(metrics, "stride_requests_refused_total", status="400") == 2
    assert value(metrics, "stride_requests_refused_total", status="503") == 1
    assert value(metrics, "stride_engine_restarts_total") == 1
    assert value(metrics, "stride_prompt_tokens_total") == 12
    assert value(metrics, "vllm:prefix_cache_queries_total") == 12


@pytest.mark.parametrize(("ours", "theirs"), [*NAMES.items(), *OLDER.items()])
def test_vllms_names_say_the_same(metrics: Metrics, ours: str, theirs: str) -> None:
    busy(metrics)
    assert total(metrics, ours) == total(metrics, theirs) > 0


def test_vllms_names_have_vllms_labels(metrics: Metrics) -> None:
    """Clients that take the one line with a name as the whole metric find one."""
    busy(metrics)
    further = {"le", "finished_reason", "position", "block_size", "num_gpu_blocks"}
    theirs = [s for s in samples(metrics) if s.name.startswith("vllm:")]
    assert {frozenset(s.labels) - further for s in theirs} == {frozenset({"model_name", "engine"})}
    keys = [(s.name, *sorted(s.labels.items())) for s in theirs]
    assert len(keys) == len(set(keys))


def test_every_series_names_the_model_and_none_its_creation(metrics: Metrics) -> None:
    busy(metrics)
    assert all(s.labels["model_name"] == "tiny" and not s.name.endswith("_created") for s in samples(metrics))


def speculation_of_lines(text: str) -> tuple[dict[str, int], dict[int, int]] | None:
    """How vLLM's benchmark client reads /metrics: it looks for parts of names anywhere in a line, and sums them."""
    lines = [line for line in text.splitlines() if line.startswith("vllm:spec_decode")]
    counts = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    by_position: dict[int, int] = {}
    for line in lines:
        number = int(float(line.split()[-1]))
        if "num_accepted_tokens_per_pos" in line:
            found = re.search(r'position="(\d+)"', line)
            assert found is not None
            by_position[int(found[1])] = by_position.get(int(found[1]), 0) + number
        else:
            name = next(name for name in counts if name in line)
            counts[name] += number
    return (counts, by_position) if lines else None


def test_vllms_benchmark_client_finds_speculation_from_the_start(metrics: Metrics) -> None:
    """It reads before its first request, and takes the difference at the end."""
    before = speculation_of_lines(metrics.render().decode())
    assert before == ({"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}, {})
    busy(metrics)
    after = speculation_of_lines(metrics.render().decode())
    assert after == ({"num_drafts": 6, "num_draft_tokens": 24, "num_accepted_tokens": 9}, {0: 3, 1: 3, 2: 3})


def test_two_servers_in_one_process_count_apart(metrics: Metrics) -> None:
    other = Metrics("other")
    busy(metrics)
    assert total(other, "stride_generation_tokens_total") == 0
    assert {s.labels["model_name"] for s in samples(other)} == {"other"}


def test_a_models_name_may_hold_any_character() -> None:
    name = 'a "model"\\with\nall of it'
    assert {s.labels["model_name"] for s in samples(Metrics(name))} == {name}
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_no_two_panels_of_the_dashboard_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_asks_for_nothing_else(metrics: Metrics) -> None:
    """Each of its metrics is exported, with every label by which the query takes it apart."""
    busy(metrics)
    labels: dict[str, set[str]] = {}
    for sample in samples(metrics):
        labels.setdefault(sample.name, set()).update(sample.labels)
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert set(variables) == {"datasource", "model_name"}
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    queries = [target["expr"] for target in targets] + [variables["model_name"]["query"]["query"]]
    assert len(queries) > 20
    name = re.compile(r"\b(?:stride_|vllm:)\w+")
    for query in queries:
        asked = set(name.findall(query))
        assert asked and asked <= labels.keys(), query
        by = {label for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for label in group.split(", ")}
        by |= set(re.findall(r'(\w+)(?:=|!=|=~|!~)"', query))
        assert by <= set().union(*(labels[each] for each in asked)), query
    assert {"stride_engine_kv_resplits_total", "stride_kv_pages"} <= set(name.findall(" ".join(queries)))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for target in targets:
        assert target["datasource"]["uid"] == "${datasource}"
        assert target["expr"].count('model_name=~"$model_name"') == len(name.findall(target["expr"]))


def test_snapshots_add_up(metrics: Metrics) -> None:
    """The sum over two processes, of which one hears the engine, is what one process counts; nothing is lost on the way
    between them."""

    def more(metrics: Metrics) -> None:
        generation = request(2)
        metrics.prompt(7)
        metrics.watch(generation, *delta(4, 0), BEGAN + 0.25)
        metrics.watch(generation, *delta(1, 0, "length", drafter="suffix"), BEGAN + 8.0)
        metrics.watch(generation, *delta(2, 1, "error"), BEGAN + 4096.0)
        metrics.refused(429)
        metrics.frontend_restarted()

    busy(metrics)
    more(metrics)
    first, second, total = Metrics("tiny"), Metrics("tiny"), Metrics("tiny")
    busy(first)
    more(second)
    for part in (first, second):
        total.add(msgspec.msgpack.decode(msgspec.msgpack.encode(part.snapshot()), type=Snapshot))
    assert sorted(map(str, samples(total))) == sorted(map(str, samples(metrics)))
    assert value(total, "stride_api_server_restarts_total") == 1
    assert value(total, "stride_generation_tokens_total") == 15 + 7
