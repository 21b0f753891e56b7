"""Turns a request's options into a fully resolved Speculation, or raises with the reason why it cannot run."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache

from stridelm.draft import DRAFTERS
from stridelm.draft.base import TargetInfo
from stridelm.draft.options import BranchingOptions
from stridelm.draft.whose import CHOOSES, in_order
from stridelm.params import Speculation
from stridelm.verify import RULES
from stridelm.verify.rule import Rule

logger = logging.getLogger(__name__)


def settle(speculation: Speculation, target: TargetInfo) -> Speculation:
    """Resolve the drafter, the rule and the depth. Raises ValueError naming the remedy for anything that is unknown,
    out of range, cannot run on this model, or would have no effect."""
    rule = RULES.get(speculation.acceptance or "exact")
    name = speculation.drafter or "auto"
    if name == "auto":
        name, why = best_drafter(speculation, target)
        logger.info("drafter auto: %s, %s", name, why)
    drafter = DRAFTERS.get(name)
    reason = drafter.why_not(target)
    if reason:
        raise ValueError(f"drafter {name!r} cannot run on this model: {reason}")
    asked = speculation.read(BranchingOptions)
    if rule.chains_only and asked.branches:
        raise ValueError(f"acceptance {rule.name!r} decides only chains; leave draft_topk and token_tree out")
    if not rule.works_with(drafter.rules, drafter.branches):
        able = ", ".join(n for n in DRAFTERS if rule.works_with(DRAFTERS.get(n).rules, DRAFTERS.get(n).branches))
        raise ValueError(f"acceptance {rule.name!r} does not work with drafter {name!r}; it works with: {able}")
    _refuse_idle_options(speculation, name, rule)
    depth = speculation.depth
    if depth and drafter.default_depth == 0:
        raise ValueError(f"depth {depth} would have no effect with drafter {name!r}; leave it out")
    if depth is None:
        tree = asked.token_tree
        depth = drafter.usual_depth(target) if tree is None else max(map(len, tree), default=0)
    settled = replace(speculation, drafter=name, acceptance=rule.name, depth=depth)
    if speculation.adaptive and not can_choose(settled):
        why = f"acceptance {rule.name!r}" if rule.all_or_nothing else f"drafter {name!r}"
        raise ValueError(f"depth auto would have no effect with {why}; leave it out or choose another")
    _check_branches(asked, target.vocab_size)
    if rule.simulated:
        _check_length(speculation, rule.name, depth)
        _warn_of_simulation()
    return settled


def can_choose(settled: Speculation) -> bool:
    """Whether there are depths to choose from: windows are taken whole, and some drafters draft nothing."""
    return bool(settled.depth) and not RULES.get(settled.acceptance or "exact").all_or_nothing


def best_drafter(speculation: Speculation, target: TargetInfo) -> tuple[str, str]:
    """The first drafter that can run under the rule with these options, in the order of `in_order`; and why each one
    before it cannot."""
    rule = RULES.get(speculation.acceptance or "exact")
    reasons: list[str] = []
    for name in in_order(target):
        kind = DRAFTERS.get(name)
        reason = kind.why_not(target)
        if reason is None and name == CHOOSES:
            reason = _why_not_choose(speculation, rule)
        if reason is None and rule.works_with(kind.rules, kind.branches):
            return name, "; ".join(reasons) or "the first choice where it can run"
        reasons.append(f"not {name}: {reason or f'it cannot run under acceptance {rule.name}'}")
    raise ValueError(f"no drafter can run under acceptance {rule.name!r} on this model: {'; '.join(reasons)}")


def _why_not_choose(speculation: Speculation, rule: type[Rule]) -> str | None:
    """Why "auto" keeps to one drafter, though it could choose at every step; None if it does not."""
    if rule.simulated:
        return f"it may make drafts shorter than acceptance {rule.name} counts on"
    if not rule.coupled:
        return f"which drafts are made may change the output under acceptance {rule.name}"
    of_rule = RULES.options(rule.name).names()
    asked = [name for name, _ in speculation.options if name not in (*of_rule, *DRAFTERS.options(CHOOSES).names())]
    return f"it has no {' or '.join(asked)}" if asked else None


def _check_branches(asked: BranchingOptions, vocab_size: int) -> None:
    """Refuse more children per node than there are tokens."""
    ranks = [1 + rank for path in asked.token_tree or () for rank in path]
    children = max([asked.draft_topk or 1, *ranks])
    if children > vocab_size:
        raise ValueError(f"a node cannot have {children} children, the vocabulary has {vocab_size} tokens; lower it")


def _check_length(speculation: Speculation, rule: str, depth: int) -> None:
    """Refuse a simulated length that is missing, or that drafts of this depth cannot reach."""
    length = speculation.acceptance_length
    if length is None:
        raise ValueError(f"acceptance {rule!r} needs the average number of tokens per step: write {rule}:2.5")
    if depth == 0:
        raise ValueError(f"acceptance {rule!r} would have no effect without a draft; choose a drafter and a depth")
    if length > depth + 1:
        raise ValueError(
            f"acceptance {speculation.rule!r}: at depth {depth} a step emits {depth + 1} tokens at most; "
            f"lower the length or raise depth"
        )


@cache
def _warn_of_simulation() -> None:
    """Logged once per process: every speculation is settled here before it is used."""
    logger.warning("acceptance is simulated: the output is not the model's; for benchmarks only")


def _refuse_idle_options(speculation: Speculation, drafter: str, rule: type[Rule]) -> None:
    read = {"drafter", "depth", "acceptance", *DRAFTERS.options(drafter).names(), *RULES.options(rule.name).names()}
    if rule.simulated:
        read.add("acceptance_length")
    idle = [name for name in speculation.given if name not in read]
    if idle:
        raise ValueError(
            f"{', '.join(idle)} would have no effect with drafter {drafter!r} and acceptance "
            f"{speculation.acceptance or 'exact'!r}; leave it out or choose another drafter or acceptance"
        )
