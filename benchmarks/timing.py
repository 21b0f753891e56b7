"""Measures how long calls take on a GPU. Shared by the kernel benchmarks in this folder."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

Calls = Sequence[Callable[[], object]]


def graph_us(calls: Calls, replays: int) -> float:
    """Microseconds of a call: the mean over the calls of a CUDA graph, so that launches cost nothing, and the median
    over its replays."""
    for call in calls:
        call()  # compiles, and copies to the device what is kept from then on
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    del results  # kept until here, so that no two calls write to the same memory
    return median_us(graph.replay, len(calls), replays)


def median_us(run: Callable[[], object], calls: int, replays: int) -> float:
    """Microseconds of one of the `calls` that a run makes, the median over replays."""
    run()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / calls)
    return statistics.median(times)
