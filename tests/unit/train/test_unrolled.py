"""A head's logits in training are those it has in serving, and none of them depends on the future."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import LLM, SamplingParams
from stridelm.batch import Draft, States
from stridelm.draft import DRAFTERS
from stridelm.draft.base import Group
from stridelm.draft.heads import DraftHead
from stridelm.models.layers.decoder import Decoder
from stridelm.models.loader import load_model
from stridelm.train.continuations import Continuations, Plan
from stridelm.train.frozen_entries import StatesAndEntries, entries_mask
from stridelm.train.frozen_kind import FrozenKVKind
from stridelm.train.head_kinds import Eagle3Kind, HeadKind, MtpKind
from stridelm.train.settings import EagleSettings, FrozenKVSettings, MtpSettings
from stridelm.train.unrolled import chain_mask
from stridelm.train.weights import write_weights

DEPTH, VOCAB = 4, 64
KINDS = {
    "mtp": lambda: MtpKind(MtpSettings()),
    "eagle3": lambda: Eagle3Kind(EagleSettings(draft_vocab_size=40, mlp=48, kv_heads=1)),
    "frozen_kv": lambda: FrozenKVKind(FrozenKVSettings(heads=2)),
}
PLAN = Plan(1, 24, 8, 1, 0.5, 0, "uint16", (), "", "")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> HeadKind:
    return KINDS[request.param]()


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3", num_hidden_layers=3, rope_parameters={"rope_type": "default", "rope_theta": 500.0})


@pytest.fixture(scope="module")
def target(path: Path) -> Decoder:
    return load_model(path, serving=False).requires_grad_(False)


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def head(kind: HeadKind, target: Decoder, rows: torch.Tensor) -> DraftHead:
    """A head as if trained: what training initialises to zero is random too."""
    head = kind.build(target, Continuations(PLAN, rows.numpy().astype("uint16")), seed=0).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for parameter in head.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return head


@torch.no_grad()
def said(
    kind: HeadKind, head: DraftHead, states: States, rows: torch.Tensor, first: int, depth: int = DEPTH
) -> list[torch.Tensor]:
    """[B, S, V] logits at each depth."""
    outputs = kind.unrolled(head, states, rows, first, depth)
    return [head.logits(x.flatten(0, 1)).unflatten(0, x.shape[:2]) for x in outputs]


def test_training_says_what_serving_drafts(
    kind: HeadKind, target: Decoder, head: DraftHead, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every draft of a request, with its guesses as the text: the same logits at every depth."""
    write_weights(kind.tensors(head, torch.float32), tmp_path / "model.safetensors")
    config = kind.config(head, json.loads((path / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafts: list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = []
    drafter: Any = DRAFTERS.get(kind.drafter)
    propose = drafter.propose

    def watched(self: Any, group: Group) -> Draft:
        logits: list[torch.Tensor] = []
        say = self.head.logits

        def heard(hidden: torch.Tensor, *module: int) -> torch.Tensor:
            logits.append(say(hidden, *module))
            return logits[-1].clone()

        with monkeypatch.context() as patch:
            patch.setattr(self.head, "logits", heard)
            draft = propose(self, group)
        slot = int(group.slots[0])
        if draft.valid.any():  # not before the drafter has caught up with the prompt
            drafts.append((group.table.tokens[slot, : int(group.table.known[slot])].clone(), draft.tokens[0], logits))
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    options = {"dtype": "float32", "skip_tokenizer_init": True, "num_pages": 16, "strict": True}
    llm = LLM(str(path), drafter=kind.drafter, drafter_model=str(tmp_path), depth=DEPTH, **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm.generate([list(range(5, 14))], params)
    assert sum(len(served) == DEPTH for _, _, served in drafts) > 4
    for known, guesses, served in drafts:  # the last ones are cut to the tokens that are left
        text = torch.cat((known, guesses))[None]
        trained = said(kind, head, kind.states(head, target, text), text, len(known) - 2, len(served))
        for ours, theirs in zip(trained, served, strict=True):
            torch.testing.assert_close(ours[0, 0], theirs[0], atol=1e-4, rtol=1e-4)


def test_chains_all_at_once_are_chains_one_by_one(
    kind: HeadKind, target: Decoder, head: DraftHead, rows: torch.Tensor
) -> None:
    states = kind.states(head, target, rows)
    together = said(kind, head, states, rows, 6)
    for start in range(6, 24 - 1 - DEPTH):
        width = start + DEPTH + 2
        short = rows[:, :width]
        alone = said(kind, head, kind.states(head, target, short), short, start)
        for depth in range(DEPTH):
            torch.testing.assert_close(together[depth][:, start - 6], alone[depth][:, 0], atol=1e-4, rtol=1e-4)


def test_no_future_leaks(kind: HeadKind, target: Decoder, head: DraftHead, rows: torch.Tensor) -> None:
    """A guess of token t depends on the tokens before t, and on the target's states only up to its chain's start."""
    first, changed = 6, 14
    states = kind.states(head, target, rows)
    before = said(kind, head, states, rows, first)
    other = rows.clone()
    other[:, changed:] = (other[:, changed:] + 1) % VOCAB
    after = said(kind, head, kind.states(head, target, other), other, first)
    late = torch.arange(24).repeat(2) >= changed
    final = torch.where(late[:, None], states.final + 1, states.final)
    inputs = {layer: torch.where(late[:, None], x + 1, x) for layer, x in states.inputs.items()}
    moved = replace(states, final=final, inputs=inputs)
    if isinstance(moved, StatesAndEntries):
        later = (torch.arange(24) >= changed)[:, None]
        entries = {
            layer: (torch.where(later, keys + 1, keys), torch.where(later, values + 1, values))
            for layer, (keys, values) in moved.entries.items()
        }
        moved = replace(moved, entries=entries)
    elsewhere = said(kind, head, moved, rows, first)
    for depth in range(1, DEPTH + 1):
        blind = changed - first - depth  # the number of the first start whose guess has read a changed token
        assert torch.equal(after[depth - 1][:, :blind], before[depth - 1][:, :blind])
        assert not torch.equal(after[depth - 1][:, blind], before[depth - 1][:, blind])
        unseeing = changed - first
        assert torch.equal(elsewhere[depth - 1][:, :unseeing], before[depth - 1][:, :unseeing])
        if before[depth - 1].shape[1] > unseeing:
            assert not torch.equal(elsewhere[depth - 1][:, unseeing], before[depth - 1][:, unseeing])


def test_the_mask_is_the_one_drawn_in_the_docstring() -> None:
    mask = chain_mask(2, 3, 2, torch.device("cpu"))
    assert mask[1].tolist() == [c == "1" for c in "11110010010"]


def test_every_row_of_a_chain_sees_the_same_entries() -> None:
    assert entries_mask(2, 3, torch.device("cpu")).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1] * 5]


def test_only_entries_matter_beside_a_chain_s_own_state(path: Path, rows: torch.Tensor) -> None:
    """The head does read them: with others, its guesses are others."""
    target, kind = load_model(path, serving=False).requires_grad_(False), KINDS["frozen_kv"]()
    head = kind.build(target, Continuations(PLAN, rows.numpy().astype("uint16")), seed=0)
    states = kind.states(head, target, rows)
    assert isinstance(states, StatesAndEntries)
    none = {layer: (keys, torch.zeros_like(values)) for layer, (keys, values) in states.entries.items()}
    for ours, theirs in zip(
        said(kind, head, states, rows, 6), said(kind, head, replace(states, entries=none), rows, 6), strict=True
    ):
        assert not torch.allclose(ours, theirs, atol=1e-4)
