"""The metrics of /metrics: everything is recorded once, under Stride's names, and also exported under vLLM's.

vLLM's names are there for the clients and dashboards made for them. They have exactly the labels that vLLM gives them,
because many clients take the one line that begins with a name for the total: what Stride distinguishes by drafter and
rule is summed. For the same reason there are no `_created` series, whose names begin with the metric's name too.

A "request" in a metric's name is one sample: an HTTP request may ask for several. A sample's speculation is counted
when it ends, all at once, so that these metrics are consistent with each other at any time; what the engine counts
(`stride_engine_...`) runs ahead of them.

A gauge whose value is not known is NaN here and left out of what is shown: any number would be taken for one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from stridelm.engine.request_metrics import RequestMetrics
from stridelm.schedule.depth_figures import DepthFigures
from stridelm.server.chunk import Chunk
from stridelm.server.generation import Generation
from stridelm.server.messages import Finish, Report

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REASONS = ("stop", "length", "abort", "error")
CACHE_LABELS = ("block_size", "num_gpu_blocks")
PAGE_STATES = ("free", "cached", "held")

# Upper bounds in seconds. The second list begins far below vLLM's: a step that emits eight tokens takes a millisecond.
TO_FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 180.0)
BETWEEN = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
WHOLE = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)

PHASES = {
    "queue_time": "From a sample's request until it was first admitted",
    "prefill_time": "From there to its first tokens",
    "decode_time": "From its first tokens to its last",
    "inference_time": "From when it was first admitted to its last tokens",
}
"""Parts of the time of a sample, as in vLLM."""

SPECULATION = ("drafter", "acceptance", "lossless")
"""Labels: how samples were drafted, by which rule drafts were accepted, and whether that rule is lossless."""
SOURCES = {
    "drafts": "Drafts that were verified",
    "draft_tokens": "Tokens in drafts",
    "accepted_tokens": "Drafted tokens that were accepted",
}
"""Counted for each of a drafter's sources."""

ENGINE_COUNTS = {
    "steps": ("steps", "Steps of the engine"),
    "rows": ("rows", "Token rows that steps ran through the model"),
    "emitted": ("emitted_tokens", "Tokens that steps emitted"),
    "drafted": ("drafted_tokens", "Tokens that were drafted"),
    "accepted": ("accepted_tokens", "Drafted tokens that were accepted"),
    "finished": ("finished_requests", "Samples that finished on their own"),
    "aborted": ("aborted_requests", "Samples that were aborted"),
    "failed": ("failed_requests", "Samples that ended because of an error of their own"),
    "failed_steps": ("failed_steps", "Steps that failed and were retried"),
    "memory_shortages": ("memory_shortages", "Steps that ran out of memory and were retried with fewer rows"),
    "resplits": ("kv_resplits", "Times that memory was moved from one page group to another"),
    "preemptions": ("preemptions", "Times that a running sample was preempted and gave back its pages"),
    "captures": ("captures", "Graphs captured; after the start, a request waited for each"),
    "compilations": ("compilations", "Kernels compiled; after the start, a request waited for each"),
}
"""Field of EngineStats -> the middle of its metric's name, and what it counts."""


@dataclass(slots=True)
class _Spread:
    """Per bound, how many times were at or below it and above the previous one; the last count is those above all."""

    bounds: Sequence[float]
    counts: list[int]
    total: float = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times


class _Histogram(Collector):
    """A histogram in which one observation may count several times; prometheus_client's own needs a call for each."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self._name, self._documentation, self._label_names = name, documentation, labels
        self._bounds = bounds
        self._spreads: dict[tuple[str, ...], _Spread] = {}

    def labels(self, *values: str) -> _Spread:
        if values not in self._spreads:
            self._spreads[values] = _Spread(self._bounds, [0] * (len(self._bounds) + 1))
        return self._spreads[values]

    def snapshot(self) -> list[tuple[list[str], list[int], float]]:
        """Label values, counts and sum of each series."""
        return [(list(values), spread.counts, spread.total) for values, spread in self._spreads.items()]

    def add(self, spreads: Sequence[tuple[list[str], list[int], float]]) -> None:
        """Add another's snapshot."""
        for values, counts, total in spreads:
            spread = self.labels(*values)
            spread.counts = [own + more for own, more in zip(spread.counts, counts, strict=True)]
            spread.total += total

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._label_names)
        upto = [str(bound) for bound in self._bounds] + ["+Inf"]
        for values, spread in self._spreads.items():
            family.add_metric(values, list(zip(upto, accumulate(spread.counts))), spread.total)
        yield family


