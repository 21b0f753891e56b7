"""Suffix decoding: drafts what most often followed earlier occurrences of the text's last tokens, in the text itself or
in earlier outputs (Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975).

The longest suffix of the known tokens that has occurred before is continued into a tree, most likely rows first: once
from the request itself and once from the corpus of earlier outputs. The tree with more rows expected to be accepted is
the draft.

The corpus may change how many tokens are accepted but never the output, so only requests under a coupled rule draft
from it. The output of any other rule depends on the draft: if a seed is used again, the corpus holds tokens drawn with
the same noise that now decides acceptance, so that even a lossless rule would favour them, and a lossy one could be
made to emit another request's output.
"""

from __future__ import annotations

from collections.abc import Sequence

from stridelm.batch import Draft
from stridelm.draft.base import Drafter, Group, TargetInfo
from stridelm.draft.suffix import SuffixOptions
from stridelm.draft.suffix.texts import BORDER, NOBODYS, Corpora, Place, Text
from stridelm.draft.suffix.tree import Tree, as_draft, grow
from stridelm.faults import on_behalf_of
from stridelm.params import Speculation
from stridelm.run.heads import TargetRuntime
from stridelm.run.state import TokenTable
from stridelm.sample.sampler import Sampler
from stridelm.types import Found, Request
from stridelm.verify import RULES

SHARES = 4
"""Classes of trees, by the share of their rows that is expected to be accepted."""


class SuffixDrafter(Drafter):
    name = "suffix"
    default_depth = 8
    branches = True
    host_bound = True
    looks_ahead = True

    def __init__(self, target: TargetInfo, sampler: Sampler, runtime: TargetRuntime | None = None) -> None:
        super().__init__(target, sampler, runtime)
        self.corpora = Corpora()
        self.texts: dict[str, Text] = {}
        """By request id, from a request's first draft until it leaves."""

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        """As many rows as levels: a chain if one continuation dominates at every level, otherwise a shallower tree."""
        depth = self.depth_of(speculation)
        return tuple(range(depth + 1))

    def found(self, requests: Sequence[Request], table: TokenTable) -> Sequence[Found]:
        """As many levels as the tree has rows. The evidence is the share of them that is expected to be accepted."""
        found = []
        for request in requests:
            deepest = len(request.rows_by_depth) - 1
            tree = self._guess(request, deepest, deepest)
            rows = len(tree.tokens)
            found.append(Found(rows, int(SHARES * tree.score / max(1, rows))))
        return found

    def propose(self, group: Group) -> Draft:
        width = max(span.draft for span in group.spans)
        trees = []
        for span in group.spans:
            with on_behalf_of(span.request):
                trees.append(self._guess(span.request, span.draft, span.depth))
        return as_draft(trees, width, group.slots.device)

    def leave(self, request: Request) -> None:
        self.texts.pop(request.id, None)
        if request.output_ids:
            self.corpora.add(request, request.prompt_ids[-BORDER:] + request.output_ids)

    def forget(self) -> None:
        self.corpora.clear()

    def _guess(self, request: Request, rows: int, depth: int) -> Tree:
        """The better of the trees from the request's own text and from the corpus, with at most so many rows and
        levels; the former if they are equal."""
        text = self.texts.setdefault(request.id, Text())
        rule = RULES.get(request.speculation.acceptance or "exact")
        corpus = self.corpora.of(request) if rule.coupled else NOBODYS
        text.catch_up(request, corpus)

        def grown(places: list[Place], length: int) -> Tree:
            """After a match of `length` tokens. The longer the match, the deeper the tree may be."""
            options = request.speculation.read(SuffixOptions)
            levels = min(depth, int(options.suffix_decoding_max_spec_factor * length))
            return grow(places, rows, levels, options.suffix_decoding_min_token_prob) if levels else Tree()

        state, length = text.own.repeated()
        own = grown([(text.own, state)], length)
        if not rule.coupled:
            return own
        shared = grown(*text.longest(corpus))
        return shared if shared.score > own.score else own
