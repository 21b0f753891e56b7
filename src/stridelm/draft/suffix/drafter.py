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

from stridelm.draft.base import Drafter, Group, TargetInfo
from stridelm.draft.suffix import SuffixOptions
from stridelm.draft.suffix.texts import BORDER, NOBODYS, Corpora, Place, Text
from stridelm.draft.suffix.tree import Tree, as_draft, grow
from stridelm.faults import on_behalf_of
from stridelm.params import Speculation
from stridelm.run.heads import TargetRuntime
from stridelm.sample.sampler import Sampler
from stridelm.types import Draft, Request, Span
from stridelm.verify import RULES


class SuffixDrafter(Drafter):
    name = "suffix"
    default_depth = 8
    branches = True
    host_bound = True

    def __init__(self, target: TargetInfo, sampler: Sampler, runtime: TargetRuntime | None = None) -> None:
        super().__init__(target, sampler, runtime)
        self.corpora = Corpora()
        self.texts: dict[str, Text] = {}
        """By request id, from a request's first draft until it leaves."""

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        """As many rows as levels: a chain if one continuation dominates at every level, otherwise a shallower tree."""
        depth = self.depth_of(speculation)
        return tuple(range(depth + 1))

    def propose(self, group: Group) -> Draft:
        width = max(span.draft for span in group.spans)
        trees = []
        for span in group.spans:
            with on_behalf_of(span.request):
                trees.append(self._guess(span))
        return as_draft(trees, width, group.slots.device)

    def leave(self, request: Request) -> None:
        self.texts.pop(request.id, None)
        if request.output_ids:
            self.corpora.add(request, request.prompt_ids[-BORDER:] + request.output_ids)

    def forget(self) -> None:
        self.corpora.clear()

    def _guess(self, span: Span) -> Tree:
        """The better of the trees from the request's own text and from the corpus; the former if they are equal."""
        text = self.texts.setdefault(span.request.id, Text())
        rule = RULES.get(span.request.speculation.acceptance or "exact")
        corpus = self.corpora.of(span.request) if rule.coupled else NOBODYS
        text.catch_up(span.request, corpus)
        state, length = text.own.repeated()
        own = _grow(span, [(text.own, state)], length)
        if not rule.coupled:
            return own
        shared = _grow(span, *text.longest(corpus))
        return shared if shared.score > own.score else own


def _grow(span: Span, places: list[Place], length: int) -> Tree:
    """The tree after a match of `length` tokens. The longer the match, the deeper the tree may be."""
    options = span.request.speculation.read(SuffixOptions)
    depth = min(span.depth, int(options.suffix_decoding_max_spec_factor * length))
    return grow(places, span.draft, depth, options.suffix_decoding_min_token_prob) if depth else Tree()
