"""The engine's line of submissions whose grammars are being compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import pytest

from stridelm.builtin import builtin_path
from stridelm.grammar.cache import GrammarCache
from stridelm.grammar.compiler import Grammars
from stridelm.params import StructuredOutputs
from stridelm.server import compile_line
from stridelm.server.compile_line import CompileLine
from stridelm.server.messages import Job, Submit
from stridelm.text.tokenizer import Tokenizer


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(builtin_path())


def words(*choices: str) -> list[StructuredOutputs]:
    return [StructuredOutputs(choice=(choice,)) for choice in choices]


def submission(name: str, tenant: str) -> Submit:
    return Submit(name, [Job([f"{name}.0"], b"", {}, tenant=tenant)])


class Stand:
    """A line over real grammars. open: samples that the engine has; log: what the thread has compiled, in order."""

    def __init__(self, cache_bytes: int = 1 << 20) -> None:
        self.open: set[str] = set()
        self.log: list[str] = []
        self.cache: GrammarCache[StructuredOutputs] = GrammarCache(cache_bytes)
        self.grammars = Grammars(tokenizer(), len(tokenizer().hf), tokenizer().eos_ids, self.cache)
        self.line = CompileLine(self._made, self.cache, self.open.__contains__)

    def _made(self) -> Grammars:
        self.log.append("begun")
        return self.grammars

    def until(self, true: Callable[[list[str]], bool]) -> list[tuple[str, BaseException | None]]:
        """What came out, in order; each is open in the engine from then on."""
        out: list[tuple[str, BaseException | None]] = []
        end = time.monotonic() + 60
        while not true([name for name, _ in out]):
            assert time.monotonic() < end, out
            for message, error in self.line.ready():
                out.append((message.group, error))
                if error is None:
                    self.open.add(f"{message.group}.0")
            time.sleep(0.001)
        return out


def test_no_submission_waits_for_all_of_another_tenants() -> None:
    """However many grammars one tenant's submissions have, another's comes out after at most two more of them are
    compiled: the one that runs, and one in turn."""
    stand = Stand()
    for number in range(4):
        many = words(*(f"many {number} {i}" for i in range(20)))
        stand.line.add(submission(f"many{number}", "greedy"), many)
    before = len(stand.log)
    stand.line.add(submission("one", "modest"), words("one"))
    assert stand.until(lambda names: "one" in names)[0][0] == "one"
    assert len(stand.log) <= before + 3


def test_what_is_there_waits_for_nothing() -> None:
    """A submission whose grammars another has had compiled comes out at once."""
    stand = Stand()
    stand.line.add(submission("first", "modest"), words("x"))
    stand.until(lambda names: bool(names))
    stand.line.add(submission("many", "greedy"), words(*(f"many {i}" for i in range(20))))
    stand.line.add(submission("again", "modest"), words("x"))
    assert [message.group for message, _ in stand.line.ready()] == ["again"]


def test_a_tenant_whose_requests_hold_much_waits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they end. Whatever is held, or evicted meanwhile, no open request's grammar has to be compiled again; in
    the end nothing is held."""
    monkeypatch.setattr(compile_line, "HELD_BYTES", 1)
    stand = Stand(cache_bytes=1)
    stand.line.add(submission("a0", "greedy"), words("a0"))
    stand.line.add(submission("a1", "greedy"), words("a1"))
    stand.line.add(submission("b", "modest"), words("b"))
    assert [name for name, _ in stand.until(lambda names: len(names) == 2)] == ["a0", "b"]
    assert all(stand.cache.get(word) is not None for word in words("a0", "b"))
    assert not stand.line.ready() and [message.group for message in stand.line.waiting] == ["a1"]
    stand.open.discard("a0.0")
    assert stand.until(lambda names: bool(names)) == [("a1", None)]
    stand.open.clear()
    stand.line.free_ended()
    assert not any(map(stand.cache.held_bytes, ("greedy", "modest")))


def test_a_submission_that_holds_too_much_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and names the remedy; a single grammar is served, whatever its size."""
    monkeypatch.setattr(compile_line, "HELD_BYTES", 1)
    stand = Stand()
    stand.line.add(submission("pair", "a"), words("x", "y"))
    [(_, error)] = stand.until(lambda names: bool(names))
    assert isinstance(error, ValueError) and "fewer" in str(error)
    stand.line.add(submission("single", "a"), words("z"))
    assert stand.until(lambda names: bool(names)) == [("single", None)]


def test_aborted_and_invalid_submissions_leave_nothing() -> None:
    stand = Stand()
    dropped = submission("dropped", "a")
    stand.line.add(dropped, words(*(f"d{i}" for i in range(10))))
    stand.line.drop(dropped)
    stand.line.add(submission("wrong", "a"), [StructuredOutputs(regex="("), *words(*(f"w{i}" for i in range(10)))])
    stand.line.add(submission("last", "a"), words("last"))
    out = dict(stand.until(lambda names: "last" in names))
    assert set(out) == {"wrong", "last"} and isinstance(out["wrong"], ValueError) and out["last"] is None
    assert len(stand.log) <= 3
    stand.open.clear()
    stand.line.free_ended()
    assert not stand.line.waiting and not stand.cache.held_bytes("a")
