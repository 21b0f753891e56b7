"""Two settings side by side: where outputs diverge, what they are worth, and the command on the built-in model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stridelm.bench.http.server import Server
from stridelm.bench.results import read_results
from stridelm.bench.serving.cells import Side
from stridelm.bench.serving.compare import compare
from stridelm.bench.serving.in_process import InProcess
from stridelm.bench.serving.quality import Divergence, first_divergence, mean_loss, parse_share, parses
from stridelm.bench.serving.record import Completion
from stridelm.bench.serving.remote import Remote
from stridelm.bench.serving.settings import CompareSettings
from stridelm.cli.main import main
from support.doubles.server import Served, serving

SHORT: dict[str, Any] = {"num_prompts": 4, "num_warmups": 1, "max_tokens": 12, "repeats": 2, "max_concurrency": 4}
OPTIONS = ["--num-prompts", "3", "--num-warmups", "0", "--max-tokens", "10", "--repeats", "1"]


def completion(ids: list[int] | None, text: str = "", reason: str = "length") -> Completion:
    tokens = len(text) if ids is None else len(ids)
    return Completion([0.1], tokens, 5, text, None if ids is None else tuple(ids), finish_reason=reason)


# Divergence


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [1], 0),
        ([], [], None),
    ],
)
def test_first_divergence(one: list[int], other: list[int], place: int | None) -> None:
    assert first_divergence(one, other) == place


def test_divergence_of_tokens() -> None:
    pairs = [
        (completion([1, 2, 3, 4]), completion([1, 2, 3, 4])),
        (completion([1, 2, 3, 4]), completion([1, 2, 9, 4])),
        (completion([1, 2, 3, 4]), completion([9, 2, 3, 4])),
        (completion([1, 2, 3, 4]), completion([9, 9])),
    ]
    found = Divergence.of(pairs)
    assert (found.outputs, found.identical, found.unit) == (4, 1, "tokens")
    assert found.positions == (2, 0, 0) and found.median == 0
    assert found.surviving() == [(0, 1.0), (0, 0.5), (2, 0.25), (4, 0.25)]


def test_a_side_without_tokens_is_compared_by_its_text() -> None:
    found = Divergence.of([(completion([1, 2], "abcd"), completion(None, "abxd"))])
    assert found.unit == "characters" and found.positions == (2,) and found.lengths == (4,)


def test_identical_outputs_have_no_divergence() -> None:
    found = Divergence.of([(completion([1, 2]), completion([1, 2]))])
    assert found.median is None and found.surviving() == [(0, 1.0), (2, 1.0)]


def test_losses_are_per_token() -> None:
    outputs = [completion([1]), completion([1, 2, 3]), completion([])]
    assert mean_loss([2.0, 1.0, None], outputs) == pytest.approx((2 + 3) / 4)
    assert mean_loss([None], [completion([])]) is None


# Python


@pytest.mark.parametrize(
    ("prompt", "output", "cut", "valid"),
    [
        ("def f(x):", "\n    return x\n", False, True),
        ("def f(x):", "\n    return x x\n", False, False),
        ("def f(x):", "\n    return x\n\n\ndef g(", True, True),
        ("def f(x):", "\n    return x\n\n\ndef g(", False, False),
        ("    def f(self):", "\n        return 1\n\n    def g(self):\n        pass\n", False, True),
        ("    def f(self):", "\n        return 1\n\n\nclass A:\n    pass\n", False, True),
        ("def f(x):", "\n    z = 1\n    y = g(\n        1,\n        2,\n        3", True, True),
        ("def f(x):", "\n    )\n" + "    x = 1\n" * 9, True, False),
        ("x = 1", "\ny = ", True, True),
        ("def f(", "x)) = 3", True, False),
        ("x = '", "\0'\n", False, False),
    ],
)
def test_parses(prompt: str, output: str, cut: bool, valid: bool) -> None:
    """Also inside a class. What the limit cut may be unfinished; what is wrong before that is wrong."""
    assert parses(prompt, output, cut) is valid


def test_the_share_of_valid_outputs() -> None:
    whole, broken = completion(None, "1\n", "stop"), completion(None, "= =\n", "stop")
    assert parse_share(["x = ", "x = ", "x = "], [whole, broken, whole]) == 2 / 3
    assert parse_share([], []) is None


# In process


@pytest.fixture(scope="module")
def local() -> InProcess:
    return InProcess.open(None, 4, 0.0, True, max_model_len=512)


def test_a_lossless_drafter_changes_nothing(local: InProcess) -> None:
    sides = Side(local, local.plain()), Side(local, local.way("ngram@3"))
    found = compare(sides, CompareSettings(**SHORT))
    assert found.promised and not found.broken
    assert (found.divergence.identical, found.divergence.outputs) == (4, 4)
    assert found.first.loss is found.second.loss is None
    assert found.first.parse_share == found.second.parse_share
    assert found.speed is not None and len(found.speed.runs) == 2


def test_a_lossy_rule_is_measured_by_its_loss(local: InProcess) -> None:
    """Unchecked windows are less likely under the model than its own greedy output."""
    sides = Side(local, local.plain()), Side(local, local.way("mask@3:trust"))
    found = compare(sides, CompareSettings(**{**SHORT, "max_tokens": 32}))
    assert not found.promised and found.divergence.identical < 4
    assert found.first.loss is not None and found.second.loss is not None
    assert found.second.loss > found.first.loss
    assert found.second.figures.tokens_per_step is not None and found.second.figures.tokens_per_step > 2


def test_the_same_setting_twice_is_the_same(local: InProcess) -> None:
    sides = Side(local, local.way("mask@2:trust")), Side(local, local.way("mask@2:trust"))
    found = compare(sides, CompareSettings(**{**SHORT, "scenario": "instruction", "loss": False}))
    assert found.divergence.identical == 4 and found.first.loss is None
    assert found.first.parse_share is None


# The command


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("compare"), "--drafter", "ngram", "--max-model-len", "1024") as served:
        yield served


def test_compare_in_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    record, page = tmp_path / "runs.jsonl", tmp_path / "report.html"
    more = ["--drafters", "mask@2:trust", "--json", str(record), "--report", str(page)]
    assert main(["bench", "compare", *OPTIONS, *more]) == 0
    shown = capsys.readouterr().out
    assert "first divergence, tokens: median" in shown and "valid Python, second" in shown and "loss, first" in shown
    [run] = read_results(record)
    assert [row["label"] for row in run["rows"]] == ["plain", "mask@2:trust*"]
    assert run["divergence"]["unit"] == "tokens" and run["divergence"]["outputs"] == 3
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2 and text.count("<table") == 2
    assert not re.search(r'(?:src|href)="(?!#)', text)


def test_two_servers(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """Two addresses of one server, each by its default."""
    other = served.url.replace("127.0.0.1", "localhost")
    urls = ["--url", served.url, "--url", other]
    assert main(["bench", "compare", *OPTIONS, *urls, "--scenario", "short-question"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 3" in shown and "second target: localhost" in shown


def test_two_settings_of_a_server(served: Served) -> None:
    """Chats are not the beginning of Python source."""
    remote = Remote(Server.at(served.url), "openai-chat", 0.0)
    sides = Side(remote, remote.plain() or remote.way(None)), Side(remote, remote.way("mask@2:trust"))
    found = compare(sides, CompareSettings(**SHORT, url=(served.url,), backend="openai-chat", loss=False))
    assert found.first.parse_share is None and found.divergence.outputs == 4
    assert found.first.figures.errors == found.second.figures.errors == 0


def test_losses_of_a_server(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--url", served.url, "--drafters", "none,mask@2:trust", "--backend", "sglang"]
    assert main(["bench", "compare", *OPTIONS, *more]) == 0
    assert "loss, second" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--drafters", "none,ngram,mask"], "two are compared; got 0 of url and 3"),
        (["--url", "a", "--url", "b", "--drafters", "ngram"], "one for each, or is left out"),
        (["--scenario", "chess"], "unknown scenario"),
        (["--drafters", "nobody"], "unknown drafter"),
        (["--drafters", "ngram,ngram"], "both settings are ngram@"),
        (["--drafters", "none"], "both settings are plain"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", *options]) == 2
    assert says in capsys.readouterr().err
