"""`stride bench` from the outside: options in, table and files out, exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from stridelm.bench.results import read_results
from stridelm.cli.main import main


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"def main(argv):"\n"for name in names:"\n')
    return str(path)


def common(speaking: Path, texts: str) -> list[str]:
    return [
        str(speaking),
        "--prompts",
        texts,
        "--num-prompts",
        "2",
        "--max-tokens",
        "16",
        "--mask-token-id",
        "1",
    ]


def test_latency(speaking: Path, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "latency.jsonl"
    extra = ["--drafters", "none,ngram,mask:trust", "--depth", "1", "--batch", "1,2", "--repeats", "1"]
    assert main(["bench", "latency", *common(speaking, texts), *extra, "--json", str(out)]) == 0
    assert "ngram@1" in capsys.readouterr().out
    [run] = read_results(out)
    assert [row["label"] for row in run["rows"]] == ["plain", "ngram@1", "mask@1:trust*"] * 2


def test_latency_with_a_cold_prefix_cache(speaking: Path, texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--drafters", "ngram", "--repeats", "1", "--prefix-cache", "cold"]
    assert main(["bench", "latency", *common(speaking, texts), *extra]) == 0
    assert "prefix cache cold" in capsys.readouterr().out


def test_acceptance(speaking: Path, texts: str, tmp_path: Path) -> None:
    out = tmp_path / "acceptance.jsonl"
    extra = ["--drafters", "ngram@2", "--temperature", "0,1", "--json", str(out)]
    assert main(["bench", "acceptance", *common(speaking, texts), *extra]) == 0
    [document] = read_results(out)
    assert list(document) == ["benchmark", "settings", "plain", "rows", "environment"]
    assert [text["temperature"] for text in document["plain"]] == [0.0, 1.0]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--drafters", "nobody"],
        ["--drafters", "mask:trust:high"],
        ["--plot", "chart.bmp"],
        ["--threads", "0"],
        ["--batch", "0"],
        ["--prompts", "/nowhere/at/all"],
    ],
)
def test_bad_options_end_with_2(
    speaking: Path, texts: str, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "latency", *common(speaking, texts), *wrong]) == 2
    assert capsys.readouterr().err.startswith("stride: error: ")


def test_no_model_is_an_error_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "/no/model/here"]) == 2
    assert "error" in capsys.readouterr().err
