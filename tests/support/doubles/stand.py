"""A checkpoint in one dtype on one device, its output in plain decoding, and runs to compare with that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from stridelm import LLM, SamplingParams
from stridelm.draft import DRAFTERS
from stridelm.draft.base import TargetInfo
from stridelm.draft.dispatch import Drafters
from stridelm.llm import RequestOutput
from stridelm.params import Speculation
from stridelm.types import MAX_DRAFT_ROWS, Logprob
from stridelm.verify import RULES
from support.checkpoints.assistants import write_assistant
from support.checkpoints.heads import write_akin, write_eagle, write_medusa, write_modules

DEPTHS = ("one", "default", "deepest")
ROOM = 3200
"""Tokens that the pool holds: enough for a batch of the tests with all its drafts."""
OPTIONS: dict[str, Any] = {"prompt_lookup_min": 1}
"""Settings of a drafter's own options that make it draft more often than by default; not needed with weights, which
always draft."""
HEADS: dict[str, Callable[[Path, Path], Path | None]] = {
    "mtp": write_modules,
    "eagle": lambda path, target: write_eagle(path, target, "eagle3"),
    "frozen_kv": write_assistant,
    "medusa": write_medusa,
    "model": write_akin,
}
"""Drafter -> function that writes its weights for a target, called with (path, target's path). It returns None if the
target can have none."""
DEEP = 9
"""Maximum depth tried for a drafter that runs its own layers once per level."""


CAPTURE_NOTHING = {"attention", "enforce_eager", "check_pages"}
"""Options with which nothing is captured, so that to say when has no effect."""

_PLAIN: dict[str, RequestOutput] = {}
"""Outputs of plain decoding, by the stand's settings and the request. Many modules compare with the same ones."""


@dataclass
class Job:
    """A prompt, its sampling parameters, and its speculation."""

    prompt: list[int]
    params: SamplingParams
    speculation: dict[str, Any] | None = None

    @property
    def request(self) -> SamplingParams:
        return replace(self.params, speculation=self.speculation)


@dataclass
class Stand:
    path: Path
    dtype: str
    device: str = "cpu"
    mask_token_id: int | tuple[int, ...] = 63
    options: dict[str, Any] = field(default_factory=dict)
    """Engine options that override the ones below."""
    _alone: dict[str, RequestOutput] = field(default_factory=dict)

    def llm(self, **options: Any) -> LLM:
        """An engine with bit-exact settings that checks its ledger at every step."""
        settings: dict[str, Any] = {
            "dtype": self.dtype,
            "device": self.device,
            "deterministic": True,
            "skip_tokenizer_init": True,
            "check_drafting": False,  # what it would try are heads with random weights
            "strict": True,
            "drafter": "none",
            "depth": None,  # a chosen one would depend on how busy the machine is, too
            "mask_token_id": self.mask_token_id,
            "drafter_model": self.heads,
            "max_num_seqs": 16,
            "itl_target_ms": 0,  # what a step does must not depend on how busy the machine is
            "num_pages": ROOM // options.get("page_size", 16),
        }
        if self.device != "cpu" and not CAPTURE_NOTHING & {*self.options, *options}:
            settings["capture"] = "lazy"  # most tests need few graphs
        return LLM(str(self.path), **{**settings, **self.options, **options})

    @cached_property
    def heads(self) -> list[str]:
        """Directories of tiny weights for every drafter that takes some."""
        beside = Path(f"{self.path}-heads")
        for name, write in HEADS.items():
            if name in DRAFTERS and not (beside / name).is_dir():
                write(beside / name, self.path)
        return [str(beside / name) for name in HEADS if (beside / name).is_dir()]

    @cached_property
    def _reference(self) -> LLM:
        return self.llm(enable_prefix_caching=False, num_pages=20)

    @property
    def target(self) -> TargetInfo:
        return self._reference.engine.loaded.target

    @property
    def drafters(self) -> Drafters:
        return self._reference.engine.drafters

    def plain(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        """Plain decoding: no draft, alone, the whole prompt in one chunk, nothing cached. Computed once per process."""
        job = Job(prompt, replace(params, speculation=None), {"drafter": "none"})
        settings = (type(self), str(self.path), self.dtype, self.device, self.mask_token_id, self.options)
        key = repr((settings, job))
        if key not in _PLAIN:
            _PLAIN[key] = self._compute(job)
        return _PLAIN[key]

    def alone(self, job: Job) -> RequestOutput:
        """One job by itself on an engine without a prefix cache. Computed once per stand: a drafter may be taught other
        drafts in another module."""
        key = repr(job)
        if key not in self._alone:
            self._alone[key] = self._compute(job)
        return self._alone[key]

    def _compute(self, job: Job) -> RequestOutput:
        output = self._reference.generate(job.prompt, job.request)[0]
        self._reference.check()
        return output

    def run(self, jobs: Sequence[Job], llm: LLM | None = None, **options: Any) -> list[RequestOutput]:
        """All jobs in one batch."""
        llm = llm or self.llm(**options)
        outputs = llm.generate([job.prompt for job in jobs], [job.request for job in jobs])
        llm.check()
        return outputs

    def tokens(self, prompt: list[int], params: SamplingParams) -> list[int]:
        return self.plain(prompt, params).outputs[0].token_ids


def assert_same(got: RequestOutput, wanted: RequestOutput, label: object = "") -> None:
    """Both are equal: tokens, reasons, log-probabilities and hidden states, sample by sample."""
    assert len(got.outputs) == len(wanted.outputs)
    for ours, theirs in zip(got.outputs, wanted.outputs):
        said = (ours.token_ids, ours.finish_reason, ours.stop_reason)
        wanted_said = (theirs.token_ids, theirs.finish_reason, theirs.stop_reason)
        assert said == wanted_said, f"{said} instead of {wanted_said}: {label}"
        _assert_same_logprobs(ours.logprobs, theirs.logprobs, label)
        states, others = ours.hidden_states, theirs.hidden_states
        if states is None or others is None:
            assert states is others, label
        else:
            assert torch.equal(states, others), label
    _assert_same_logprobs(got.prompt_logprobs, wanted.prompt_logprobs, label)


def _assert_same_logprobs(
    got: Sequence[dict[int, Logprob] | None] | None,
    wanted: Sequence[dict[int, Logprob] | None] | None,
    label: object,
) -> None:
    assert (got is None) == (wanted is None), label
    if got is None or wanted is None:
        return
    assert len(got) == len(wanted), label
    for ours, theirs in zip(got, wanted):
        assert (ours is None) == (theirs is None), label
        if ours is None or theirs is None:
            continue
        assert list(ours) == list(theirs), label
        assert [entry.rank for entry in ours.values()] == [entry.rank for entry in theirs.values()], label
        for token, entry in ours.items():
            assert abs(entry.logprob - theirs[token].logprob) <= 1e-6, label


def accepted(outputs: Sequence[RequestOutput]) -> int:
    """Guessed tokens that became output."""
    return sum(s.metrics.accepted for output in outputs for s in output.outputs if s.metrics is not None)


def lossless_rules(name: str) -> list[str]:
    """The rules that can decide a drafter's rows and that preserve the target's distribution."""
    drafter, rules = DRAFTERS.get(name), [RULES.get(rule) for rule in RULES]
    return [rule.name for rule in rules if rule.lossless and rule.works_with(drafter.rules, drafter.branches)]


def speculation(stand: Stand, name: str, depth: str = "default", rule: str = "exact") -> dict[str, Any]:
    """A drafter at one of DEPTHS, with its options set."""
    drafter = DRAFTERS.get(name)
    chosen: dict[str, Any] = {"drafter": name, "acceptance": rule}
    if drafter.takes is None:
        chosen |= {key: value for key, value in OPTIONS.items() if key in DRAFTERS.options(name).names()}
    if depth == "one":
        chosen["depth"] = 1
    elif depth == "deepest":
        chosen["depth"] = deepest(stand, name, chosen)
    return chosen


def deepest(stand: Stand, name: str, chosen: dict[str, Any]) -> int:
    """The greatest depth that the drafter accepts, at most DEEP if it keeps KV."""
    drafter = stand.drafters.get(name)
    for depth in range(DEEP if drafter.keeps_kv else MAX_DRAFT_ROWS, 0, -1):
        try:
            drafter.rows_by_depth(Speculation.of({**chosen, "depth": depth}))
        except ValueError:
            continue
        return depth
    raise AssertionError(f"drafter {name} can run at no depth")


def depths_of(name: str) -> tuple[str, ...]:
    """Those of DEPTHS that make a difference for a drafter."""
    return DEPTHS if DRAFTERS.get(name).default_depth else ("default",)


def cases(rule: str | None = "exact") -> list[tuple[str, str]]:
    """(drafter, depth) of every registered drafter that can run under the rule."""
    return [(n, d) for n in DRAFTERS if rule in DRAFTERS.get(n).rules for d in depths_of(n)]


def all_speculations(stand: Stand, rule: str = "exact") -> list[dict[str, Any]]:
    """Every registered drafter that can serve the target, at each of its depths."""
    able = [(n, d) for n, d in cases(rule) if DRAFTERS.get(n).why_not(stand.target) is None]
    return [speculation(stand, name, depth, rule) for name, depth in able]
