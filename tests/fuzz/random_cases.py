"""Random cases from a seed: any combination may occur.

Checkpoints come from a limited stock, because writing and loading one takes longer than a case does; all else is drawn
anew for each case. Nearly all requests can be served; those that cannot must be refused when they are added.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from fuzz.cases import (
    EXACT_ON_GPU,
    IN_EIGHT_BITS,
    PLAIN_BLOCKS,
    Ask,
    BadRequest,
    Case,
    Checkpoint,
    ClosedStream,
    Fault,
    Ids,
    Raises,
    has_assistant,
)
from fuzz.random_requests import WINDOWS, drafted, random_ask
from stridelm.models import MODELS
from support.oracles import models as oracles

VARIANTS: dict[str, tuple[str, ...]] = {
    "deepseek_v3": ("plain", "all-sparse", "one-group", "queries-without-rank", "halves", "rope-yarn-mscale"),
    "gemma4_text": ("plain", "widths", "keys-as-values", "shared-with-inputs", "experts"),
    "glm4_moe": ("plain", "all-sparse", "one-group", "all-groups", "three-eighths", "rope-yarn"),
    "llama": ("plain", "one-kv-head", "all-biases", "rope-llama3", "rope-yarn", "gelu-tanh", "three-queries-a-head"),
    "mistral": ("window", "no-window"),
    "mimo": ("plain",),
    "qwen2": ("plain", "some-layers-slide"),
    "qwen3": ("tied", "untied", "some-layers-slide"),
    "qwen3_moe": ("plain", "renormalised", "some-layers-dense", "all-layers-slide"),
}
"""Those that are drawn of a family; of others, all that the oracle's tests have."""
MODULES: dict[str, tuple[str, ...]] = {
    "mimo": ("mimo1",),
    "qwen3": ("deepseek1", "deepseek2", "qwen1"),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "kimi_k2"), ("deepseek1", "deepseek2")),
}
"""Modules that checkpoints of a family may have; others have "deepseek1"."""
HEADS = (
    (),
    ("eagle3", "medusa", "model"),
    ("eagle1", "medusa", "assistant"),
    ("speculators", "assistant"),
    ("modules", "medusa"),
    ("model",),
)
STOCK = 72
"""Number of checkpoints that cases choose from."""


def random_case(seed: int, device: str = "cpu") -> Case:
    """The same seed gives the same case."""
    rng = random.Random(f"case {seed}")
    checkpoint = random_checkpoint(random.Random(f"checkpoint {rng.randrange(STOCK)}"))
    options = _engine(rng, checkpoint, device)
    lag = device != "cpu" or options["attention"] == "bounds"
    traced = not lag or rng.random() < 0.3
    shared = tuple(rng.randrange(checkpoint.vocab) for _ in range(rng.randint(4, 40)))
    context = options.get("max_model_len", 256)
    requests = tuple(_spread(rng, random_ask(rng, checkpoint, shared, context)) for _ in range(rng.randint(1, 6)))
    if rng.random() < 0.25:
        requests += _repeated(rng, checkpoint, requests)
    if any("structured_outputs" in ask.params for ask in requests):
        options.pop("skip_tokenizer_init", None)
    if options.get("drafter") == "auto":
        requests = tuple(_undrafted(ask) if ask.drafter == "auto" else ask for ask in requests)
    if rng.random() < 0.12:
        requests = _crowd(rng, requests, options)
    elif rng.random() < 0.4:
        options["num_pages"] = _tight(rng, requests, options["page_size"])
    policy = rng.randrange(100) if rng.random() < 0.5 else None
    return Case(checkpoint, options, requests, _faults(rng, checkpoint, shared, context, len(requests)), traced, policy)


