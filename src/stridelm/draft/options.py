"""Options that several drafters share. draft/__init__.py registers which drafter has which; this file must not import
torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stridelm.options import Options
from stridelm.values import option, shortened

MAX_LOOKUP = 64
"""Longest suffix that prompt lookup compares: each further token costs a pass over the context."""
MAX_BRANCHES = 64
"""Most rows of a draft, and so most branches."""
Path = tuple[int, ...]


@dataclass(frozen=True)
class GuessOptions(Options):
    """For drafters that draw guesses from logits of their own."""

    draft_sample_method: Literal["greedy", "probabilistic"] | None = option(
        None,
        "how a neural drafter guesses: greedy (its most likely token) or probabilistic (drawn like the request's "
        "tokens; the default)",
    )

    @property
    def takes_argmax(self) -> bool:
        """Whether guesses are the drafter's most likely tokens instead of being drawn."""
        return self.draft_sample_method == "greedy"


@dataclass(frozen=True)
class LookupOptions(Options):
    """For drafters that look up the text's last tokens earlier in the text. In a drafter that also guesses, a match
    replaces its draft."""

    prompt_lookup_min: int | None = option(
        None,
        "with ngram: shortest suffix that counts as a match, in tokens; with a head: such a match replaces its draft",
        high=MAX_LOOKUP,
    )
    prompt_lookup_max: int | None = option(
        None, "with ngram: longest suffix that is compared, in tokens", high=MAX_LOOKUP
    )

    @property
    def looks_up(self) -> bool:
        """Whether the request asks for lookup."""
        return self.prompt_lookup_min is not None or self.prompt_lookup_max is not None


def _paths(value: Sequence[Sequence[int]] | str) -> tuple[Path, ...]:
    """A token tree as tuples, from tuples, lists or text. Raises ValueError for anything else."""
    wrong = f"token_tree takes paths of ranks, such as [(0,), (1,), (0, 0)]; got {shortened(value)}"
    if isinstance(value, str) and not re.fullmatch(
        r"[][(),\s0-9]*", value
    ):  # operators could exhaust the parser's stack
        raise ValueError(wrong)
    try:
        given = ast.literal_eval(value) if isinstance(value, str) else value
        paths = tuple(tuple(path) for path in given)
    except (ValueError, SyntaxError, TypeError) as error:
        raise ValueError(wrong) from error
    if not all(isinstance(rank, int) for path in paths for rank in path):
        raise ValueError(wrong)
    return paths


@dataclass(frozen=True)
class BranchingOptions(Options):
    """For heads that can branch (draft/expand.py)."""

    draft_topk: int | None = option(
        None,
        "with a head that can branch: nodes per level that get children, and children of each (1: a chain)",
        low=1,
        high=MAX_BRANCHES,
    )
    num_draft_tokens: int | None = option(None, "with draft_topk over 1: rows of the draft", low=1, high=MAX_BRANCHES)
    token_tree: tuple[Path, ...] | None = option(
        None, "a fixed tree instead: paths of ranks, such as '[(0,), (1,), (0, 0)]'", parse=_paths
    )

    @property
    def branches(self) -> bool:
        """Whether the request asks for a draft that branches."""
        return self.token_tree is not None or (self.draft_topk or 1) > 1


@dataclass(frozen=True)
class ChainOptions(LookupOptions, GuessOptions):
    """For drafters that build a Chain (draft/guess.py)."""


@dataclass(frozen=True)
class HeadOptions(LookupOptions, BranchingOptions, GuessOptions):
    """For heads, which can also branch."""
