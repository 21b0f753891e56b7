"""Drafting with a small language model of its own (arXiv 2211.17192, 2302.01318), any that can be served here.

It reads tokens and nothing of the target, and its KV lies beside the target's in pages of the same ids: entry i is of
token i, and what comes out of it guesses token i + 1. With n known tokens the first pass of a draft runs what has come
to be known since the last one, up to token n - 1, and gives the first guess; each further pass runs the guess before:

    token        0   1  ...  f-1 |  f  ...  n-1 |  g0    g1
    entry        folded          |  first pass  |  n     n+1
    guesses                                  g0 |  g1    g2

Entries of guesses are made again when the guesses are known to be right, so that nothing depends on how a draft was
judged. A step with a draft leaves at most its depth and one token to the next; what is longer (a prompt, its chunks),
and all that a step without a draft commits, is folded when the step is observed.

An entry depends on no token behind it, and a page gets its name when the host has read its tokens, all of which are
folded by then: a page that is found by name holds this model's KV throughout.

Legend: R requests of the group, N rows, S slots, V vocabulary of the target.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

from stridelm.cache.layout import FULL
from stridelm.draft.base import Drafter, Group, MemoryNeed, TargetInfo, per_span, within_bounds
from stridelm.draft.given import Given
from stridelm.draft.guess import Chain, Guessing, replacing_lengths
from stridelm.draft.model.vocabulary import FILE, difference
from stridelm.models import MODELS
from stridelm.models.layers.decoder import Decoder, ModelInput
from stridelm.models.loader import build_empty, load_config, load_model
from stridelm.params import Speculation
from stridelm.run.eager import Logits
from stridelm.run.heads import HeadRows, HeadRunner, TargetRuntime, head_layout, place
from stridelm.sample.sampler import Sampler
from stridelm.types import Draft, DraftKV, ForwardBatch, Request, Span, Verdict
from stridelm.upload import upload

WHOLE = ("model.embed_tokens.weight", "model.norm.weight")
"""Tensors of a whole decoder that heads do without."""
MARKERS = ("medusa_num_heads", "draft_vocab_size", "speculators_model_type")
"""Fields of a head's config.json."""


class WholeModel:
    """A decoder as a head: its KV lies where a request's pages are all kept, whatever its windows are."""

    def __init__(self, model: Decoder) -> None:
        self.ops = model.ops
        self.layer_states = tuple(replace(state, group=FULL) for state in model.layer_states)


class ModelDrafter(Drafter):
    name = "model"
    default_depth = 4
    takes = "a small language model with the same tokenizer"
    keeps_kv = True

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
        self._folded = torch.zeros(target.max_num_seqs + 1, dtype=torch.int64, device=target.device)
        """[S] leading entries that are made of known tokens."""

    @classmethod
    def recognises(cls, given: Given) -> bool:
        config = given.config
        known = str(config.get("model_type")) in MODELS and not any(marker in config for marker in MARKERS)
        return known and all(name in given.shapes for name in WHOLE)

    @classmethod
    def why_not(cls, target: TargetInfo) -> str | None:
        path = target.heads.get(cls.name)
        if path is None or target.path is None:
            return "it needs a small model with the same tokenizer; give its directory as drafter_model"
        return _misfit(path.resolve(), target.path.resolve(), target.vocab_size, target.max_length)

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
        # Pages of a prefix hit hold this model's KV, or they were a miss.
        self._folded[request.slot] = request.computed

    # Drafting

    def propose(self, group: Group) -> Draft:
        guesses, slots = Chain(group, self.sampler), group.slots
        states = self._catch_up(group.spans, group, slots, guesses.known, tuple(map(_most_left, group.spans)))
        # Whoever has more behind it than fits is folded whole when this step is observed.
        ready = self._folded[slots] == guesses.known
        valid = ready[:, None] & within_bounds(group, guesses.depth)
        for level in range(guesses.depth):
            if level:
                states = self._grow(group, guesses.tokens[-1], guesses.known - 1 + level, valid[:, level])
            guesses.draw(self._logits(states))
        return guesses.draft(ready)

    def _grow(self, group: Group, tokens: torch.Tensor, entries: torch.Tensor, goes: torch.Tensor) -> torch.Tensor:
        """[R, H] what comes out behind the guesses `tokens`, each at its entry, where the request goes so deep."""
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
        """Fold what is below `ends` [R], no more entries of a request than its bound; [R, H] what comes out of the last
        of them."""
        table, folded = group.table, self._folded[slots]
        counts = torch.minimum(ends - folded, per_span(bounds, slots.device))
        layout, most = head_layout(bounds, group.arena), max(span.end for span in spans)
        rows = place(layout, slots, folded, counts, self.runtime, most)
        states = self._run(table.tokens[slots[rows.span_N], rows.position_N], rows)
        self._folded[slots] = folded + counts
        return states[rows.last_R]

    def _run(self, ids_N: torch.Tensor, rows: HeadRows) -> torch.Tensor:
        # The target may have ids behind this model's last; what is drawn for padding is -1.
        ids_N = ids_N.clamp(0, self.model.spec.vocab_size - 1)
        return self.model(ModelInput(ids_N, rows.position_N, self._runner.mix(rows)))

    def _logits(self, states_RH: torch.Tensor) -> torch.Tensor:
        """[R, V]: of ids that this model does not have, none is ever drawn."""
        behind = self.target.vocab_size - self.model.spec.vocab_size
        logits = self.model.logits(states_RH)
        return F.pad(logits, (0, behind), value=float("-inf")) if behind else logits

    # Following

    def observe(self, group: Group, batch: ForwardBatch, logits: Logits, verdict: Verdict) -> None:
        behind = [i for i, span in enumerate(group.spans) if not span.draft or span.real > _most_left(span)]
        if not behind:
            return
        everyone = len(behind) == len(group.spans)
        slots = group.slots if everyone else group.slots[upload(behind, group.slots.device)]
        spans = tuple(group.spans[i] for i in behind)
        # A chunk finds all before it folded; what decides, what the step before left.
        bounds = tuple(span.real + (_most_left(span) - 1 if span.decides else 0) for span in spans)
        self._catch_up(spans, group, slots, group.table.committed[slots], bounds)


def _most_left(span: Span) -> int:
    """Most known tokens that a step with a draft leaves unfolded."""
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
            f"{path} has {spec.vocab_size} tokens and the model {vocab_size}; {remedy}, or if they differ by padding "
            f"alone, show it by a {FILE} in both directories"
        )
    if spec.max_length < max_length:
        return (
            f"{path} has a context of {spec.max_length} tokens and the model one of {max_length}; "
            f"set max_model_len to at most {spec.max_length}"
        )
    return None
