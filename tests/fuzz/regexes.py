"""Random regular expressions in Python's syntax, and random grammars, over few characters."""

from __future__ import annotations

from random import Random

ATOMS = [
    "a",
    "b",
    "0",
    r"\d",
    r"\w",
    r"\s",
    ".",
    "[ab]",
    "[^a]",
    r"[a\d]",
    r"[^\W_]",
    r"\.",
    "é",
    r"\x62",
    "[a-c-]",
    "\\n",
]
COUNTS = ["*", "+", "?", "{2}", "{1,2}", "{0,2}", "{,2}", "*?", "+?", "??"]
TEXTS = "ab0 .\né_"
"""Characters of texts that expressions are tried on."""
LITERALS = ['"a"', '"b"', '"c"', '"ab"', '"ba"', "[ab]", "[bc]", "[^a]", '"abc"', "[abc]", '""', '"\\u0063"']


def random_regex(draw: Random, level: int = 0) -> str:
    """Some of them hold what is refused."""
    chance = draw.random()
    if level > 3 or chance < 0.35:
        return draw.choice(ATOMS)
    if chance < 0.6:
        return "".join(random_regex(draw, level + 1) for _ in range(draw.randint(2, 3)))
    if chance < 0.75:
        group = draw.choice(["(", "(?:", "(?P<n>", "(?s:"] if level == 0 else ["(", "(?:", "(?s:"])
        return group + "|".join(random_regex(draw, level + 1) for _ in range(draw.randint(1, 3))) + ")"
    if chance < 0.9:
        return f"(?:{random_regex(draw, level + 1)}){draw.choice(COUNTS)}"
    if level == 0:
        return draw.choice(["^", "", "(?x) "]) + random_regex(draw, 1) + draw.choice(["$", "", r"\Z"])
    return (
        draw.choice([r"\b", "^", "$", "(?=a)", "(?i:a)", "a*+", "(?>a)"]) if draw.random() < 0.2 else draw.choice(ATOMS)
    )


def random_grammar(draw: Random) -> str:
    """EBNF that is as likely as not to be recursive and ambiguous."""
    names = ["root", "x", "y-1"][: draw.randint(1, 3)]
    rules = (" | ".join(_body(draw, names, 0) for _ in range(draw.randint(1, 3))) for _ in names)
    return "\n".join(f"{name} ::= {rule}" for name, rule in zip(names, rules, strict=True))


def _body(draw: Random, names: list[str], level: int) -> str:
    chance = draw.random()
    if level > 3 or chance < 0.35:
        return draw.choice(LITERALS)
    if chance < 0.55:
        return draw.choice(names)
    if chance < 0.75:
        return " ".join(_body(draw, names, level + 1) for _ in range(draw.randint(2, 3)))
    if chance < 0.88:
        return "(" + " | ".join(_body(draw, names, level + 1) for _ in range(draw.randint(2, 3))) + ")"
    return f"({_body(draw, names, level + 1)}){draw.choice(['*', '+', '?', '{2}', '{1,2}', '{0,2}'])}"
