"""What a GPU did during some steps of an engine, kernel by kernel, as CUPTI reports it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from stridelm.engine.engine import Engine

GRAPH = 20
"""A launch with at least this many kernels is a captured step."""


@dataclass(frozen=True)
class Activity:
    """A kernel or a copy. Times in microseconds."""

    name: str
    launch: int
    """The same for all kernels of a graph's launch."""
    start: float
    end: float


def trace_steps(engine: Engine, steps: int) -> list[Activity]:
    """Everything that ran during `steps` steps, sorted by start."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    found = [
        Activity(event.name, event.id, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type.name == "CUDA"
    ]
    return sorted(found, key=lambda activity: activity.start)


def added_us(activities: list[Activity]) -> list[float]:
    """How long each ran after all that started before it had ended, in the order of `activities`.

    A kernel that starts early spends much of its time beside the one before it, waiting for what that writes. These
    times and those in which nothing ran add up to the whole.
    """
    added, end = [], activities[0].start
    for activity in activities:
        added.append(max(0.0, activity.end - max(activity.start, end)))
        end = max(end, activity.end)
    return added


def idle_us(activities: list[Activity]) -> float:
    """How long nothing ran, between the first start and the last end."""
    idle, end = 0.0, activities[0].start
    for activity in activities:
        idle += max(0.0, activity.start - end)
        end = max(end, activity.end)
    return idle


def gap_us(activities: list[Activity]) -> float | None:
    """How long nothing ran between one captured step and the next, on average; None if there are fewer than two."""
    launches: dict[int, list[Activity]] = defaultdict(list)
    for activity in activities:
        launches[activity.launch].append(activity)
    graphs = sorted((g for g in launches.values() if len(g) >= GRAPH), key=lambda graph: graph[0].start)
    gaps = []
    for before, after in itertools.pairwise(graphs):
        low, high = max(a.end for a in before), min(a.start for a in after)
        copies = [a for a in activities if a.start < high and a.end > low and a.launch != before[0].launch]
        copies = [a for a in copies if a.launch != after[0].launch]
        edge = Activity("", 0, low, low), Activity("", 0, high, high)
        gaps.append(idle_us(sorted([*copies, *edge], key=lambda a: a.start)) if high > low else 0.0)
    return sum(gaps) / len(gaps) if gaps else None
