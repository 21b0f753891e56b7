"""Scheduling: a queue, and a planner that picks the next step from it without changing it. CPU only, no tensors.

adaptive.py, rates.py, step_cost.py and what they use are not imported here: their compiled loops load Numba, which not
every process needs.
"""

from stridelm.schedule.depth import Configured, DepthPolicy
from stridelm.schedule.limits import Budget, PageView
from stridelm.schedule.planner import Planner
from stridelm.schedule.prompt_rows import PromptPolicy, Unbounded, within
from stridelm.schedule.queue import Queue
from stridelm.schedule.rows import smallest_budget

__all__ = [
    "Budget",
    "Configured",
    "DepthPolicy",
    "PageView",
    "Planner",
    "PromptPolicy",
    "Queue",
    "Unbounded",
    "smallest_budget",
    "within",
]