@dataclass(slots=True)
class _Progress:
    """A running sample: when its last tokens arrived (time.monotonic()), and how many have arrived."""

    last: float
    tokens: int


class _Following:
    """A counter that follows the engine's own counts, which begin at 0 again when the engine starts again."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._before: Mapping[str, float] = {}

    def take(self, counts: Mapping[str, float], *, restarted: bool) -> None:
        """counts: by the value of the counter's label."""
        for label, count in counts.items():
            self._counter.labels(label).inc(count - (0 if restarted else self._before.get(label, 0)))
        self._before = dict(counts)

    def forget(self) -> None:
        """The next engine counts from 0."""
        self._before = {}


class Snapshot(msgspec.Struct, array_like=True):
    """All values at one moment, by metric (without `stride_`) and label values."""

    values: dict[str, list[tuple[list[str], float]]]
    """Of counters and gauges."""
    spreads: dict[str, list[tuple[list[str], list[int], float]]]
    """Of histograms: counts and sum."""


class Metrics(Collector):
    """Metrics of one process. Nothing is shared between instances, and all methods are called from one thread. Those of
    several processes are added up as snapshots (`add`)."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._numbers: dict[str, Counter | Gauge] = {}
        self._histograms: dict[str, _Histogram] = {}
        self._under_way: WeakKeyDictionary[Generation, dict[int, _Progress]] = WeakKeyDictionary()
        """Generation -> sample's index -> progress. Samples of a dead engine never end, so progress is kept per
        generation and dropped with it."""

        self._prompt = self._counter("prompt_tokens", "Prompt tokens of all requested samples")
        self._cached = self._counter("cached_prompt_tokens", "Prompt tokens of ended samples found in the prefix cache")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        first = self._histogram("time_to_first_token", "From the request to a sample's first tokens", TO_FIRST)
        between = self._histogram("inter_token_latency", "From one token of a sample to its next", BETWEEN)
        self._first, self._between = first.labels(), between.labels()
        self._whole = self._histogram(
            "request_latency", "From the request to a sample's end", WHOLE, ("finished_reason",)
        )
        self._phases = {phase: self._histogram(f"request_{phase}", what, WHOLE) for phase, what in PHASES.items()}
        for phase in self._phases.values():
            phase.labels()
        self._finished = self._counter("requests_finished", "Samples that ended", "finished_reason")
        self._preempted = self._counter("requests_preempted", "Ended samples that had been preempted at least once")
        self._refused = self._counter("requests_refused", "HTTP answers other than 200", "status")
        for reason in REASONS:
            self._whole.labels(reason)
            self._finished.labels(reason)

        self._steps = self._counter("spec_steps", "Steps that emitted tokens of ended samples", *SPECULATION)
        self._tokens = self._counter("spec_tokens", "Tokens of ended samples", *SPECULATION)
        self._drafts = self._counter("spec_drafts", "Drafts that were verified", *SPECULATION)
        self._drafted = self._counter("spec_draft_tokens", "Tokens in drafts", *SPECULATION)
        self._accepted = self._counter("spec_accepted_tokens", "Drafted tokens that were accepted", *SPECULATION)
        self._by_source = {
            count: self._counter(f"spec_{count}_per_source", f"{what}, by what drafted", *SPECULATION, "source")
            for count, what in SOURCES.items()
        }
        by_position = (*SPECULATION, "position")
        self._accepted_at = self._counter(
            "spec_accepted_per_position", "Drafts accepted up to this position, from 0, or further", *by_position
        )
        self._reached_at = self._counter(
            "spec_reached_per_position", "Drafts that have this position, with all before it accepted", *by_position
        )

        self._running = self._gauge("requests_running", "Samples that are being generated")
        self._waiting = self._gauge("requests_waiting", "Samples that are waiting")
        self._pages = self._gauge("kv_pages", "KV pages; cached ones are kept only for their prefix", "group", "state")
        self._usage = self._gauge("kv_usage_ratio", "Share of the KV pages that samples hold, in the fullest group")
        self._cache = self._gauge("cache_config_info", "1, with the layout of the KV cache", *CACHE_LABELS)
        self._rows = self._gauge(
            "engine_row_budget", "Maximum rows of a step: fewer than max_num_batched_tokens while memory is short"
        )
        self._missing = self._gauge(
            "engine_missing_graphs", "Graphs that capture_memory had no room for: steps that need one run part by part"
        )
        self._up = self._gauge("engine_up", "1 while the engine is up, 0 while it is not")
        self._restarts = self._counter("engine_restarts", "Restarts of the engine")
        self._frontend_restarts = self._counter(
            "api_server_restarts", "Restarts of front-end processes (api_server_count)"
        )
        self._engine = {
            field: self._counter(f"engine_{name}", documentation)
            for field, (name, documentation) in ENGINE_COUNTS.items()
        }
        self._before = dict.fromkeys(ENGINE_COUNTS, 0)
        """The engine's counts in its last report."""
        self._uncaptured = self._following(
            "uncaptured_steps", "Steps of a GPU that ran part by part, not as one graph", "reason"
        )
        self._depths = self._following("draft_depths", "Drafts by chosen depth, if depths are chosen", "depth")
        self._draft_rows = self._following(
            "draft_rows", "Draft rows that ran, and that fixed depths would have run besides", "state"
        )
        self._foreseen = (
            self._following("compared_step_seconds", "Steps' times, predicted and measured", "source"),
            self._following("compared_step_tokens", "The same steps' tokens, predicted and measured", "source"),
        )
        self._gain = self._gauge(
            "engine_speculation_gain_ratio", "Tokens per second over plain decoding's, as estimated right now, if it is"
        )
        self._gain.set(math.nan)

        self._vllm: tuple[tuple[str, Collector, tuple[str, ...]], ...] = (
            ("num_requests_running", self._running, ()),
            ("num_requests_waiting", self._waiting, ()),
            ("kv_cache_usage_perc", self._usage, ()),
            ("gpu_cache_usage_perc", self._usage, ()),
            ("cache_config_info", self._cache, CACHE_LABELS),
            ("prompt_tokens", self._prompt, ()),
            ("generation_tokens", self._generated, ()),
            ("prefix_cache_queries", self._prompt, ()),
            ("prefix_cache_hits", self._cached, ()),
            ("gpu_prefix_cache_queries", self._prompt, ()),
            ("gpu_prefix_cache_hits", self._cached, ()),
            ("num_preemptions", self._engine["preemptions"], ()),
            ("request_success", self._finished, ("finished_reason",)),
            ("time_to_first_token_seconds", first, ()),
            ("inter_token_latency_seconds", between, ()),
            ("e2e_request_latency_seconds", self._whole, ()),
            *((f"request_{phase}_seconds", histogram, ()) for phase, histogram in self._phases.items()),
            ("spec_decode_num_drafts", self._drafts, ()),
            ("spec_decode_num_draft_tokens", self._drafted, ()),
            ("spec_decode_num_accepted_tokens", self._accepted, ()),
            ("spec_decode_num_accepted_tokens_per_pos", self._accepted_at, ("position",)),
        )
        """vLLM's name, the collector that it exports, and the labels that are kept. Those with gpu_ are older, and
        still read by routers."""

    def watch(self, generation: Generation, index: int, chunk: Chunk, now: float) -> None:
        """Count a step's output for the sample of this index. now: time.monotonic().

        Tokens that arrive together share the time since the previous ones equally.
        """
        samples = self._under_way.get(generation)
        if samples is None:
            samples = self._under_way[generation] = {}
        new, sample = len(chunk.token_ids), samples.get(index)
        if new:
            self._generated.inc(new)
            if sample is None:
                sample = samples[index] = _Progress(now, new)
                self._first.observe(now - generation.began)
            else:
                self._between.observe((now - sample.last) / new, new)
                sample.last = now
                sample.tokens += new
        if chunk.finish is not None:
            samples.pop(index, None)
            self._end(chunk.finish, now - generation.began, 0 if sample is None else sample.tokens)

    def heard(self, report: Report) -> None:
        """Record a report of the engine."""
        self._up.set(1)
        self._running.set(report.running)
        self._waiting.set(report.waiting)
        self._rows.set(report.row_budget)
        self._missing.set(report.stats.missing_graphs)
        self._cache.clear()
        self._cache.labels(str(report.page_size), str(max(pages["total"] for pages in report.pages.values()))).set(1)
        usage = 0.0
        for group, pages in report.pages.items():
            for state in PAGE_STATES:
                self._pages.labels(group, state).set(pages[state])
            usage = max(usage, pages["held"] / max(sum(pages[state] for state in PAGE_STATES), 1))
        self._usage.set(usage)
        counts = {field: int(getattr(report.stats, field)) for field in ENGINE_COUNTS}
        restarted = any(counts[field] < self._before[field] for field in counts)
        for field, counter in self._engine.items():
            counter.inc(counts[field] - (0 if restarted else self._before[field]))
        self._before = counts
        self._uncaptured.take(report.stats.uncaptured, restarted=restarted)
        if report.stats.depths is not None:
            self._heard_depths(report.stats.depths, restarted)

    def _heard_depths(self, figures: DepthFigures, restarted: bool) -> None:
        self._depths.take(figures.depths, restarted=restarted)
        self._draft_rows.take({"run": figures.drafted, "spared": figures.spared}, restarted=restarted)
        for following, pairs in zip(self._foreseen, (figures.seconds, figures.tokens), strict=True):
            following.take(pairs, restarted=restarted)
        self._gain.set(math.nan if figures.gain is None else figures.gain)

    def engine_down(self) -> None:
        """Reset the gauges: nothing runs, waits or is held any more. The next engine counts from 0."""
        for gauge in (self._up, self._running, self._waiting, self._usage, self._rows, self._missing):
            gauge.set(0)
        self._gain.set(math.nan)
        self._pages.clear()
        self._cache.clear()
        self._before = dict.fromkeys(ENGINE_COUNTS, 0)
        for following in (self._uncaptured, self._depths, self._draft_rows, *self._foreseen):
            following.forget()

    def prompt(self, tokens: int) -> None:
        """Count the tokens of prompts."""
        self._prompt.inc(tokens)

    def refused(self, status: int) -> None:
        """Count an HTTP answer other than 200."""
        self._refused.labels(str(status)).inc()

    def restarted(self) -> None:
        """Count a restart of the engine."""
        self._restarts.inc()

    def frontend_restarted(self) -> None:
        """Count a restart of a front-end process."""
        self._frontend_restarts.inc()

    def snapshot(self) -> Snapshot:
        """Everything that `render` shows."""
        values = {
            name: [(list(s.labels.values()), s.value) for family in metric.collect() for s in _lasting(family)]
            for name, metric in self._numbers.items()
        }
        return Snapshot(values, {name: histogram.snapshot() for name, histogram in self._histograms.items()})

    def add(self, snapshot: Snapshot) -> None:
        """Add the values of another instance. A gauge is the sum too: each has one process that sets it."""
        for name, series in snapshot.values.items():
            metric = self._numbers[name]
            if metric is self._gain and series:
                self._gain.set(0)  # known now
            for labels, value in series:
                (metric.labels(*labels) if labels else metric).inc(value)
        for name, spreads in snapshot.spreads.items():
            self._histograms[name].add(spreads)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, of the type CONTENT_TYPE."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        own = {"model_name": self._model_name}
        for family in self._registry.collect():
            yield _shown(family, family.name, own)
        with_engine = {**own, "engine": "0"}
        for name, source, kept in self._vllm:
            for family in source.collect():
                yield _shown(family, f"vllm:{name}", with_engine, kept)
        [asked], [found] = (next(iter(counter.collect())).samples[:1] for counter in (self._prompt, self._cached))
        rate = Metric("vllm:gpu_prefix_cache_hit_rate", "Share of prompt tokens found in the prefix cache", "gauge")
        rate.add_sample(rate.name, with_engine, found.value / max(asked.value, 1))
        yield rate

    def _end(self, finish: Finish, seconds: float, tokens: int) -> None:
        self._whole.labels(finish.reason).observe(seconds)
        queued, first, last = finish.metrics.queued_s, finish.metrics.ttft_s, finish.metrics.latency_s
        if queued is not None and first is not None and last is not None:
            for phase, spent in zip(PHASES, (queued, first - queued, last - first, last - queued), strict=True):
                self._phases[phase].labels().observe(spent)
        self._finished.labels(finish.reason).inc()
        self._cached.inc(finish.metrics.cached_tokens)
        if finish.metrics.preemptions:
            self._preempted.inc()
        self._count_speculation(finish.metrics, tokens)

    def _count_speculation(self, cost: RequestMetrics, tokens: int) -> None:
        how = (cost.drafter, cost.acceptance, str(cost.lossless).lower())
        self._steps.labels(*how).inc(cost.steps)
        self._tokens.labels(*how).inc(tokens)
        self._drafts.labels(*how).inc(cost.reached_at[0] if cost.reached_at else 0)
        self._drafted.labels(*how).inc(cost.drafted)
        self._accepted.labels(*how).inc(cost.accepted)
        for source, became in cost.by_source.items():
            for name, count in (
                ("drafts", became.drafts),
                ("draft_tokens", became.drafted),
                ("accepted_tokens", became.accepted),
            ):
                self._by_source[name].labels(*how, source).inc(count)
        for counter, counts in ((self._accepted_at, cost.accepted_at), (self._reached_at, cost.reached_at)):
            for position, count in enumerate(counts):
                counter.labels(*how, str(position)).inc(count)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        counter = self._numbers[name] = Counter(f"stride_{name}", documentation, labels, registry=self._registry)
        return counter

    def _following(self, name: str, documentation: str, label: str) -> _Following:
        return _Following(self._counter(f"engine_{name}", documentation, label))

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        gauge = self._numbers[name] = Gauge(f"stride_{name}", documentation, labels, registry=self._registry)
        return gauge

    def _histogram(
        self, name: str, documentation: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> _Histogram:
        histogram = self._histograms[name] = _Histogram(f"stride_{name}_seconds", documentation, bounds, labels)
        self._registry.register(histogram)
        return histogram


def _lasting(family: Metric) -> Iterator[Sample]:
    """The samples that are known, without the `_created` series."""
    return (sample for sample in family.samples if not (sample.name.endswith("_created") or math.isnan(sample.value)))


def _shown(family: Metric, name: str, labels: dict[str, str], kept: Sequence[str] | None = None) -> Metric:
    """The metric under this name, with these labels added. With `kept`, only those of its own labels remain, and values
    that they no longer distinguish are summed."""
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in _lasting(family):
        suffix = sample.name.removeprefix(family.name)
        own = tuple((k, v) for k, v in sample.labels.items() if kept is None or k in kept or k == "le")
        values[suffix, own] = values.get((suffix, own), 0) + sample.value
    if not values and kept == () and family.type == "counter":
        values["_total", ()] = 0  # clients compute differences from a value read before the first sample ended
    shown = Metric(name, family.documentation, family.type)
    shown.samples = [Sample(name + suffix, {**labels, **dict(own)}, value) for (suffix, own), value in values.items()]
    return shown
