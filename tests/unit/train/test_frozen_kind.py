"""Heads that read a target's keys and values, for targets of any dense family: what is built serves, and what cannot be
built is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import LLM, SamplingParams
from stridelm.draft.frozen_kv.drafter import FrozenKVDrafter
from stridelm.models.layers.decoder import Decoder
from stridelm.models.loader import load_model
from stridelm.train.continuations import Continuations, Plan
from stridelm.train.frozen_kind import FrozenKVKind
from stridelm.train.head_export import export_head
from stridelm.train.settings import FrozenKVSettings
from support.oracles.models import FULL, SLIDING, VARIANTS

Checkpoint = Callable[..., Path]
SAID = Continuations(Plan(1, 24, 8, 1, 0.5, 0, "uint16", (), "", ""), torch.arange(24)[None].numpy().astype("uint16"))
SLIDES: dict[str, Any] = {"layer_types": [FULL, SLIDING], "sliding_window": 40, "use_sliding_window": True}
TARGETS: list[tuple[str, dict[str, Any], list[int]]] = [
    ("llama", VARIANTS["llama"]["rope-llama3"], [1, 1]),
    ("llama", VARIANTS["llama"]["rope-yarn"], [1, 1]),
    ("llama", VARIANTS["llama"]["gelu"], [1, 1]),
    ("glm4_moe", {"scale": 3.0, "partial_rotary_factor": 0.375, "num_key_value_heads": 1}, [1, 1]),
    ("qwen3_moe", {"scale": 3.0}, [1, 1]),
    ("qwen2", SLIDES, [1, 0]),
]
RECORD: dict[str, Any] = {
    "result": {"best": {"tokens_a_step": 1.0, "loss": 1.0}, "step": 0, "tokens": 0, "seconds": 0, "best_step": 0},
    "target": {"name": "it", "weights_sha256": ""},
    "settings": {},
    "data": {},
    "parameters": 0,
    "seed": 0,
    "hardware": {"device": "cpu"},
    "command": [],
}


@pytest.mark.parametrize(("family", "changes", "sources"), TARGETS)
def test_what_is_built_serves(
    checkpoint: Checkpoint, tmp_path: Path, family: str, changes: dict[str, Any], sources: list[int]
) -> None:
    """The exported config says how the target's keys are rotated and how wide they are, so that the head fits; and the
    output is plain decoding's."""
    path = checkpoint(family, **changes)
    target, kind = load_model(path, serving=False), FrozenKVKind(FrozenKVSettings())
    kind.check(target.spec)
    head = kind.build(target, SAID, seed=0)
    export_head(kind, head, json.loads((path / "config.json").read_text()), tmp_path, RECORD, dtype=torch.float32)
    llm = LLM(
        str(path), drafter_model=str(tmp_path), dtype="float32", skip_tokenizer_init=True, num_pages=20, strict=True
    )
    drafter = llm.engine.drafters.get("frozen_kv")
    assert isinstance(drafter, FrozenKVDrafter) and list(drafter.head.sources) == sources
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, speculation={"drafter": "none"})
    ours, theirs = (llm.generate([[5, 6, 7, 8]], each)[0].outputs[0] for each in (params, plain))
    assert ours.token_ids == theirs.token_ids
    assert ours.metrics is not None and ours.metrics.drafted


def test_a_new_head_starts_in_the_target_s_terms(checkpoint: Checkpoint) -> None:
    """As wide as the target, it gives back its logits for a state that passes through; narrower, nearly so."""
    target = load_model(checkpoint("qwen3"), serving=False)
    width, x = target.spec.hidden_size, torch.randn(50, target.spec.hidden_size)
    for share, close in ((1, 1e-3), (2, 0.9)):
        head: Any = FrozenKVKind(FrozenKVSettings(hidden=width // share)).build(target, SAID, 0)
        through = head.head(torch.nn.functional.linear(x, head.pre.weight[:, width:]))
        wanted = target.head(x)
        assert (through - wanted).norm() < close * wanted.norm()
        assert torch.equal(head.post.weight.T, head.pre.weight[:, width:])


@pytest.mark.parametrize(
    ("family", "changes", "settings", "message"),
    [
        ("mistral", {"sliding_window": 40}, {}, "all layers of the target have windows"),
        ("qwen3", {}, {"hidden": 65}, "--hidden 65 is over the target's 64"),
        ("qwen3", {}, {"heads": 3}, "--heads 3 is no multiple of the target's 2 KV heads"),
    ],
)
def test_refused(
    checkpoint: Checkpoint, family: str, changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    target: Decoder = load_model(checkpoint(family, **changes), serving=False)
    with pytest.raises(ValueError, match=message):
        FrozenKVKind(FrozenKVSettings(**settings)).check(target.spec)


def test_settings_are_sizes() -> None:
    with pytest.raises(ValueError, match="--layers, --hidden, --heads and --mlp must be at least 1"):
        FrozenKVSettings(mlp=0)
