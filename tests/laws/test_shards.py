"""A model cut over ranks emits what the whole one emits, on every rank: requests enter all of them alike, and nothing
but sums is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm.cache.layout import LatentKV
from stridelm.config import EngineConfig
from stridelm.draft import DRAFTERS
from stridelm.engine.engine import Engine
from stridelm.engine.load import load
from stridelm.models import MODELS
from stridelm.models.loader import load_config, load_model
from support.checks.identity import mixed_jobs, prompts, sampling
from support.doubles.ranks import ThreadShard, on_each_rank
from support.doubles.stand import Job, Stand, accepted
from support.doubles.tree_drafter import NAME as TREE
from support.oracles.models import VARIANTS

Write = Callable[..., Path]
WORLD = 2
WHOLE = ("mlp.router.scores.weight", "mixer.project.weight")
"""Every rank chooses the experts for itself, and has the latents, which all heads read."""


MORE = [
    ("gemma4_text", {**VARIANTS["gemma4_text"]["shared-with-inputs"], "num_global_key_value_heads": 2}),
    ("gemma4_text", VARIANTS["gemma4_text"]["experts"]),
]
"""Layers that read others' entries, and experts in one tensor."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("model", "options"), [*((model, {}) for model in MODELS), *MORE])
def test_every_rank_emits_the_same(checkpoint: Write, model: str, options: dict[str, Any], temperature: float) -> None:
    """Every drafter in one batch, prompts in chunks; in float64 the order of sums decides nothing."""
    stand = Stand(checkpoint(model, **options), "float64")
    jobs = [job for job in mixed_jobs(stand, 8, temperature, ["nothing"], seed=3) if drafter_of(job) != TREE]
    whole = stand.run(jobs, max_num_batched_tokens=33)
    assert accepted(whole)
    said, sums = on_each_rank(WORLD, lambda shard: tokens(stand, jobs, shard))
    assert said == [[output.outputs[0].token_ids for output in whole]] * WORLD
    assert sums > 0


@pytest.mark.skipif("hybrid" not in DRAFTERS, reason="no drafter that chooses is installed")
def test_every_rank_chooses_alike(checkpoint: Write) -> None:
    """Which source drafts is decided by each rank for itself: if two differed, so would the rows of their steps."""
    stand = Stand(checkpoint("qwen3"), "float64")
    kind = {"drafter": "hybrid", "depth": 5}
    jobs = [
        Job(prompt, replace(sampling(stand, prompt, 0.0, "nothing"), max_tokens=40), kind)
        for prompt in prompts(stand, 6)
    ]
    whole = stand.run(jobs, max_num_batched_tokens=33)
    sources = [output.metrics.by_source for output in whole if output.metrics is not None]
    assert {"lookup", "mtp"} == {name for counts in sources for name in counts}
    said, _ = on_each_rank(WORLD, lambda shard: tokens(stand, jobs, shard))
    assert said == [[output.outputs[0].token_ids for output in whole]] * WORLD


def drafter_of(job: Job) -> str | None:
    return None if job.speculation is None else job.speculation["drafter"]


def tokens(stand: Stand, jobs: list[Job], shard: ThreadShard) -> list[list[int]]:
    """What one rank emits for each job."""
    config = EngineConfig(
        model=str(stand.path),
        dtype=stand.dtype,
        device="cpu",
        deterministic=True,
        skip_tokenizer_init=True,
        strict=True,
        drafter="none",
        mask_token_id=stand.mask_token_id,
        drafter_model=stand.heads,
        max_num_seqs=16,
        itl_target_ms=0,  # each rank plans for itself here, and must not plan by its own clock
        num_pages=200,
        max_num_batched_tokens=33,
    )
    engine = Engine(config, load(config, shard))
    for number, job in enumerate(jobs):
        engine.add(str(number), job.prompt, job.request)
    emitted: dict[str, list[int]] = {str(number): [] for number in range(len(jobs))}
    while engine.busy:
        for output in engine.step():
            emitted[output.request.id] += output.new_token_ids
    engine.ledger.check([])
    return list(emitted.values())


@pytest.mark.parametrize("model", list(MODELS))
def test_a_rank_has_its_share(checkpoint: Write, model: str) -> None:
    """Of matrices and of KV: together they are the whole's, and nothing that is cut is held twice. Latent rows are not
    cut: all heads read them."""
    path = checkpoint(model)
    whole = load_model(path)
    parts, _ = on_each_rank(WORLD, lambda shard: load_model(path, shard=shard))
    for block, *shares in zip(whole.blocks, *(part.blocks for part in parts), strict=True):
        sizes, *of_shares = ({name: p.numel() for name, p in each.named_parameters()} for each in (block, *shares))
        matrices = [name for name, each in block.named_parameters() if each.dim() > 1 and name not in WHOLE]
        assert all(share[name] == sizes[name] // 2 for share in of_shares for name in matrices)
    entries = [sum(state.bytes_per_token(torch.float32) for state in each.layer_states) for each in (whole, *parts)]
    share = entries[0] if isinstance(whole.layer_states[0], LatentKV) else entries[0] // 2
    assert entries == [entries[0], share, share]


def test_heads_that_cannot_be_shared_out(checkpoint: Write) -> None:
    path = checkpoint("llama", num_key_value_heads=1)
    assert load_config(path).num_key_value_heads == 1
    with pytest.raises(ValueError, match="num_key_value_heads 1 cannot be cut into 2 equal shares"):
        load_model(path, shard=ThreadShard(0, WORLD))