def random_checkpoint(rng: random.Random) -> Checkpoint:
    """Any family, variant and heads."""
    family = rng.choice(("qwen3", *MODELS))
    variant = rng.choice(VARIANTS.get(family) or tuple(oracles.VARIANTS.get(family, ("plain",))))
    heads: tuple[str, ...] = rng.choice(HEADS)
    modules = ""
    if rng.random() < 0.3 and "modules" not in heads:
        modules = rng.choice(MODULES.get(family, ("deepseek1",)))
    cyclic = rng.random() < 0.3 and variant in ("plain", "untied", "no-window", "window")
    speaks = rng.random() < 0.3
    if speaks:
        variant = {"qwen3": "tied", "mistral": "window"}.get(family, "plain")
    heads = tuple(head for head in heads if head != "assistant" or has_assistant(family, variant))
    if speaks:
        return Checkpoint(family, variant, rng.choice((300, 313)), rng.choice((3.0, 8.0)), heads=heads, speaks=True)
    vocab, scale = rng.choice((64, 64, 11)), rng.choice((2.0, 8.0, 8.0))
    widths = _widths(rng) if family in PLAIN_BLOCKS and rng.random() < 0.5 else ()
    return Checkpoint(family, variant, vocab, scale, cyclic, modules, heads, widths=widths)


