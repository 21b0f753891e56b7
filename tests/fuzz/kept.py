"""Cases of all faults found so far, each with what went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fuzz.cases import Ask, Case, Checkpoint
from fuzz.random_requests import BYTE_IDS


@dataclass(frozen=True)
class Kept:
    name: str
    fault: str
    case: Case

    def __str__(self) -> str:
        return self.name


GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": 4, "ignore_eos": True}
SPEAKING = Checkpoint(variant="tied", vocab=320, scale=3.0, speaks=True)


def _two_rules(rule: str) -> Kept:
    """The second request got tokens of the third, or of no request."""
    return Kept(
        f"two_rules_beside_a_prompt_{rule}",
        "two rules in a step without draft rows, while a third request prefills: one request got another's rows",
        Case(
            engine={"max_num_batched_tokens": 4},
            requests=(
                Ask((5, 5), GREEDY, {"drafter": "none", "acceptance": rule}),
                Ask((9, 8), GREEDY, {"drafter": "none"}),
                Ask((3,) * 40, GREEDY, {"drafter": "none"}),
            ),
        ),
    )


def _forced(tokens: tuple[int, ...], prompt: tuple[int, ...], name: str) -> Kept:
    """Forces exactly this output of distinct tokens: each is likelier than the next, and none is allowed after a later
    one or itself."""
    params = {**GREEDY, "max_tokens": len(tokens), "logit_bias": {t: 100.0 - 2.5 * n for n, t in enumerate(tokens)}}
    params["bad_words_token_ids"] = [[last, tokens[m]] for n, last in enumerate(tokens) for m in range(n + 1)]
    return Kept(
        name,
        "ids beyond the tokenizer's last have no text; tokens around them lost theirs, or an IndexError was raised",
        Case(SPEAKING, requests=(Ask(prompt, params, {"drafter": "none"}),)),
    )


EURO = tuple(BYTE_IDS[byte] for byte in "€".encode())
PADDING = tuple(range(290, 316))
"""Ids without text, two more than the detokeniser's window holds."""
WORDS = (282, 284)
"""Tokens of several characters."""

KEPT: tuple[Kept, ...] = (
    *(_two_rules(rule) for rule in ("typical", "relaxed", "rejection", "block")),
    Kept(
        "trusted_window_behind_a_long_prompt",
        "a step with only prompt rows of a trusted request has no logits, but the rule drew from them",
        Case(
            engine={"max_num_batched_tokens": 9},
            requests=(Ask(tuple(range(20)), GREEDY, {"drafter": "mask", "depth": 2, "acceptance": "trust"}),),
        ),
    ),
    _forced((*PADDING[:24], *WORDS), EURO[:1], "words_behind_ids_without_text"),
    _forced(PADDING, EURO[:1], "ids_without_text_behind_half_a_character"),
    _forced((*PADDING, *EURO[1:], *WORDS), EURO[:1], "ids_without_text_within_a_character"),
    _forced((WORDS[0], EURO[0], *PADDING, *EURO[1:], WORDS[1]), (7,), "ids_without_text_within_an_output"),
    _forced((WORDS[0], *PADDING[:4], *EURO, *PADDING[4:], WORDS[1]), (7,), "ids_without_text_among_characters"),
    Kept(
        "a_head_that_only_keeps_up",
        "the head computed entries and no output, and the product of no rows failed the step",
        Case(
            Checkpoint("kimi_k2", heads=("modules", "medusa")),
            engine={"attention": "bounds", "drafter": "auto"},
            policy=95,
            requests=(
                Ask(
                    (12, 32, 39, 3, 9, 52, 39, 14, 51, 22, 21, 32, 2, 3),
                    {"max_tokens": 10, "seed": -2689137506029305202},
                ),
            ),
        ),
    ),
)
