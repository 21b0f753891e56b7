"""With depths that are chosen while requests run, every request emits what plain decoding emits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stridelm.draft import DRAFTERS
from stridelm.schedule import Adaptive
from support.checks.identity import check_identity, prompts, sampling
from support.doubles.bounds import LaggingStand, bounds_registered
from support.doubles.stand import Job, Stand

DRAFTING = [name for name in DRAFTERS if name != "none"]


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def stands(path: Path) -> Iterator[dict[str, Stand]]:
    with bounds_registered():
        yield {"at once": Stand(path, "float32"), "in flight": LaggingStand(path, "float32")}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", ["at once", "in flight"])
@pytest.mark.parametrize("drafter", DRAFTING)
def test_identity(stands: dict[str, Stand], way: str, drafter: str, temperature: float) -> None:
    """Choices follow measured times, so they differ from run to run. Some of the requests keep a depth of their own."""
    stand = stands[way]
    reason = DRAFTERS.get(drafter).why_not(stand.target)
    if reason:
        pytest.skip(f"{drafter}: {reason}")
    jobs = [
        Job(
            prompt,
            sampling(stand, prompt, temperature, "nothing"),
            {"drafter": drafter, "depth": 2} if i == 4 else None,
        )
        for i, prompt in enumerate(prompts(stand, 6))
    ]
    llm = stand.llm(drafter=drafter, depth="auto", page_size=4, max_num_seqs=4)
    check_identity(stand, jobs, llm=llm)
    policy = llm.engine.steps.planner.depths
    assert isinstance(policy, Adaptive) and policy._loads, "nothing was chosen"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"drafter": "none"}, "drafter"),
        ({"drafter": "mask", "acceptance": "trust"}, "acceptance"),
        ({"depth": "x"}, "depth"),
    ],
    ids=str,
)
def test_refused_where_it_would_do_nothing(stands: dict[str, Stand], options: dict[str, str], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        stands["at once"].llm(**{"depth": "auto", **options})
