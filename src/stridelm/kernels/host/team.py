"""How threads share the work of one compiled call: phases of tasks, without a thread being started or woken between.

A phase is a number of tasks that may run in any order, on any thread. Threads claim them; the phase ends when all are
finished, and only then do threads claim tasks of the next. A thread that comes late finds that the phases so far have
ended. So a call never waits for a thread that has no task, and is complete even if only one thread ever runs.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,call-arg,var-annotated,unreachable"
from __future__ import annotations

import numba as nb
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic

COUNTERS = 16
"""int64 numbers of a phase: two counters, each in a cache line of its own."""
_CLAIMED, _FINISHED = 0, 8
_PIECES = 8
"""Claims that a thread makes of a phase with many tasks, if all are equally fast."""
_SPINS = 2000
"""Looks at a counter before other processes may have the core: some 0.1 ms."""

_yield = types.ExternalFunction("sched_yield", types.int32())


@nb.njit(error_model="numpy")
def tasks_of(team, phase, tasks):
    """Yield the tasks that this thread runs of a phase, and then wait until it has ended: what all its tasks have
    written is visible afterwards. team: the number of threads, and zeros [phases, COUNTERS] int64 before the first
    phase."""
    threads, board_PX = team
    share = _share(threads, tasks)
    claimed, finished = phase * COUNTERS + _CLAIMED, phase * COUNTERS + _FINISHED
    first = add(board_PX, claimed, share)
    while first < tasks:
        stop = min(first + share, tasks)
        for task in range(first, stop):  # noqa: UP028  (Numba has no `yield from`)
            yield task
        add(board_PX, finished, stop - first)
        first = add(board_PX, claimed, share)
    looks = 0
    while read(board_PX, finished) < tasks:
        looks += 1
        if looks < _SPINS:
            pause()
        else:
            _yield()


@nb.njit(error_model="numpy")
def next_of(team, tasks):
    """How many tasks after one that a thread runs its next one usually is, if all are equally fast."""
    threads, _ = team
    return 1 if _share(threads, tasks) > 1 else threads


@nb.njit(error_model="numpy")
def _share(threads, tasks):
    """Tasks that a thread claims at once."""
    return max(1, tasks // (threads * _PIECES)) if threads > 1 else tasks


@intrinsic
def add(typing, board_PX, place, count):
    """Add to a counter in one step that no other thread can interrupt; returns what it was."""

    def generate(context, builder, signature, arguments):
        counter = _counter(context, builder, signature, arguments)
        return builder.atomic_rmw("add", counter, arguments[2], "acq_rel")

    return types.int64(board_PX, types.int64, types.int64), generate


@intrinsic
def read(typing, board_PX, place):
    def generate(context, builder, signature, arguments):
        return builder.load_atomic(_counter(context, builder, signature, arguments), "acquire", 8)

    return types.int64(board_PX, types.int64), generate


@intrinsic
def pause(typing):
    """Tell the processor that this loop waits."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


def _counter(context, builder, signature, arguments):
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])
