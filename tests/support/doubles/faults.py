"""Exceptions planted in a stage of the step, raised when it works for a chosen request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import pytest

from stridelm.engine.engine import Engine
from stridelm.grammar.guide import Guide
from stridelm.schedule import Queue
from stridelm.types import Request

Put = Callable[[object, str, Any], None]
Culprits = Callable[[Iterable[Request]], bool]
"""Whether a stage that works for these requests must fail."""


def guilty_from(tokens: int, *names: str) -> Culprits:
    """Requests of these names, once they have this many output tokens."""

    def guilty(requests: Iterable[Request]) -> bool:
        return any(request.id in names and len(request.output_ids) >= tokens for request in requests)

    return guilty


class Planted(Exception):
    """An exception that no code of the engine raises."""


def _spans(batch_or_spans: Any) -> list[Request]:
    return [span.request for span in getattr(batch_or_spans, "spans", batch_or_spans)]


def _of_slots(engine: Engine) -> Callable[..., list[Request]]:
    def found(logits: Any, rows: Any, row_slots: Iterable[int], *rest: Any) -> list[Request]:
        slots = set(row_slots)
        return [request for request in engine.queue.running if request.slot in slots]

    return found


def _planned(queue: Queue) -> list[Request]:
    return [*queue.running, *chain.from_iterable(queue.plannable.values())]


def stages(engine: Engine) -> dict[str, tuple[object, str, Callable[..., list[Request]]]]:
    """Stage -> (object, its method, the requests that a call of it is for)."""
    return {
        "admit to the ledger": (engine.ledger, "admit", lambda request: [request]),
        "admit to the token table": (engine.tokens, "admit", lambda slot, *_: _running(engine, slot)),
        "admit to the sampling table": (engine.sampling, "set", lambda slot, request, *_: [request]),
        "admit to the drafter": (engine.drafters, "admit", lambda request: [request]),
        "plan": (engine.steps.planner, "plan", lambda queue, pages: _planned(queue)),
        "reserve": (engine.ledger, "grow", lambda request, end: [request]),
        "propose": (engine.drafters, "propose", lambda spans, *_: _spans(spans)),
        "forward": (engine.runner, "forward", _spans),
        "verify": (engine.device.verifier, "_inputs", lambda batch, *_: _spans(batch)),
        "sample": (engine.device.verifier.sampler, "draw", _of_slots(engine)),
        "compact": (engine.loaded.pool, "keep", lambda batch, *_: _spans(batch)),
        "commit": (engine.ledger, "advance", lambda request, rows: [request]),
        "observe": (engine.drafters, "observe", lambda spans, *_: _spans(spans)),
        "introspect": (engine.roster.inside, "read", lambda detail: _spans(detail)),
        "emit": (engine.steps.emitter, "_end_at", lambda request, *_: [request]),
    }


def plant(engine: Engine, stage: str, guilty: Culprits, put: Put = setattr) -> None:
    """Make the stage raise Planted whenever it works for requests for which `guilty` is true. put: how an attribute is
    set; pass `monkeypatch.setattr` to have it undone."""
    owner, name, whose = stages(engine)[stage]
    work = getattr(owner, name)

    def maybe(*args: Any, **options: Any) -> Any:
        if guilty(whose(*args, **options)):
            raise Planted(stage)
        return work(*args, **options)

    put(owner, name, maybe)


def plant_in_grammars(guilty: Culprits, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, in the computation of a grammar's mask."""
    work = Guide.mask

    def maybe(guide: Guide, path: Any) -> Any:
        if guilty([guide.request]):
            raise Planted("grammar")
        return work(guide, path)

    monkeypatch.setattr(Guide, "mask", maybe)


def _running(engine: Engine, slot: int) -> list[Request]:
    return [request for request in engine.queue.running if request.slot == slot]
