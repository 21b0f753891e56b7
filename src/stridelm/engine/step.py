"""One step, whole. Prompt chunks, plain decodes, chains, trees and mask-token windows all come through here.

plan -> reserve -> propose -> forward -> verify -> commit -> observe -> emit
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stridelm.engine.outcome import read
from stridelm.run.batch import build
from stridelm.types import StepOutput

if TYPE_CHECKING:
    from stridelm.engine.engine import Engine


@torch.inference_mode()
def step(engine: Engine) -> list[StepOutput]:
    """Run one step and say what it gave each request. Empty if nothing could run."""
    plan = engine.planner.plan(engine.queue, engine.ledger)
    engine.enter(plan)
    if not plan.spans:
        assert plan.preempted or engine.queue.empty, "requests are queued and none can run"
        return []
    slots = engine.slots(plan)
    with engine.ledger.reserve(plan.spans) as transaction:
        draft = engine.drafters.propose(plan.spans, slots)
        batch = build(plan.spans, draft, engine.tokens, slots, transaction, engine.groups, engine.ledger.page_size)
        logits = engine.runner.forward(batch)
        verdict = engine.door.verify(batch, draft, logits.decisions)
        engine.runner.compact(batch, draft, verdict)
        outcome = read(verdict)
        transaction.commit(outcome.kept)
        engine.drafters.observe(plan.spans, slots, batch, logits.decisions, verdict)
    engine.trace(plan, draft, batch, outcome)
    return engine.emitter.emit(batch, logits, verdict, outcome)
