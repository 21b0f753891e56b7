"""Validation of new requests: a prompt and parameters become a Request, or a ValueError that names the remedy.

A request that could never run is refused here, before it is queued, so that it cannot affect the rest of the batch.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stridelm.cache.ledger import Ledger
from stridelm.draft.base import TargetInfo
from stridelm.draft.dispatch import Drafters
from stridelm.draft.settle import can_choose, settle
from stridelm.grammar.compiler import Grammars
from stridelm.params import SamplingParams, Speculation
from stridelm.sample.table import check_token_ids
from stridelm.schedule.rows import longest, smallest_budget
from stridelm.stats import RequestStats, VerifiedDrafts
from stridelm.types import PageCounts, Request
from stridelm.values import token_ids
from stridelm.verify import RULES

SETTLED = 256
"""Maximum number of speculations in the cache: nearly all requests use one of a few."""


@dataclass(frozen=True)
class Intake:
    target: TargetInfo
    drafters: Drafters
    ledger: Ledger
    most_pages: Callable[[PageCounts], PageCounts]
    """For each group, the pages that it could have while the others have those that a request needs."""
    max_tokens_per_step: int
    default: Speculation
    has_tokenizer: bool
    grammars: Callable[[], Grammars]
    adaptive: bool = False
    """Drafts of requests that name no depth may be shallower than usual."""
    looks_ahead: bool = False
    """Whether drafters are asked what they have found before a step is planned, if they look (Drafter.looks_ahead)."""
    spec_decode_metrics: str | None = None
    """How much requests' metrics say of their drafts (EngineConfig.spec_decode_metrics)."""
    _settled: dict[Speculation, tuple[Speculation, tuple[int, ...]]] = field(default_factory=dict)
    """Requested speculation -> its resolution. So a head's files are read once, and may be deleted while the engine
    runs."""

    def request(
        self,
        id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        sample_index: int = 0,
        arrival: int = 0,
        tenant: str = "",
        bad_words: Sequence[Sequence[int]] = (),
        seed: int | None = None,
    ) -> Request:
        """Build and check a request. Raises ValueError if it cannot be served."""
        ids = self._prompt(prompt_ids)
        self._check_params(params)
        speculation, rows_by_depth = self.settled(params)
        names_none = Speculation.of(params.speculation).depth is None
        adaptive = speculation.adaptive or (self.adaptive and names_none and can_choose(speculation))
        if params.target_tps is not None and not adaptive:
            raise ValueError(
                "target_tps has no effect where depths are not chosen: leave it out, or use --depth auto or the "
                "request's own depth auto"
            )
        assert speculation.drafter is not None and speculation.acceptance is not None
        rule = RULES.get(speculation.acceptance)
        drafter = self.drafters.get(speculation.drafter)
        request = Request(
            id=id,
            prompt_ids=ids,
            params=params,
            speculation=speculation,
            rows_by_depth=rows_by_depth,
            room=self.target.max_length - len(ids),
            all_or_nothing=rule.all_or_nothing,
            sample_index=sample_index,
            priority=params.priority,
            arrival=arrival,
            tenant=tenant,
            stop_ids=frozenset(params.stop_token_ids or ()),
            bad_words=[*(params.bad_words_token_ids or ()), *bad_words],
            seed=_seed(params.seed, seed),
            renews_noise=adaptive and rule.lossless and not rule.coupled,
            stats=RequestStats(arrived_s=time.perf_counter(), verified=self._verified(speculation)),
            host_bound=drafter.host_bound,
            adaptive=adaptive,
            draft_kv=drafter.draft_kv,
            looks_ahead=drafter.looks_ahead and self.looks_ahead,
            needs_states=drafter.needs_states,
            sources=drafter.sources,
        )
        check_token_ids(params, self.target.vocab_size, request.bad_words)
        self._check_fit(request)
        return request

    def settled(self, params: SamplingParams) -> tuple[Speculation, tuple[int, ...]]:
        """How the request is to be drafted, with every field resolved, and the rows that each depth needs."""
        asked = Speculation.of(params.speculation)
        if asked not in self._settled:
            speculation = settle(asked.over(self.default), self.target)
            assert speculation.drafter is not None
            rows_by_depth = self.drafters.get(speculation.drafter).rows_by_depth(speculation)
            if len(self._settled) >= SETTLED:
                self._settled.clear()
            self._settled[asked] = speculation, rows_by_depth
        return self._settled[asked]

    def _verified(self, speculation: Speculation) -> VerifiedDrafts | None:
        """Where a request's drafts are counted for its metrics; None where nobody is to see them."""
        if self.spec_decode_metrics is None or not speculation.depth:
            return None
        return VerifiedDrafts([], []) if self.spec_decode_metrics == "detailed" else VerifiedDrafts()

    def _prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        ids = token_ids("the prompt", prompt_ids)
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        if len(ids) >= self.target.max_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the context {self.target.max_length}, prompt and output; "
                f"shorten the prompt or raise max_model_len"
            )
        self._check_ids("the prompt", ids)
        return ids

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("logit_bias", list(params.logit_bias or ()))
        self._check_ids("logprob_token_ids", params.logprob_token_ids or ())
        for words in params.bad_words_token_ids or ():
            self._check_ids("bad_words_token_ids", words)
        if params.structured_outputs is not None:
            if not self.has_tokenizer:
                raise ValueError(
                    "structured_outputs need a tokenizer, and the engine was started with skip_tokenizer_init; start "
                    "it without"
                )
            self.grammars().compile(params.structured_outputs)

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        size = self.target.vocab_size
        wrong = [t for t in ids if not 0 <= t < size]
        if wrong:
            raise ValueError(f"{what}: token ids must be from 0 to {size - 1}, the model's vocabulary; got {wrong[:4]}")

    def _check_fit(self, request: Request) -> None:
        window = request.rows_by_depth[-1] if request.all_or_nothing else 0
        need = self.ledger.most_held(longest(request, self.target.max_length) + window, smallest_budget(request))
        most = self.most_pages(need)
        if not most.cover(need):
            short, have = max(zip(need, most, strict=True), key=lambda pair: pair[0] - pair[1])
            raise ValueError(
                f"the request may need {short} pages of KV and the pool has {have}; lower max_tokens or raise num_pages"
            )
        rows = smallest_budget(request)
        if rows > self.max_tokens_per_step:
            raise ValueError(
                f"a trusted window at depth {request.speculation.depth} needs {rows} rows in one step and "
                f"max_num_batched_tokens is {self.max_tokens_per_step}; lower depth or raise it"
            )


def _seed(own: int | None, shared: int | None) -> int:
    """The parameters' own seed, else the one shared by a prompt's samples, else a fresh one."""
    if own is not None:
        return own
    return secrets.randbits(63) if shared is None else shared
