"""Whether what a head drafts is accepted, tried on a few prompts of the engine's own before it is ready.

A head that was trained for another model, or that reads other layers than in training, changes no output: it is only
slow. So its acceptance is measured once, and a warning says if there is next to none. The head that the engine drafts
with is tried by the engine itself; each of the others, which single requests may name, by a small one that shares the
model and is thrown away, so that it costs neither memory nor time once the engine is ready.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch

from stridelm.cache.layout import FULL, windows_of
from stridelm.cache.pool import PagePool
from stridelm.draft import DRAFTERS
from stridelm.engine.engine import PROBE, Engine
from stridelm.engine.memory import useful_pages
from stridelm.params import SamplingParams
from stridelm.schedule import Configured, Unbounded
from stridelm.stats import DraftCounts
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
"""After which no step begins, for all heads together, if ENOUGH drafts of the engine's own have been verified. What
the others take to load is not counted."""
ENOUGH = 8
LEAST = 0.05
"""Share of drafts whose first token is accepted, under which the head is taken to be broken. Of one that fits its model
it is more than a third; guesses at random have one in a vocabulary."""

NO_HEAD = "the engine's drafter has no weights of its own, or drafts nothing, and no other is named"


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


def check_drafting(engine: Engine) -> tuple[DraftCheck, ...]:
    """Measure the acceptance of the engine's own head and of those that it was given, log each, and warn of those with
    next to none. Empty, with the reason logged, if there is nothing to measure it by. The
    engine must be idle, and is left as it was."""
    reason, heads = _why_not(engine), heads_to_try(engine)
    if reason is not None or not heads:
        logger.info("drafting is not checked: %s", reason or NO_HEAD)
        return ()
    assert engine.tokenizer is not None
    longest = engine.loaded.target.max_length // 2
    prompts = [engine.tokenizer.encode(prompt)[:longest] for prompt in PROMPTS]
    found: list[DraftCheck] = []
    left = SECONDS
    for number, drafter in enumerate(heads):
        share = left / (len(heads) - number)
        check = (
            _by_itself(engine, prompts, share) if drafter == _own(engine) else _apart(engine, drafter, prompts, share)
        )
        if check is not None:
            left -= check.seconds
            _report(check)
            found.append(check)
    return tuple(found)


def heads_to_try(engine: Engine) -> list[str]:
    """Drafters with weights of their own that can run: the engine's own, then those that were named. Loading one that
    merely lies beside the model would delay every start."""
    target, own = engine.loaded.target, _own(engine)
    named = list(target.heads)[: len(engine.config.drafter_models)]
    able = [name for name in named if name != own and DRAFTERS.get(name).why_not(target) is None]
    return able if own is None else [own, *able]


def _own(engine: Engine) -> str | None:
    """The drafter whose weights serve requests that name none; None if there are no weights, or nothing is drafted."""
    speculation, rows_by_depth = engine.intake.settled(SamplingParams())
    assert speculation.drafter is not None
    return DRAFTERS.get(speculation.drafter).weights_of(engine.loaded.target) if rows_by_depth[-1] else None


def _why_not(engine: Engine) -> str | None:
    speculation, _ = engine.intake.settled(SamplingParams())
    assert speculation.acceptance is not None
    if not engine.loaded.target.weighted:
        return "its weights are random"
    if RULES.get(speculation.acceptance).simulated:
        return "acceptance is simulated"
    if engine.tokenizer is None:
        return "without a tokenizer there is no text to draft for"
    return None


def _by_itself(engine: Engine, prompts: Sequence[Sequence[int]], seconds: float) -> DraftCheck:
    """The engine's own head, by the steps that it will serve with."""
    with _without_trace(engine):
        return _served_by(engine, prompts, seconds, ENOUGH)


def _apart(engine: Engine, drafter: str, prompts: Sequence[Sequence[int]], seconds: float) -> DraftCheck | None:
    """Another head. None, with the reason logged, if there is no time or room left for it, or if it cannot run."""
    if seconds <= 0:
        logger.info("drafter %s is not tried: the others took all the time there is for it", drafter)
        return None
    device = engine.loaded.device
    try:
        return _served_by(_small(engine, drafter, max(map(len, prompts))), prompts, seconds)
    except torch.OutOfMemoryError:
        logger.info("drafter %s is not tried: it does not fit the memory that is left free on %s", drafter, device)
    except ValueError as error:
        logger.warning("drafter %s cannot be used: %s", drafter, error)
    finally:
        if device.type == "cuda":
            gc.collect()  # an engine and its parts refer to one another
            torch.cuda.empty_cache()
    return None


