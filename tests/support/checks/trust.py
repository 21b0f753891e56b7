"""Checks of trusted mask-token decoding against the naive reference, for the CPU's and the GPU's tests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from transformers import AutoModelForCausalLM

from reference_mask import Decoded, decode
from stridelm import SamplingParams
from support.checkpoints.models import EOS
from support.doubles.stand import Job, Stand

WINDOWS = (1, 2, 3, 4, 8)
THRESHOLDS = (0.5, 0.7, 0.9, 0.95)
LENGTH = 19
MARGIN = 3e-5
"""Closer decisions could differ between two libraries, whose logits agree to 1e-5 or better; no seed of the tests has
one."""


def load(stand: Stand) -> Any:
    """The checkpoint in transformers, in float32 on the CPU."""
    return AutoModelForCausalLM.from_pretrained(stand.path, attn_implementation="eager").eval()


def job(prompt: list[int], params: SamplingParams, k: int, tau: float | None = None) -> Job:
    kind: dict[str, Any] = {"drafter": "mask", "depth": k - 1, "acceptance": "trust"}
    return Job(prompt, params, kind if tau is None else {**kind, "confidence": tau})


def random_prompts(count: int, seed: int, vocab: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def expected(stand: Stand, model: Any, job: Job, sample_index: int = 0) -> Decoded:
    """The reference's output for a job. Asserts that no decision was too close to call."""
    kind = job.speculation or {}
    masks = stand.mask_token_id
    done = decode(
        model,
        job.prompt,
        job.params,
        kind["depth"] + 1,
        (masks,) if isinstance(masks, int) else masks,
        tau=kind.get("confidence"),
        eos_ids=(EOS,),
        sample_index=sample_index,
    )
    assert done.margin > MARGIN, f"too close to call ({done.margin:.1e}): choose another seed"
    return done


def check_trust(stand: Stand, model: Any, jobs: list[Job], **options: Any) -> list[Decoded]:
    """The engine emits the reference's tokens, in as many steps, all jobs in one batch."""
    outputs = stand.run(jobs, **options)
    references = []
    for one, output in zip(jobs, outputs):
        for sample in output.outputs:
            wanted = expected(stand, model, one, sample.index)
            label = (one.speculation, one.params)
            assert (sample.token_ids, sample.finish_reason) == (wanted.tokens, wanted.finish_reason), label
            assert sample.metrics is not None and sample.metrics.steps == wanted.steps, label
            references.append(wanted)
    return references


def stopping(stand: Stand, model: Any, one: Job, place: int) -> Job:
    """The same job with a stop token that it emits at `place` or before."""
    said = expected(stand, model, one).tokens
    return Job(one.prompt, replace(one.params, stop_token_ids=[said[place]]), one.speculation)
