"""Drafting with a separate small language model (arXiv 2211.17192, 2302.01318): any model that Stride can serve.

It reads tokens and nothing else of the target, and its KV is kept in a pool of its own with the target's page ids:
entry i is that of token i, and its output guesses token i + 1. With n known tokens, the first pass of a draft runs the
tokens that became known since the last one, up to token n - 1, and gives the first guess; each further pass runs the
previous guess:

    token        0   1  ...  c-1 |  c  ...  n-1 |  g0    g1
    entry        caught up       |  first pass  |  n     n+1
    guesses                                  g0 |  g1    g2

Entries of guesses are computed again once the guesses are known to be right, so nothing depends on the verdict on a
draft. A step with a draft leaves at most its depth plus one token to the next; anything longer (a prompt, its chunks),
and all that a step without a draft commits, is caught up on when the step is observed.

An entry does not depend on later tokens, and a page gets its name when the host has read its tokens, all of which have
been caught up on by then: every entry of a page that is found by name holds this model's KV.

Legend: R requests of the group, N rows, S slots, V vocabulary of the target.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

from stridelm.batch import Draft, ForwardBatch, Verdict
from stridelm.cache.layout import FULL
from stridelm.draft.base import Drafter, Group, MemoryNeed, TargetInfo, numbers, per_span, within_bounds
from stridelm.draft.given import Given
from stridelm.draft.guess import Chain, Guessing, chain_depth, replacing_lengths
from stridelm.draft.model.vocabulary import FILE, difference
from stridelm.models import MODELS, WITH_TEXT
from stridelm.models.layers.decoder import EMBEDDING, HEAD, Decoder, ModelInput
from stridelm.models.loader import build_empty, build_stored, check_headers, load_config, load_model
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.run.heads import HeadRows, HeadRunner, TargetRuntime, head_layout, place
from stridelm.sample.sampler import Sampler
from stridelm.types import DraftKV, Request, Span
from stridelm.upload import upload

WHOLE = "norm.weight"
"""A whole decoder has this tensor, and an embedding or an output head."""
MARKERS = ("medusa_num_heads", "draft_vocab_size", "speculators_model_type")
"""Fields of a head's config.json."""


class WholeModel:
    """A decoder as a head: its KV is in the page group that keeps all of a request's pages, whatever its windows."""

    def __init__(self, model: Decoder) -> None:
        self.ops = model.ops
        self.layer_states = tuple(replace(state, group=FULL) for state in model.layer_states)


