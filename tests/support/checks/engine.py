"""An engine on an attention backend that does not promise equal bits, against one on the reference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from stridelm import SamplingParams
from support.doubles.stand import Job, Stand
from support.doubles.tree_drafter import NAME as TREE
from support.doubles.tree_drafter import RandomTreeDrafter, registered

CLOSE = 0.1
"""Two bfloat16 models whose attention rounds at different places differ by 0.02; if the window of one is too wide by
one, by 0.4."""
PROMPT, OUTPUT = 90, 12


def check_backend(path: Path, backend: str, device: str) -> None:
    """Log-probabilities of a prompt in chunks, and of the tokens decoded after it, are the reference's for as long as
    both emit the same tokens; chains and trees run in one batch."""
    stand = Stand(path, "bfloat16", device)
    rng = random.Random(0)
    prompt = [rng.randrange(stand.target.vocab_size) for _ in range(PROMPT)]
    options: dict[str, Any] = {"deterministic": False, "max_num_batched_tokens": 80}
    ours, theirs = (logprobs(stand, prompt, attention=name, **options) for name in (backend, "reference"))
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a[0] != b[0]), len(ours))
    assert same >= PROMPT - 1 and min(value for _, value in theirs) < -3
    assert max(abs(a[1] - b[1]) for a, b in zip(ours[:same], theirs)) <= CLOSE
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    with registered():
        RandomTreeDrafter.teach(prompt, None, 0, [token for token, _ in ours[PROMPT - 1 :]])
        jobs = [Job(prompt, params, {"drafter": drafter}) for drafter in ("none", "ngram", TREE)]
        outputs = stand.run(jobs, attention=backend, **options)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [OUTPUT] * len(jobs)


def logprobs(stand: Stand, prompt: list[int], **options: Any) -> list[tuple[int, float]]:
    """(token, its log-probability) of all tokens but the first, with a greedy continuation."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    output = stand.run([Job(prompt, params)], **options)[0]
    scored: list[Any] = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
    tokens = [*prompt[1:], *output.outputs[0].token_ids]
    return [(token, at[token].logprob) for token, at in zip(tokens, scored, strict=True)]
