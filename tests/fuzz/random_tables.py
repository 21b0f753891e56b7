"""Random tables for fuzz.distribution: any drafter that a lossless rule can decide, on any checkpoint."""

from __future__ import annotations

import random
from typing import Any

from fuzz.cases import Checkpoint, has_assistant
from fuzz.distribution import HEADS, Table

DRAFTERS: dict[str, tuple[dict[str, Any], ...]] = {
    "hybrid": ({}, {"depth": "auto"}),
    "ngram": ({"prompt_lookup_min": 1}, {"prompt_lookup_min": 1, "depth": "auto"}, {}),
    "suffix": ({"depth": 1}, {"suffix_decoding_min_token_prob": 0.0}, {"suffix_decoding_max_spec_factor": 4.0}),
    "random_tree": ({"depth": 1}, {"depth": 3}, {"depth": 5}),
    "mask": ({"depth": 1}, {"depth": "auto"}, {}),
    "mtp": ({}, {"depth": 1}, {"depth": "auto"}, {"draft_sample_method": "greedy"}, {"draft_topk": 2, "depth": 2}),
    "eagle": (
        {},
        {"draft_topk": 3, "depth": 2},
        {"draft_topk": 2, "depth": "auto"},
        {"token_tree": ((0,), (1,), (0, 0))},
        {"prompt_lookup_min": 1},
    ),
    "frozen_kv": (
        {},
        {"depth": 1},
        {"depth": "auto"},
        {"draft_topk": 2, "depth": 2},
        {"token_tree": ((0,), (1,), (0, 0))},
    ),
    "medusa": (
        {},
        {"depth": "auto"},
        {"token_tree": ((0,), (1,), (2,), (0, 0), (1, 0))},
        {"draft_sample_method": "greedy"},
    ),
    "model": ({}, {"depth": 1}, {"depth": "auto"}, {"draft_sample_method": "greedy"}, {"prompt_lookup_min": 1}),
}
FAMILIES = ("qwen3", "llama", "mistral", "qwen3_moe", "deepseek_v3", "glm4_moe")
FOR_ANY = tuple(name for name in HEADS if name != "assistant")
BRANCHING = ("draft_topk", "token_tree")
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 2},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.6, "frequency_penalty": -0.5},
    {"temperature": 0.5},
    {"temperature": 2.0},
)


def random_table(seed: int, device: str = "cpu") -> Table:
    """The same seed gives the same table."""
    rng = random.Random(f"table {seed}")
    rule, drafter = rng.choice(("rejection", "block")), rng.choice(sorted(DRAFTERS))
    if rule == "block" and drafter in ("random_tree", "suffix"):  # they draft trees
        rule = "rejection"
    options = rng.choice(DRAFTERS[drafter])
    if rule == "block":
        options = {name: value for name, value in options.items() if name not in BRANCHING}
    family = rng.choice([name for name in FAMILIES if drafter != "frozen_kv" or has_assistant(name, "")])
    heads: tuple[str, ...] = FOR_ANY if rng.random() < 0.5 else ("eagle3", "medusa", "model", "modules")
    if drafter == "frozen_kv":
        heads = ("assistant",)
    if drafter == "hybrid":
        heads = ("modules",)
    learns = drafter in ("suffix", "ngram", "hybrid") or options.get("depth") == "auto"
    return Table(
        {"drafter": drafter, "acceptance": rule, **options},
        Checkpoint(family, "", scale=rng.choice((5.0, 8.0)), heads=heads),
        requests=3000,
        rounds=rng.choice((2, 4)) if learns else 1,
        params=rng.choice(PARAMS),
        device=device,
        seed=seed,
    )
