"""Random requests: prompts, sampling parameters, drafters and acceptance rules."""

from __future__ import annotations

import random
from typing import Any

from fuzz.cases import Ask, Checkpoint, Ids
from fuzz.endings import byte_of_character

TREES = (((0,),), ((0,), (1,)), ((0,), (1,), (0, 0)), ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
BYTE_IDS = {byte: 3 + n for n, (_, byte) in enumerate(sorted(byte_of_character().items()))}
"""Byte -> id in the tokenizer of support/checkpoints/speaking.py: after three special tokens, in character order."""
CHARACTERS = ("a", "b", "c", " ", "é", "€", "😀", "ß")
GRAMMARS: dict[str, tuple[Any, ...]] = {
    "regex": (
        *(
            "[ab]+",
            "(ab|ba)*c",
            "a{2,4}b?",
            r"[0-9]{1,3}(\.[0-9]+)?",
            "(a|b)(c|d)(e|f)",
            "x*y*z*",
            "[a-c ]{3,9}",
            "(yes|no|maybe)",
        ),
        *(
            r"-?(0|[1-9][0-9]*)",
            "[A-Za-z0-9_]+ [A-Za-z0-9_]+",
            "(foo)?bar",
            "(a+b+)+",
            "[A-F0-9]{4}",
            "a|ab|abc",
            "((x|y)z){2}",
            "for [A-Za-z0-9_]+ in",
        ),
        *(
            "a?a?a?aa",
            r"[\-+]?[0-9]",
            r"def [a-z]+\(",
            "(0|1)+",
            "(a(b(c)?)?)+",
            "x{12}",
            "(ax|ay|b)*",
            "[A-Za-z0-9_]{1,5}",
        ),
    ),
    "choice": (
        ["yes", "no"],
        ["a", "ab", "abc"],
        ["é€", "éa", "b"],
        ["for name", "for x"],
        ["x"],
        ["aaaaaaaaa", "aaab"],
    ),
    "json": (["a", "b"], [1, 12, 123], [True, None], ["x y", 2], [1.5, -2]),
}
"""Of structured outputs; of JSON schemas, the values of an enum."""
WINDOWS = ("trust", "synthetic-trust")
TREE = "random_tree"
"""The tests' random tree drafter, which knows plain decoding's output (tests/support/doubles/tree_drafter.py)."""


def random_ask(rng: random.Random, checkpoint: Checkpoint, shared: Ids, context: int) -> Ask:
    """A request of any kind. shared: a prefix that several requests have; context: length of prompt plus output."""
    prompt = random_prompt(rng, checkpoint, shared)[: max(1, context - rng.randint(1, 8))]
    params = random_params(rng, checkpoint)
    if checkpoint.speaks and rng.random() < 0.3:
        _follow(rng, params)
    elif checkpoint.speaks and rng.random() < 0.7:
        prompt = _speak(rng, checkpoint, prompt, params)
    elif rng.random() < 0.4:
        _narrow(rng, checkpoint, params)
    sample = rng.choice((0, 0, 0, 1, 3))
    return Ask(prompt, sample=sample, **drafted(rng, checkpoint, params))


def drafted(rng: random.Random, checkpoint: Checkpoint, params: dict[str, Any]) -> dict[str, Any]:
    """The fields `params` and `speculation` of a request: a target rate needs a depth that is chosen."""
    speculation = random_speculation(rng, checkpoint)
    params = {name: value for name, value in params.items() if name != "target_tps"}
    if speculation.get("depth") == "auto" and rng.random() < 0.3:
        params["target_tps"] = rng.choice((0.1, 50.0, 1e6))
    return {"params": params, "speculation": speculation}


def random_prompt(rng: random.Random, checkpoint: Checkpoint, shared: Ids) -> Ids:
    def ids(count: int) -> Ids:
        return tuple(rng.randrange(checkpoint.vocab) for _ in range(count))

    kind = rng.randrange(6)
    if kind == 0:
        return ids(rng.randint(1, 3))
    if kind == 1:
        return ids(rng.randint(30, 70))
    if kind == 2:
        return (ids(rng.randint(1, 6)) * 12)[: rng.randint(4, 30)]
    if kind == 3:
        return shared[: rng.randint(1, len(shared))] + ids(rng.randrange(4))
    if kind == 4:
        return shared
    return ids(rng.randint(2, 24))


def random_params(rng: random.Random, checkpoint: Checkpoint) -> dict[str, Any]:
    vocab = checkpoint.vocab
    params: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.0, 0.4, 0.8, 1.0, 1.0, 1.7)),
        "max_tokens": rng.randint(1, 14) if rng.random() < 0.92 else rng.randint(64, 90),
        "seed": rng.choice((rng.randrange(100), rng.randrange(-(2**63), 2**63))),
        "ignore_eos": rng.random() < 0.7,
    }

    def some(most: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randint(1, most))]

    extras: dict[str, Any] = {
        "top_k": rng.choice((1, 2, 5, vocab - 1, vocab, -1)),
        "top_p": rng.choice((0.1, 0.5, 0.8, 0.95, 0.999)),
        "min_p": rng.choice((0.01, 0.1, 0.5, 1.0)),
        "repetition_penalty": rng.choice((0.7, 1.1, 1.4, 3.0)),
        "presence_penalty": rng.choice((-1.0, 0.5, 2.0)),
        "frequency_penalty": rng.choice((-1.0, 0.4, 2.0)),
        "logit_bias": {token: rng.choice((-100.0, -5.0, 2.0, 4.0)) for token in [*some(4), 2]},
        "bad_words_token_ids": [some(3) for _ in range(rng.randint(1, 12))],
        "stop_token_ids": some(6),
        "min_tokens": rng.randint(1, params["max_tokens"]),
        "logprobs": rng.choice((0, 1, 3, vocab)),
        "prompt_logprobs": rng.choice((0, 2)),
        "return_hidden_states": True,
        "cache_salt": rng.choice(("mine", "yours")),
        "priority": rng.randint(-1, 2),
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    often = rng.choice((0.0, 0.1, 0.1, 0.3))
    params |= {name: value for name, value in extras.items() if rng.random() < often}
    params |= {"logprobs": min(params["logprobs"], 64)} if "logprobs" in params else {}
    if "logprobs" in params and rng.random() < 0.5:
        params["logprob_token_ids"] = some(5)
    return params


def _narrow(rng: random.Random, checkpoint: Checkpoint, params: dict[str, Any]) -> None:
    """Restrict the output to a few tokens, and apply other parameters to these, so that they change the output."""
    tokens = rng.sample(range(checkpoint.vocab), rng.randint(3, 6))
    params["logit_bias"] = {token: rng.choice((30.0, 31.0, 33.0)) for token in tokens}
    params["temperature"] = rng.choice((0.0, 1.0, 2.0, 4.0))
    if rng.random() < 0.4:
        params["bad_words_token_ids"] = [rng.choices(tokens, k=rng.randint(2, 3)) for _ in range(rng.randint(1, 9))]
    if rng.random() < 0.4:
        params["stop_token_ids"] = tokens[:1]
        params["min_tokens"] = rng.randint(1, params["max_tokens"])
    if rng.random() < 0.3:
        params["frequency_penalty"] = rng.choice((1.0, 2.0))


def _speak(rng: random.Random, checkpoint: Checkpoint, prompt: Ids, params: dict[str, Any]) -> Ids:
    """Make the output spell characters, whole and broken, among ids that have no text; the prompt may end in one."""
    alphabet = rng.sample(CHARACTERS, 4)
    tokens = [BYTE_IDS[byte] for character in alphabet for byte in character.encode()]
    tokens += [rng.randrange(290, checkpoint.vocab) for _ in range(rng.randrange(3))]
    tokens += [rng.randrange(259, 290) for _ in range(rng.randrange(3))]
    if rng.random() < 0.3:
        tokens.append(rng.choice((0, 1, 2)))
    if rng.random() < 0.8:
        params["logit_bias"] = {token: 60.0 + rng.randrange(9) for token in tokens}
        params["temperature"] = rng.choice((1.0, 4.0))
        if rng.random() < 0.15:  # so many ids without text that they fill the detokeniser's window
            params["logit_bias"] |= dict.fromkeys(range(290, checkpoint.vocab), 68.0)
            params |= {"max_tokens": 40, "frequency_penalty": rng.choice((0.0, 2.0))}
    if rng.random() < 0.5:
        params["stop"] = ["".join(rng.choices(alphabet, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.5:
            params["min_tokens"] = rng.randint(1, min(6, params["max_tokens"]))
    if rng.random() < 0.2:
        params["bad_words"] = ["".join(rng.choices(alphabet, k=rng.randint(1, 2))).strip() or "a"]
    if rng.random() < 0.5:
        whole = rng.choice(CHARACTERS).encode()
        prompt = (*prompt, *(BYTE_IDS[byte] for byte in whole[: rng.randint(1, len(whole))]))
    return prompt


def _follow(rng: random.Random, params: dict[str, Any]) -> None:
    """Give the output a grammar, and no other parameter that could leave no token."""
    for name in ("bad_words_token_ids", "stop_token_ids", "min_tokens", "logprob_token_ids"):
        params.pop(name, None)
    kind = rng.choice(sorted(GRAMMARS))
    asked = rng.choice(GRAMMARS[kind])
    params["structured_outputs"] = {kind: {"enum": asked} if kind == "json" else asked}
    params |= {"ignore_eos": False, "temperature": rng.choice((0.0, 1.0, 4.0))}
    if rng.random() < 0.7:  # what may come is about as likely as the end
        params["logit_bias"] = {BYTE_IDS[byte]: 40.0 for byte in b"abcxyz0123 "} | {2: rng.choice((30.0, 38.0, 44.0))}


def drafters_of(checkpoint: Checkpoint) -> list[str]:
    """Drafters that can draft for it."""
    of_head = {"modules": "mtp", "eagle1": "eagle", "eagle3": "eagle", "speculators": "eagle", "assistant": "frozen_kv"}
    own = [of_head.get(head, head) for head in checkpoint.heads] + (["mtp"] if checkpoint.modules else [])
    # The first head or module is what `auto` would choose; it chooses between that and lookup if it has KV.
    chooses = ["hybrid", "hybrid"] if {*own[:1]} & {"mtp", "eagle", "model"} and "medusa" not in own else []
    return ["none", "ngram", "suffix", "mask", "auto", TREE, *chooses, *own, *own]


def random_speculation(rng: random.Random, checkpoint: Checkpoint) -> dict[str, Any]:
    drafter = rng.choice(drafters_of(checkpoint))
    chosen: dict[str, Any] = {"drafter": drafter}
    if drafter != "none" and rng.random() < 0.8:
        chosen["depth"] = rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 6, "auto", "auto", "auto"))
    rule = rng.choice(("exact",) * 6 + ("rejection", "block", "typical", "relaxed", "synthetic", "trust"))
    if drafter == "mask":
        rule = rng.choice(("exact", "exact", "trust", "synthetic-trust", rule))
    if rule in WINDOWS and chosen.get("depth") == "auto":  # windows are whole
        del chosen["depth"]
    chosen |= _rule(rng, rule, chosen.get("depth"))
    chosen |= _OPTIONS.get(drafter, lambda rng, chosen: {})(rng, chosen)
    return chosen


def _rule(rng: random.Random, rule: str, depth: int | str | None) -> dict[str, Any]:
    if rule == "exact":
        return {}
    options: dict[str, Any] = {"acceptance": rule}
    if rule.startswith("synthetic"):
        options["acceptance"] = (
            f"{rule}:{rng.choice((1.0, 1.5, 2.0, 1.0 + (depth if isinstance(depth, int) and depth else 1)))}"
        )
    if rule == "trust" and rng.random() < 0.5:
        options["confidence"] = rng.choice((0.02, 0.1, 0.3, 0.9))
    if rule == "typical" and rng.random() < 0.5:
        options["posterior_threshold"] = rng.choice((0.0, 0.01, 0.3, 0.9))
        options["posterior_alpha"] = rng.choice((0.0, 0.5, 2.0))
    if rule == "relaxed" and rng.random() < 0.5:
        options["relaxed_topk"] = rng.choice((1, 1, 2, 3, 30, 500))
        options["relaxed_delta"] = rng.choice((0.0, 0.1, 1.0))
    return options


def _lookup(rng: random.Random, chosen: dict[str, Any]) -> dict[str, Any]:
    options = {"prompt_lookup_min": rng.choice((1, 1, 2, 3))} if rng.random() < 0.7 else {}
    return options | ({"prompt_lookup_max": rng.randint(3, 9)} if rng.random() < 0.3 else {})


def _suffix(rng: random.Random, chosen: dict[str, Any]) -> dict[str, Any]:
    options = {"suffix_decoding_max_spec_factor": rng.choice((0.5, 1.0, 4.0))} if rng.random() < 0.5 else {}
    return options | ({"suffix_decoding_min_token_prob": rng.choice((0.0, 0.3))} if rng.random() < 0.5 else {})


def _method(rng: random.Random, chosen: dict[str, Any]) -> dict[str, Any]:
    return {"draft_sample_method": rng.choice(("greedy", "probabilistic"))} if rng.random() < 0.4 else {}


def _head(rng: random.Random, chosen: dict[str, Any]) -> dict[str, Any]:
    """Chains, with or without lookup, and trees of both kinds."""
    options, kind = _method(rng, chosen), rng.randrange(5)
    if chosen.get("acceptance") == "block":
        kind = 0
    if kind == 1:
        tree = rng.choice(TREES)
        options["token_tree"] = tree
        if chosen.get("depth") != "auto":
            chosen["depth"] = min(chosen.get("depth", 9), max(map(len, tree)))
    elif kind == 2:
        options["draft_topk"] = rng.randint(2, 4)
        chosen["depth"] = rng.choice((1, 2, 3, "auto"))
        if chosen.get("acceptance", "").startswith("synthetic"):
            chosen["acceptance"] = "synthetic:1.5"
    elif kind == 3:
        options |= _lookup(rng, chosen)
    return options


_OPTIONS = {
    "ngram": _lookup,
    "suffix": _suffix,
    "mask": lambda rng, chosen: _method(rng, chosen) if "acceptance" not in chosen else {},
    "mtp": _head,
    "eagle": _head,
    "frozen_kv": _head,
    "medusa": _head,
    "model": lambda rng, chosen: _method(rng, chosen) | (_lookup(rng, chosen) if rng.random() < 0.3 else {}),
}
