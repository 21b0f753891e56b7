"""What runs in the next step. Pure CPU: a queue, and a planner that reads it and changes nothing."""

from stridelm.schedule.depth import DepthPolicy
from stridelm.schedule.limits import Budget, PageView
from stridelm.schedule.planner import Planner
from stridelm.schedule.queue import Queue
from stridelm.schedule.rows import smallest_budget

__all__ = ["Budget", "DepthPolicy", "PageView", "Planner", "Queue", "smallest_budget"]