class ModelDrafter(Drafter):
    name = "model"
    default_depth = 4
    takes = "a small language model with the same tokenizer"
    keeps_kv = True
    follows = must_propose = True
    needs_states = True  # but for prompts that are no longer than a draft

    def __init__(self, target: TargetInfo, sampler: Sampler, runtime: TargetRuntime | None = None) -> None:
        """Raises ValueError for weights that do not fit their config.json, or that there is no memory for."""
        super().__init__(target, sampler, runtime)
        assert runtime is not None
        self.runtime = runtime
        self.model = load_model(
            target.heads[self.name],
            dtype=runtime.dtype,
            device=target.device,
            deterministic=runtime.deterministic,
            load_format="auto" if target.weighted else "dummy",
        )
        self.model.spec.prepare(self.model.ops, runtime.dtype)
        self._runner = HeadRunner(WholeModel(self.model), runtime)
        self._caught_up = torch.zeros(target.max_num_seqs + 1, dtype=torch.int64, device=target.device)
        """[S] number of leading entries that were computed from known tokens."""

    @classmethod
    def recognises(cls, given: Given) -> bool:
        config = given.config
        kind = str(config.get("model_type"))
        known = (kind in MODELS or kind in WITH_TEXT) and not any(marker in config for marker in MARKERS)
        under = WITH_TEXT.get(kind, "model.")
        return known and under + WHOLE in given.shapes and bool({under + EMBEDDING, HEAD} & given.shapes.keys())

    @classmethod
    def why_not(cls, target: TargetInfo) -> str | None:
        path = target.heads.get(cls.name)
        if path is None or target.path is None:
            return "it needs a small model with the same tokenizer; give its directory as drafter_model"
        return _misfit(path.resolve(), target.path.resolve(), target.vocab_size, target.max_length)

    @classmethod
    def check_weights(cls, target: TargetInfo, model: Decoder) -> None:
        path = target.heads[cls.name]
        if target.weighted:
            small, loading = build_stored(load_config(path), path)
            check_headers(small, loading, path)

    @classmethod
    def memory_need(cls, target: TargetInfo, model: Decoder) -> MemoryNeed:
        path = target.heads[cls.name]
        small = build_empty(load_config(path), path)
        layers = WholeModel(small).layer_states
        return MemoryNeed(sum(parameter.numel() for parameter in small.parameters()), layers)

    @property
    def draft_kv(self) -> DraftKV:
        return DraftKV(self.name, 0)

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        depth = self.depth_of(speculation)
        replacing_lengths(speculation)
        return tuple(range(depth + 1))

    def kind(self, span: Span) -> Guessing:
        return Guessing.of(span.request.speculation)

    def admit(self, request: Request) -> None:
        # The pages of a prefix hit hold this model's KV; otherwise they would have been a miss.
        self._caught_up[request.slot].fill_(request.computed)

    # Drafting

    def propose(self, group: Group) -> Draft:
        slots, depth = group.slots, chain_depth(group)
        positions_LR = group.table.known[slots] + group.arena.keep(numbers, depth)[:, None]
        guesses, known = Chain(group, self.sampler, positions_LR), positions_LR[0]
        states = self._catch_up(group.spans, group, slots, known, tuple(map(_max_left, group.spans)))
        # A request with more to catch up on than its bound does so when this step is observed, and has no draft now.
        ready = self._caught_up[slots] == known
        valid = ready[:, None] & within_bounds(group, depth)
        for level in range(depth):
            if level:
                states = self._grow(group, guesses.tokens[-1], positions_LR[level - 1], valid[:, level])
            guesses.draw(self._logits(states))
        return guesses.draft(ready)

    def _grow(self, group: Group, tokens: torch.Tensor, entries: torch.Tensor, goes: torch.Tensor) -> torch.Tensor:
        """[R, H] the output for the guesses `tokens`, each at its entry. goes: requests that are drafted this deep."""
        rows = place(
            head_layout((1,) * len(group.spans), group.arena),
            group.slots,
            torch.where(goes, entries, 0),
            None,
            self.runtime,
            max(span.end for span in group.spans),
            goes,
        )
        return self._run(tokens, rows)

    def _catch_up(
        self, spans: tuple[Span, ...], group: Group, slots: torch.Tensor, ends: torch.Tensor, bounds: tuple[int, ...]
    ) -> torch.Tensor:
        """Compute the missing entries before `ends` [R], at most `bounds` per request. Returns [R, H] the output at the
        last of each request."""
        table, starts = group.table, self._caught_up[slots]
        counts = torch.minimum(ends - starts, per_span(bounds, slots.device))
        layout, max_end = head_layout(bounds, group.arena), max(span.end for span in spans)
        rows = place(layout, slots, starts, counts, self.runtime, max_end)
        states = self._run(table.tokens[slots[rows.span_N], rows.position_N], rows)
        self._caught_up[slots] = starts + counts
        return states[rows.last_R]

    def _run(self, ids_N: torch.Tensor, rows: HeadRows) -> torch.Tensor:
        # The target may have higher ids than this model.
        ids_N = ids_N.clamp(max=self.model.spec.vocab_size - 1)
        return self.model(ModelInput(ids_N, rows.position_N, self._runner.mix(rows)))

    def _logits(self, states_RH: torch.Tensor) -> torch.Tensor:
        """[R, V]: -inf for ids that this model does not have."""
        missing = self.target.vocab_size - self.model.spec.vocab_size
        logits = self.model.logits(states_RH)
        return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    # Following

    def observe(self, group: Group, batch: ForwardBatch, logits: Logits, verdict: Verdict) -> None:
        late = [i for i, span in enumerate(group.spans) if not span.draft or span.real > _max_left(span)]
        if not late:
            return
        everyone = len(late) == len(group.spans)
        slots = group.slots if everyone else group.slots[upload(late, group.slots.device)]
        spans = tuple(group.spans[i] for i in late)
        # Before a prompt chunk nothing is left over; a span that decides may have tokens that the last step left.
        bounds = tuple(span.real + (_max_left(span) - 1 if span.decides else 0) for span in spans)
        self._catch_up(spans, group, slots, group.table.committed[slots], bounds)


def _max_left(span: Span) -> int:
    """The most known tokens that a step with a draft leaves to catch up on."""
    return len(span.request.rows_by_depth)


@lru_cache(maxsize=64)
def _misfit(path: Path, target: Path, vocab_size: int, max_length: int) -> str | None:
    """Why the model in `path` cannot draft for the one in `target`, with the remedy; None if it can."""
    if path == target:
        return f"{path} is the model itself, which would draft no faster than it decodes; give a smaller one"
    spec = build_empty(load_config(path), path).spec
    remedy = "give a small model with the same tokenizer"
    different = difference(path, target)
    if different is not None:
        return f"{path} has another tokenizer ({different}); {remedy}"
    if spec.vocab_size != vocab_size and not all((at / FILE).is_file() for at in (path, target)):
        return (
            f"{path} has {spec.vocab_size} tokens and the model {vocab_size}; {remedy}, or if only their padding "
            f"differs, put a {FILE} in both directories to show it"
        )
    if spec.max_length < max_length:
        return (
            f"{path} has a context of {spec.max_length} tokens and the model one of {max_length}; "
            f"set max_model_len to at most {spec.max_length}"
        )
    return None
