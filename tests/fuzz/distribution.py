"""Lossless rules keep the target's distribution: the outputs of many requests through a real engine are counted, and
compared with the oracle's expectation. Chosen depths are chosen by a policy that favours what was refused under a seed.

All tokens but a few are made impossible by a bias, so that three tokens have few outcomes. Every request has a random
prompt of its own; the expected counts are summed over all requests. The same requests are sent several times: a drafter
that learns then drafts their earlier outputs, under the same seeds.

Legend: A tokens that may be emitted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fuzz.cases import Case, Checkpoint, Shown
from fuzz.checkpoints import directory
from fuzz.found import Found, guarded
from fuzz.oracle import oracle_of
from fuzz.play import engine_options, registrations
from stridelm import LLM, SamplingParams
from stridelm.schedule.adaptive import Adaptive
from support.doubles.depths import Spiteful

MIN_P = 1e-6
MAX_EXPECTED_IN_POOL = 5.0
"""Cells with a smaller expected count are pooled."""


@dataclass(frozen=True, repr=False)
class Table(Shown):
    """A speculation whose outputs are counted."""

    speculation: dict[str, Any] = field(default_factory=dict)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    requests: int = 2500
    rounds: int = 1
    """How often the same requests are sent."""
    params: dict[str, Any] = field(default_factory=dict)
    tokens: int = 3
    """Number of tokens counted of each output. It has two more, so that drafts can reach their full depth."""
    allowed: tuple[int, ...] = (3, 9, 17)
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    @property
    def case(self) -> Case:
        engine: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "max_num_seqs": 64, "strict": False}
        engine |= {"num_pages": 400, "max_num_batched_tokens": 2048}
        return Case(self.checkpoint, engine | ({"deterministic": True} if self.device != "cpu" else {}))


HEADS = ("eagle1", "assistant", "medusa", "model", "modules")
TABLES: tuple[Table, ...] = tuple(
    Table({"drafter": drafter, "acceptance": rule, **options}, Checkpoint(heads=HEADS), **more)
    for rule in ("rejection", "block")
    for drafter, options, more in (
        ("ngram", {"prompt_lookup_min": 1}, {"rounds": 2}),
        ("suffix", {"depth": 1}, {"rounds": 3, "requests": 3000}),
        ("suffix", {"suffix_decoding_min_token_prob": 0.0}, {"rounds": 3, "requests": 3000}),
        ("random_tree", {}, {"rounds": 2}),
        ("mask", {}, {}),
        ("mtp", {}, {}),
        ("mtp", {"draft_sample_method": "greedy"}, {}),
        ("eagle", {}, {"params": {"top_k": 3, "temperature": 1.3}}),
        ("eagle", {"draft_topk": 2, "depth": 2}, {}),
        ("frozen_kv", {}, {"params": {"top_p": 0.9}}),
        ("frozen_kv", {"draft_topk": 2, "depth": 2}, {}),
        ("medusa", {}, {"params": {"presence_penalty": 1.0}}),
        ("medusa", {"token_tree": ((0,), (1,), (0, 0))}, {}),
        ("model", {"depth": 2}, {"params": {"min_p": 0.2, "repetition_penalty": 1.5}}),
        ("model", {"depth": 2, "prompt_lookup_min": 1}, {}),
    )
    if rule == "rejection" or drafter in ("ngram", "mtp", "model") or (drafter == "frozen_kv" and not options)
)
"""Block verification decides only chains."""


def check_table(table: Table) -> float:
    """The smallest p-value of the table's rounds. Raises Found for one under MIN_P, or if the engine fails."""
    return guarded("distribution", lambda: _check(table))


def _check(table: Table) -> float:
    rng = random.Random(f"table {table.seed}")
    free = [t for t in range(table.checkpoint.vocab) if t not in table.allowed]
    prompts = [(*rng.sample(free, 3), rng.choice(table.allowed)) for _ in range(table.requests)]
    params = {
        "temperature": 1.0,
        "max_tokens": table.tokens + 2,
        "ignore_eos": True,
        "logit_bias": dict.fromkeys(table.allowed, 100.0),
        **table.params,
    }
    expected = joint(table, prompts, params)
    with registrations():
        engine = LLM(str(directory(table.checkpoint)), **engine_options(table.case)).engine
        if table.speculation.get("depth") == "auto":
            engine.adaptive = engine.adaptive or Adaptive(engine.cost)
            engine.steps.planner.depths = Spiteful()
        worst = 1.0
        for number in range(table.rounds):
            counts = np.zeros_like(expected)
            for index, prompt in enumerate(prompts):
                given = SamplingParams(**params, seed=table.seed * 10**6 + index, speculation=table.speculation)
                engine.add(f"{number}.{index}", list(prompt), given)
            while engine.busy:
                for output in engine.step():
                    if output.finished:
                        said = output.request.output_ids[: table.tokens]
                        counts[tuple(map(table.allowed.index, said))] += 1
            p = chi_square(counts.ravel(), expected.ravel())
            worst = min(worst, p)
            if p < MIN_P:
                raise Found("distribution", f"{table} in round {number}: p = {p:.1e}\n{counts}\n{expected.round(1)}")
        engine.check()
    return worst


_JOINTS: dict[str, np.ndarray] = {}
"""Expected counts, keyed by all that they depend on."""


def joint(table: Table, prompts: Sequence[tuple[int, ...]], params: dict[str, Any]) -> np.ndarray:
    """[A, A, ..] the expected count of each output, over all prompts."""
    key = repr((table.checkpoint, table.tokens, table.allowed, prompts, params))
    if key not in _JOINTS:
        _JOINTS[key] = _joint(table, prompts, params)
    return _JOINTS[key]


def _joint(table: Table, prompts: Sequence[tuple[int, ...]], params: dict[str, Any]) -> np.ndarray:
    oracle = oracle_of(directory(table.checkpoint))
    settled = oracle.settled(params)
    allowed, total = table.allowed, np.zeros((len(table.allowed),) * table.tokens)
    outcomes = [out for count in range(table.tokens) for out in itertools.product(allowed, repeat=count)]
    for start in range(0, len(prompts), 256):
        block = prompts[start : start + 256]
        texts = [(*prompt, *out) for prompt in block for out in outcomes]
        logits = iter(oracle.last_logits(texts))
        for prompt in block:
            chances = {
                out: oracle.row(next(logits), prompt, out, settled, "float32").probabilities[list(allowed)]
                for out in outcomes
            }
            mass = np.ones(())
            for count in range(table.tokens):
                step = np.array([chances[out] for out in itertools.product(allowed, repeat=count)])
                mass = mass[..., None] * step.reshape((len(allowed),) * (count + 1))
            total += mass
    return total


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The p-value; 0 if something impossible happened."""
    if bool((counts[expected < 1e-9] > 0).any()):
        return 0.0
    rare = expected < MAX_EXPECTED_IN_POOL
    seen, due = counts[~rare], expected[~rare]
    if expected[rare].sum() > 0:
        seen, due = np.append(seen, counts[rare].sum()), np.append(due, expected[rare].sum())
    statistic, freedom = float(((seen - due) ** 2 / due).sum()), len(due) - 1
    if freedom < 1:
        return 1.0
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
