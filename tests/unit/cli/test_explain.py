"""`stride explain` says why a traced step's requests got their rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stridelm.cli import main as entry_point
from stridelm.cli.explain import CAUSES, NOT_WORTH_IT, explained, read_trace

COMMAND = ["generate", "--prompt", "def f(x):", "--max-tokens", "40", "--ignore-eos", "--drafter", "mtp"]

CHOSEN = {"prompt", "probe", "chosen", "behind", "ending"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("explain") / "trace.jsonl"
    assert entry_point.main([*COMMAND, "--depth", "auto", "--trace", str(file)]) == 0
    return file


def test_every_step_has_its_reason(trace: Path) -> None:
    """Some steps try depths, and others choose, by measured times: how deep differs from run to run."""
    lines = list(read_trace(trace))
    causes = [line["reason"]["cause"] for line in lines]
    assert {"probe", "chosen"} <= set(causes) <= CHOSEN
    assert causes[0] == "prompt", "a head has not seen the prompt before the step that ends it"
    for line in lines:
        reason = line["reason"]
        assert 0 <= line["depth"] <= reason["levels"] == 3
        if reason["cause"] == "prompt":
            assert not line["depth"]
            continue
        assert reason["chances"] == sorted(reason["chances"], reverse=True) and len(reason["chances"]) == 3
        assert reason["most"] is None or reason["cause"] != "probe"
        assert reason["most"] is not None or reason["cause"] != "chosen"
        assert (reason["least"] is None) == (not reason["most"])
        [cells] = zip(*(column.cells for column in explained(line["step"], [line]).columns), strict=True)
        most = "" if reason["most"] is None else str(reason["most"])
        least = "" if reason["least"] is None else f"{reason['least']:.2f}"
        words = NOT_WORTH_IT if reason["cause"] == "chosen" and most == "0" else CAUSES[reason["cause"]]
        assert (cells[6], cells[8], cells[9]) == (most, least, words)


@pytest.mark.parametrize(("most", "least", "words"), [(0, None, NOT_WORTH_IT), (2, 0.25, CAUSES["chosen"])])
def test_what_was_worth_its_row(trace: Path, most: int, least: float | None, words: str) -> None:
    """Where nothing is drafted no chance is named from which on it would have been."""
    line = next(read_trace(trace))
    reason = {"cause": "chosen", "levels": 3, "chances": [0.2, 0.1, 0.05], "least": least, "seconds": 1e-3}
    table = explained(1, [{**line, "depth": 0, "reason": {**reason, "most": most}}])
    shown = {column.header: [*column.cells] for column in table.columns}
    assert shown["at most"] == [str(most)] and shown["why that depth"] == [words]
    assert shown["worth from"] == ["" if least is None else f"{least:.2f}"]
    assert "chance" not in str(table.title)


def test_tables_for_all_steps_or_one(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry_point.main(["explain", str(trace)]) == 0
    every = capsys.readouterr().out
    assert every.count("Step ") == len(list(read_trace(trace)))
    assert entry_point.main(["explain", str(trace), "--step", "5"]) == 0
    [title] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Step ")]
    assert title in every


def test_a_fixed_depth_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    assert entry_point.main([*COMMAND, "--depth", "2", "--trace", str(file)]) == 0
    causes = {line["reason"]["cause"] for line in read_trace(file)}
    assert causes <= {"prompt", "asked", "ending"} and "asked" in causes


def test_what_drafted(tmp_path: Path) -> None:
    """Where a drafter chooses, each step says what made its draft."""
    file = tmp_path / "trace.jsonl"
    text = "return a + b\nreturn a + b\nreturn a + b\nreturn a"
    asked = ["--drafter", "hybrid", "--depth", "3", "--prompt", text]
    assert entry_point.main([*COMMAND[:-2], *asked, "--trace", str(file)]) == 0
    lines = list(read_trace(file))
    assert {line["source"] for line in lines if line["verdict"]["drafted"]} == {"mtp", "lookup"}
    table = explained(1, lines)
    [column] = [column for column in table.columns if column.header == "by"]
    assert list(column.cells) == [line["source"] or "" for line in lines]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "stride generate --trace"),
        (json.dumps({"step": 1}), "stride generate --trace"),
        ("[]", "stride generate --trace"),
        ("", "no steps"),
        (None, "name a trace"),
    ],
    ids=["no json", "no reason", "a list", "empty", "missing"],
)
def test_what_is_no_trace(text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert entry_point.main(["explain", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_a_step_that_is_missing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry_point.main(["explain", str(trace), "--step", "9999"]) == 2
    assert "no step 9999" in capsys.readouterr().err
