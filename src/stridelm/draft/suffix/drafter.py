"""Suffix decoding: what most often followed where the text, or what earlier requests said, went like its end now
(Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975).

The longest suffix of the known tokens that has occurred before, in the request itself and in the corpus of earlier
outputs, is continued into a tree, likeliest rows first. The one of the two trees that is expected to have more accepted
is the draft.

The corpus may change how much is accepted and never what is said, so only requests under a coupled rule draft from it.
Another rule's output depends on the draft: with a seed that comes again the corpus holds what was drawn with the very
noise that now accepts, so that even a rule that is lossless would prefer it, and a lossy one could be made to emit what
somebody else was told.
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
        """As many rows as levels: a chain where one continuation is likeliest all along, else a shallower tree."""
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
        """The better of the trees that the request's own text and the corpus give; of equals its own."""
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
    """The tree behind a match of `length` tokens. Longer matches are trusted further."""
    options = span.request.speculation.read(SuffixOptions)
    depth = min(span.depth, int(options.suffix_decoding_max_spec_factor * length))
    return grow(places, span.draft, depth, options.suffix_decoding_min_token_prob) if depth else Tree()