def _small(engine: Engine, drafter: str, longest: int) -> Engine:
    """An engine with the same model for the trial's requests alone, which captures nothing. longest: tokens of the
    longest prompt. Raises ValueError for a head whose weights cannot be used."""
    config, loaded = engine.config, engine.loaded
    model, max_length = loaded.model, min(loaded.target.max_length, longest + TOKENS + 1)
    config = replace(
        config,
        drafter=drafter,
        depth=None,
        acceptance="exact",
        options=(),
        enforce_eager=True,
        capture="startup",
        capture_memory=None,
        max_num_seqs=len(PROMPTS),
        itl_target_ms=0,
    )
    target = replace(loaded.target, max_num_seqs=config.max_num_seqs, max_length=max_length)
    DRAFTERS.get(drafter).check_weights(target, model)
    windows = {FULL: None, **windows_of(model.layer_states)}
    pages = {group: max(count, 1) for group, count in useful_pages(config, windows, max_length).items()}
    pool = PagePool(loaded.pool.states, pages, config.page_size, loaded.pool.dtype, loaded.device)
    attention = type(loaded.attention)(loaded.deterministic)
    return Engine(config, replace(loaded, target=target, pool=pool, pages=pages, attention=attention))


@contextmanager
def _without_trace(engine: Engine) -> Iterator[None]:
    """What is served inside is not seen in statistics or the prefix cache, and nothing is learnt from it. It is drafted
    to its full depth."""
    counts = ((own.name, getattr(engine.stats, own.name)) for own in fields(engine.stats))
    kept = {name: dict(count) if isinstance(count, dict) else count for name, count in counts}
    try:
        with engine.steps.planner.using(Configured(), Unbounded()):
            yield
    finally:
        engine.forget()
        for name, count in kept.items():
            setattr(engine.stats, name, count)


def _served_by(engine: Engine, prompts: Sequence[Sequence[int]], seconds: float, least: int = 0) -> DraftCheck:
    """What becomes of the drafts of this engine's own head after these prompts."""
    began = time.perf_counter()
    own = _own(engine) or ""
    requests = _serve(engine, prompts, own, seconds, least)
    drafts = _drafts(requests, own)
    found = [request.stats.by_source.get(own, DraftCounts()) for request in requests]
    return DraftCheck(
        drafter=own,
        drafts=drafts,
        first_accepted=sum(counts.hits for counts in found),
        emitted=sum(counts.accepted for counts in found) + drafts,
        seconds=time.perf_counter() - began,
    )


def _serve(engine: Engine, prompts: Sequence[Sequence[int]], own: str, seconds: float, least: int) -> list[Request]:
    """Requests for these prompts: past so many seconds no step begins, if `least` drafts of `own` have been
    verified."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        try:
            requests.append(engine.add(f"{PROBE} {number}", prompt, params))
        except ValueError as error:  # an unusual tokenizer, or a very small pool
            logger.debug("a prompt of the check cannot be served: %s", error)
    began = time.perf_counter()
    while engine.busy and (time.perf_counter() - began < seconds or _drafts(requests, own) < least):
        engine.step()
    for request in requests:
        engine.abort(request.id)
    while engine.busy:  # steps that were in flight
        engine.step()
    return requests


def _drafts(requests: Sequence[Request], own: str) -> int:
    """Verified drafts of this drafter; not those of another that drafted in its place."""
    return sum(request.stats.by_source.get(own, DraftCounts()).drafts for request in requests)


def _report(found: DraftCheck) -> None:
    if found.drafts < ENOUGH:
        logger.info(
            "drafter %s: drafting is not checked: only %d drafts were made after the built-in prompts",
            *(found.drafter, found.drafts),
        )
    elif found.fails:
        logger.warning(
            "drafter %s: of %d drafts after built-in prompts, %d had their first token accepted. Outputs are right, "
            "but drafting only costs time. Likely causes: the head was trained for another model, or another version "
            "of it (compare drafter_model with the model); it reads other layers of the model than in training (those "
            "that its config.json names); its weights were converted in the wrong dtype, or without their scales. "
            "Draft with another until that is found, or start with drafter='none'; check_drafting=False leaves this "
            "check out",
            *(found.drafter, found.drafts, found.first_accepted),
        )
    else:
        logger.info(
            "drafter %s: %.0f%% of first guesses accepted, %.1f tokens per step after built-in prompts (%.2f s)",
            *(found.drafter, 100 * found.first_accepted / found.drafts, found.emitted / found.drafts, found.seconds),
        )
