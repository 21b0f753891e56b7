"""The fuzzer with fixed seeds, the cases that it found, and tests of the fuzzer itself."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz.cases import Ask, BadRequest, Case, Checkpoint, ClosedStream, Raises
from fuzz.checkpoints import directory
from fuzz.checks import Tally, check
from fuzz.definitions import philox
from fuzz.distribution import TABLES, Table, check_table
from fuzz.endings import Alphabet
from fuzz.found import Found
from fuzz.kept import KEPT, Kept
from fuzz.random_cases import random_case
from fuzz.random_requests import BYTE_IDS
from fuzz.shrink import as_test, shrink

PARTS, CASES_A_PART = 12, 8
ORACLE = ("definitions", "eight_bits", "endings", "grammars", "oracle")


@pytest.mark.parametrize("part", range(PARTS))
def test_random_cases(part: int) -> None:
    """Whatever requests an engine gets, and whenever, each receives what the checks require."""
    tally = Tally()
    for seed in range(part * CASES_A_PART, (part + 1) * CASES_A_PART):
        try:
            check(random_case(seed), tally)
        except Found as found:
            raise AssertionError(f"python -m fuzz --seed {seed} --cases 1: {found}") from found
    assert tally.tokens > 10 * CASES_A_PART and tally.accepted > CASES_A_PART


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_kept(kept: Kept) -> None:
    """A fault that was fixed once stays fixed."""
    check(kept.case)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: "-".join(map(str, table.speculation.values())))
def test_lossless(table: Table) -> None:
    """Lossless rules emit each output as often as the target does, also when a learning drafter sees a seed again."""
    check_table(table)


@pytest.mark.parametrize("name", ORACLE)
def test_the_oracle_shares_no_code(name: str) -> None:
    """It shares no code with the engine or with the references of the engine's tests."""
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    shared = {module for module in modules if module.split(".")[0] in ("stridelm", "support", ".")}
    shared |= {module for module in modules if module.startswith("fuzz.") and module.split(".")[1] not in ORACLE}
    assert not shared


def test_philox() -> None:
    """Philox-4x32-10 passes its authors' known-answer tests."""
    zero = philox([0, 0, 0, 0], 0)
    ones = philox([2**32 - 1] * 4, 2**64 - 1)
    assert [int(word) for word in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(word) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_byte_ids() -> None:
    """BYTE_IDS agrees with the tokenizer."""
    alphabet = Alphabet(directory(Checkpoint(vocab=300, speaks=True)))
    assert all(alphabet.bytes_of([token], True) == bytes([byte]) for byte, token in BYTE_IDS.items())


def test_repr_makes_the_same_case() -> None:
    """The printed form makes the same case again."""
    names = {kind.__name__: kind for kind in (Ask, BadRequest, Case, Checkpoint, ClosedStream, Raises)}
    for seed in range(50):
        case = random_case(seed)
        assert eval(repr(case), names) == case


def test_shrinking() -> None:
    """A failing case loses everything unrelated to its failure, and is printed as a test."""
    case = next(case for case in map(random_case, range(99)) if len(case.requests) > 3 and case.faults)
    marked = replace(case.requests[2], prompt=(1, 2, 3, 4, 5), params={**case.requests[2].params, "top_k": 3})
    case = replace(case, requests=(*case.requests[:2], marked, *case.requests[3:]))

    def fails(candidate: Case) -> bool:
        return any("top_k" in ask.params and 4 in ask.prompt for ask in candidate.requests)

    small = shrink(case, fails, seconds=10)
    assert fails(small) and len(small.requests) == 1 and not small.faults and not small.engine
    assert len(small.requests[0].prompt) == 1
    text = as_test(small, "all is lost")
    ast.parse(text)
    assert "def test_found" in text and "top_k" in text
