"""Every output of three tokens over a tiny vocabulary, probability by probability.

One step of the engine with a draft tree of all first and all second tokens runs a row for every possible history. The
distribution that the verifier would draw from at each row is compared with transformers' logits and naive processors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stridelm import LLM, SamplingParams
from stridelm.batch import CANDIDATE, Draft, ForwardBatch, Verdict
from stridelm.draft.base import Drafter, Group, TreeShape
from stridelm.params import Speculation
from stridelm.sample.rows import Rows
from stridelm.verify.paths import DraftPaths
from support.doubles.stand import Stand
from support.doubles.tree_drafter import registered
from support.oracles.sampling import probabilities

Path = tuple[int, ...]


class EveryContinuation(Drafter):
    """All first tokens, and all second tokens after each of them: V + V * V rows."""

    name = "every_continuation"
    default_depth = 1

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        size = self.target.vocab_size
        return (0, size + size * size)

    def propose(self, group: Group) -> Draft:
        size, device = self.target.vocab_size, group.slots.device
        parents = [-1] * size + [first for first in range(size) for _ in range(size)]
        tokens = torch.tensor([*range(size), *(second for _ in range(size) for second in range(size))], device=device)
        shape = TreeShape.of(parents, [CANDIDATE] * len(parents), device)
        rows = tokens.expand(len(group.spans), -1).contiguous()
        return shape.draft(rows, torch.ones_like(rows, dtype=torch.bool))


@contextmanager
def overheard(llm: LLM) -> Iterator[dict[Path, torch.Tensor]]:
    """What the verifier draws from at each row of the first deciding step: path after the prompt -> probabilities."""
    heard: dict[Path, torch.Tensor] = {}
    verifier = llm.engine.device.verifier
    verify = verifier.verify

    def listening(
        batch: ForwardBatch, draft: Draft, logits_MV: torch.Tensor, paths: DraftPaths | None = None
    ) -> Verdict:
        if not heard:
            heard.update(_probabilities(llm, batch, draft, logits_MV))
        return verify(batch, draft, logits_MV, paths)

    verifier.verify = listening  # type: ignore[method-assign]
    try:
        yield heard
    finally:
        del verifier.verify


def _probabilities(llm: LLM, batch: ForwardBatch, draft: Draft, logits: torch.Tensor) -> dict[Path, torch.Tensor]:
    slot = batch.spans[0].request.slot
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    paths = [_path(row, tokens, parents) for row in batch.decision_draft.tolist()]
    width = max(map(len, paths))
    extra = torch.tensor([[*path, *[-1] * (width - len(path))] for path in paths], device=logits.device)
    known = llm.engine.tokens.known[slot]
    lengths = torch.tensor([len(path) for path in paths], device=logits.device)
    rows = Rows(torch.full_like(lengths, slot), known + lengths, extra)
    sampler = llm.engine.drafters._sampler
    processed = sampler.processed(logits, rows, [slot] * len(paths)).double()
    return dict(zip(paths, processed.softmax(-1).cpu()))


def _path(row: int, tokens: list[int], parents: list[int]) -> Path:
    return () if row < 0 else (*_path(parents[row], tokens, parents), tokens[row])


@torch.inference_mode()
def check_enumeration(stand: Stand, model: Any, prompt: list[int], params: SamplingParams) -> None:
    """The probability of each output of three tokens is the product of its conditional ones, from the definition."""
    with registered(EveryContinuation):
        llm = stand.llm(drafter="every_continuation", max_num_seqs=1)
        with overheard(llm) as heard:
            llm.generate(prompt, params)
    vocab = stand.target.vocab_size
    histories = [path for n in range(3) for path in itertools.product(range(vocab), repeat=n)]
    assert sorted(heard) == sorted(histories)
    true = {path: _true(model, prompt, path, params) for path in histories}
    total = 0.0
    for said in itertools.product(range(vocab), repeat=3):
        ours = theirs = 1.0
        for n, token in enumerate(said):
            ours *= float(heard[said[:n]][token])
            theirs *= float(true[said[:n]][token])
        assert abs(ours - theirs) <= 1e-6 + 1e-4 * theirs, (said, ours, theirs)
        total += ours
    assert abs(total - 1) < 1e-6


def _true(model: Any, prompt: list[int], path: Path, params: SamplingParams) -> torch.Tensor:
    logits = model(torch.tensor([[*prompt, *path]])).logits[0, -1]
    return probabilities(logits, prompt, path, params, params.stop_token_ids or ())
