"""Whether what a head drafts is accepted, tried on a few prompts of the engine's own before it is ready.

A head that was trained for another model, or that reads other layers than in training, changes no output: it is only
slow. So its acceptance is measured once, and a warning says if there is next to none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

from stridelm.draft import DRAFTERS
from stridelm.engine.engine import PROBE, Engine
from stridelm.params import SamplingParams
from stridelm.schedule import Configured, StepCost, Unbounded
from stridelm.types import Request
from stridelm.verify import RULES

logger = logging.getLogger(__name__)

PROMPTS = (
    "The river rises in the hills north of the town and flows through meadows and old woods before it reaches the",
    "Once upon a time there was a little girl who lived with her grandmother in a small house. Every morning she",
    "To make the soup, cut the onions and the carrots into small pieces. Heat some oil in a large pot, and then",
    "def largest(values):\n    result = values[0]\n    for value in values:\n        if value >",
)
TOKENS = 24
"""Tokens that follow each prompt."""
SECONDS = 0.6
"""After which no step begins, if ENOUGH drafts have been verified."""
ENOUGH = 8
LEAST = 0.05
"""Share of drafts whose first token is accepted, under which the head is taken to be broken. Of one that fits its model
it is more than a third; guesses at random have one in a vocabulary."""


@dataclass(frozen=True)
class DraftCheck:
    """What became of a head's drafts after the built-in prompts."""

    drafter: str
    drafts: int
    first_accepted: int
    """Drafts whose first token was accepted."""
    emitted: int
    """Tokens that came of the drafts, with one that each step emits in any case."""
    seconds: float

    @property
    def fails(self) -> bool:
        return self.drafts >= ENOUGH and self.first_accepted < LEAST * self.drafts


def check_drafting(engine: Engine) -> DraftCheck | None:
    """Measure the acceptance of the engine's own drafter, log it, and warn if it is next to nothing. None, with the
    reason logged, if there is nothing to measure it by. The engine must be idle, and is left as it was."""
    reason = _why_not(engine)
    if reason is not None:
        logger.info("drafting is not checked: %s", reason)
        return None
    assert engine.tokenizer is not None
    began = time.perf_counter()
    prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    with _without_trace(engine):
        requests = _serve(engine, [prompt[: engine.loaded.target.max_length // 2] for prompt in prompts])
    found = _counted(requests, time.perf_counter() - began)
    _report(found)
    return found


def _why_not(engine: Engine) -> str | None:
    speculation, rows_by_depth = engine.intake.settled(SamplingParams())
    assert speculation.drafter is not None and speculation.acceptance is not None
    if DRAFTERS.get(speculation.drafter).takes is None or not rows_by_depth[-1]:
        return f"drafter {speculation.drafter} has no weights of its own, or drafts nothing"
    if not engine.loaded.target.weighted:
        return "its weights are random"
    if RULES.get(speculation.acceptance).simulated:
        return "acceptance is simulated"
    if engine.tokenizer is None:
        return "without a tokenizer there is no text to draft for"
    return None


@contextmanager
def _without_trace(engine: Engine) -> Iterator[None]:
    """What is served inside is not seen in statistics or the prefix cache, and nothing is learnt from it. It is drafted
    to its full depth."""
    steps, planner = engine.steps, engine.steps.planner
    learnt = planner.depths, planner.prompts, steps.cost
    counts = ((own.name, getattr(engine.stats, own.name)) for own in fields(engine.stats))
    kept = {name: dict(count) if isinstance(count, dict) else count for name, count in counts}
    planner.depths, planner.prompts, steps.cost = Configured(), Unbounded(), StepCost()
    try:
        yield
    finally:
        engine.forget()
        planner.depths, planner.prompts, steps.cost = learnt
        for name, count in kept.items():
            setattr(engine.stats, name, count)


def _serve(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        try:
            requests.append(engine.add(f"{PROBE} {number}", prompt, params))
        except ValueError as error:  # an unusual tokenizer, or a very small pool
            logger.debug("a prompt of the check cannot be served: %s", error)
    began = time.perf_counter()
    while engine.busy and (time.perf_counter() - began < SECONDS or _drafts(requests) < ENOUGH):
        engine.step()
    for request in requests:
        engine.abort(request.id)
    while engine.busy:  # steps that were in flight
        engine.step()
    return requests


def _drafts(requests: Sequence[Request]) -> int:
    return sum(sum(request.stats.reached_at[:1]) for request in requests)


def _counted(requests: Sequence[Request], seconds: float) -> DraftCheck:
    drafter = requests[0].speculation.drafter if requests else None
    drafts = _drafts(requests)
    first = sum(sum(request.stats.accepted_at[:1]) for request in requests)
    accepted = sum(request.stats.accepted for request in requests)
    return DraftCheck(drafter or "", drafts, first, accepted + drafts, seconds)


def _report(found: DraftCheck) -> None:
    if found.drafts < ENOUGH:
        logger.info("drafting is not checked: only %d drafts were made after the built-in prompts", found.drafts)
    elif found.fails:
        logger.warning(
            "drafter %s: of %d drafts after built-in prompts, %d had their first token accepted. Outputs are right, "
            "but drafting only costs time. Likely causes: the head was trained for another model, or another version "
            "of it (compare drafter_model with the model); it reads other layers of the model than in training (those "
            "that its config.json names); its weights were converted in the wrong dtype, or without their scales. "
            "Start with drafter='none' until that is found, or with check_drafting=False to leave this check out",
            *(found.drafter, found.drafts, found.first_accepted),
        )
    else:
        logger.info(
            "drafter %s: %.0f%% of first guesses accepted, %.1f tokens per step after built-in prompts (%.2f s)",
            *(found.drafter, 100 * found.first_accepted / found.drafts, found.emitted / found.drafts, found.seconds),
        )