def _widths(rng: random.Random) -> Ids:
    """1 to 7 heads of a width that can be rotated, and a hidden width that they divide, as llama's config asks."""
    kv_heads = rng.choice((1, 1, 2, 3, 5, 7))
    heads = kv_heads * rng.randint(1, 7 // kv_heads)
    return heads * rng.randint(-(-5 // heads), 70 // heads), heads, kv_heads, 2 * rng.randint(1, 17), rng.randint(3, 97)


def _engine(rng: random.Random, checkpoint: Checkpoint, device: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "page_size": rng.choice((1, 2, 3, 4, 8, 16, 16)),
        "max_num_batched_tokens": rng.choice((1, 2, 3, 4, 5, 7, 9, 16, 33, 64, 256, 1024)),
        "max_num_seqs": rng.choice((1, 2, 3, 8, 8, 16)),
        "enable_prefix_caching": rng.random() < 0.7,
        "mask_token_id": checkpoint.vocab - 1 if rng.random() < 0.8 else (5, 6, 7),
    }
    if rng.random() < 0.3:
        options["max_model_len"] = rng.randint(12, 90)
    if device == "cpu":
        options["dtype"] = rng.choice(("float32", "float32", "float64", "bfloat16"))
        options["attention"] = rng.choice(("host", "host", "reference", "bounds"))
    else:
        options |= {"device": device, "dtype": rng.choice(("float32", "bfloat16", "float16")), **EXACT_ON_GPU}
        if rng.random() < 0.2:
            options["enforce_eager"] = True
    if rng.random() < 0.2:
        options["drafter"] = "auto"
    if checkpoint.speaks and rng.random() < 0.1:
        options["skip_tokenizer_init"] = True
    if rng.random() < 0.05:
        options["check_pages"] = True
        options.pop("enforce_eager", None)
    for option in IN_EIGHT_BITS:
        if rng.random() < 0.1:
            options[option] = "fp8"
    if device == "cpu" and any(option in options for option in IN_EIGHT_BITS) and rng.random() < 0.7:
        options["dtype"] = "float64"  # the oracle can tell what is right in it
    return options


def _undrafted(ask: Ask) -> Ask:
    """The request without its drafter, so that it has the engine's; a window is compared with an engine without one."""
    named = ("drafter",) if ask.rule not in WINDOWS else ()
    return replace(ask, speculation={name: value for name, value in ask.speculation.items() if name not in named})


def _repeated(rng: random.Random, checkpoint: Checkpoint, requests: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """One of the requests again, a few times, later and otherwise drafted: drafters and policies have learnt from its
    own output, under its own seed."""
    ask = rng.choice(requests)
    prompts = [
        rng.choice((ask.prompt, ask.prompt, other.prompt)) for other in rng.choices(requests, k=rng.randint(1, 3))
    ]
    again = (replace(ask, prompt=prompt, **drafted(rng, checkpoint, ask.params)) for prompt in prompts)
    return tuple(replace(each, arrival=ask.arrival + rng.randrange(30)) for each in again)


def _tight(rng: random.Random, requests: tuple[Ask, ...], page_size: int) -> int:
    """Enough pages for the longest request, or more, but not for all requests."""
    needs = [-(-(len(ask.prompt) + ask.params["max_tokens"]) // page_size) for ask in requests]
    return max(needs) + rng.randrange(1 + max(0, sum(needs) * 2 // 3 - max(needs)))


def _crowd(rng: random.Random, requests: tuple[Ask, ...], options: dict[str, Any]) -> tuple[Ask, ...]:
    """Requests with long outputs that start together, and a pool so small that they preempt one another."""
    options |= {"page_size": rng.choice((1, 2, 4)), "max_num_seqs": 8, "max_num_batched_tokens": 256}
    options["max_model_len"] = 48
    wordy = (rng.randint(14, 24) for _ in requests)
    crowd = tuple(
        replace(ask, prompt=ask.prompt[:8], params=_wordy(ask.params, most), arrival=0)
        for ask, most in zip(requests, wordy)
    )
    options["num_pages"] = (
        _tight(rng, crowd[:1], options["page_size"]) + rng.choice((20, 24, 30)) // options["page_size"]
    )
    return crowd


def _wordy(params: dict[str, Any], most: int) -> dict[str, Any]:
    least = {"min_tokens": min(params["min_tokens"], most)} if "min_tokens" in params else {}
    return {**params, **least, "max_tokens": most}


def _spread(rng: random.Random, ask: Ask) -> Ask:
    """The request with a random arrival; some are aborted later."""
    arrival = 0 if rng.random() < 0.6 else rng.randrange(14)
    abort = arrival + rng.randint(0, 12) if rng.random() < 0.12 else None
    return Ask(ask.prompt, ask.params, ask.speculation, arrival, abort, ask.sample)


def _faults(rng: random.Random, checkpoint: Checkpoint, shared: Ids, context: int, requests: int) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    if rng.random() < 0.2:
        faults.append(Raises(rng.choice(STAGES), rng.randrange(requests), rng.choice((0, 0, 1, 3, 6))))
    if rng.random() < 0.15:
        prompt, params = rng.choice(_bad(checkpoint.vocab))
        faults.append(BadRequest(rng.randrange(12), prompt, params))
    if rng.random() < 0.12:
        ask = random_ask(rng, checkpoint, shared, context)
        faults.append(ClosedStream(rng.randrange(8), ask, rng.randrange(5)))
    return tuple(faults)


STAGES = (
    *("admit to the sampling table", "admit to the drafter", "reserve", "propose", "forward", "verify", "sample"),
    *("compact", "commit", "observe", "emit"),
)
"""Stages in which an exception is planted for a request (support/doubles/faults.py)."""


def _bad(vocab: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Prompts and parameters that must be refused."""
    return [
        ((), {}),
        ((vocab,), {}),
        ((-1, 2), {}),
        (("a", 1), {}),
        (tuple(range(3)) * 4000, {}),
        ((1, 2), {"temperature": -1.0}),
        ((1, 2), {"logit_bias": {vocab: 1.0}}),
        ((1, 2), {"stop_token_ids": [vocab + 3]}),
        ((1, 2), {"bad_words_token_ids": [[1, vocab]]}),
        ((1, 2), {"min_tokens": 9, "max_tokens": 3}),
        ((1, 2), {"speculation": {"drafter": "nobody"}}),
        ((1, 2), {"speculation": {"acceptance": "hope"}}),
        ((1, 2), {"speculation": {"drafter": "ngram", "depth": 65}}),
        ((1, 2), {"speculation": {"drafter": "ngram", "acceptance": "trust"}}),
        ((1, 2), {"speculation": {"drafter": "none", "acceptance": "synthetic:2"}}),
        ((1, 2), {"speculation": {"drafter": "ngram", "confidence": 0.5}}),
        ((1, 2), {"speculation": {"drafter": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}}),
    ]
