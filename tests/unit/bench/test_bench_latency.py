"""Rows of the latency benchmark: which variants are in them, what is checked, what is written. No time is asserted."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stridelm.bench import plot
from stridelm.bench.latency import LatencyRow, count_runs, measure_latency
from stridelm.bench.prompts import PromptSet
from stridelm.bench.report import latency_table
from stridelm.bench.results import append_result, read_results
from stridelm.bench.settings import LatencySettings
from stridelm.bench.variants import read_variants
from stridelm.engine.engine import Engine

ENTRIES = ("ngram@2", "mask@1", "mask@2:trust:0.5")


def settings(**changes: Any) -> LatencySettings:
    return LatencySettings(**{"drafters": ENTRIES, "batch": (1, 2), "max_tokens": 8, "repeats": 2, **changes})


@pytest.fixture
def rows(engine: Engine, prompts: PromptSet) -> list[LatencyRow]:
    return measure_latency(engine, read_variants(ENTRIES, (), engine.loaded.target), prompts, settings())


def test_plain_decoding_runs_beside_every_variant_at_every_concurrency(rows: list[LatencyRow]) -> None:
    labels = ["plain", "ngram@2", "mask@1", "mask@2:trust:0.5*"]
    assert [(row.concurrency, row.label) for row in rows] == [(n, label) for n in (1, 2) for label in labels]
    assert all(row.ratio == 1.0 for row in rows if row.label == "plain")


def test_lossless_rows_say_that_the_output_is_plain_decodings(rows: list[LatencyRow]) -> None:
    assert all(row.identical is True and row.identical_outputs == 3 for row in rows if row.lossless)
    assert all(row.identical is None for row in rows if not row.lossless)


def test_a_wrong_output_is_seen(engine: Engine, prompts: PromptSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check compares tokens: a rule that only claims to be lossless is detected."""
    variants = read_variants(["mask@2:trust"], (), engine.loaded.target)
    liar = type(variants[0])(variants[0].speculation, lossless=True)
    _, row = measure_latency(engine, [liar], prompts, settings(batch=(1,), repeats=1, max_tokens=24))
    assert row.identical is False and row.identical_outputs < 3


def test_rows_carry_what_the_ratio_needs(rows: list[LatencyRow]) -> None:
    for row in rows:
        assert row.completion_tokens == 3 * 8 and row.prompts == 3
        assert len(row.ratios) == 2 and row.peak_pages > 0 and row.steps > 0
        assert row.prefix_cache == "off" and row.dtype and row.device
        assert row.acceptance.tokens_per_step >= 1.0
        assert len(row.acceptance.conditional) <= row.depth


def test_rounds_know_nothing_of_one_another(engine: Engine, prompts: PromptSet) -> None:
    """Suffix decoding does not see earlier rounds' outputs: every round accepts the same number."""
    variants = read_variants(["suffix@6"], (), engine.loaded.target)
    found = [measure_latency(engine, variants, prompts, settings(batch=(1,), repeats=n, max_tokens=24)) for n in (1, 2)]
    (_, once), (_, twice) = found
    assert once.steps == twice.steps and 0 < 2 * once.acceptance.accepted == twice.acceptance.accepted


def test_prompts_are_used_again_until_every_stream_has_one(engine: Engine, prompts: PromptSet) -> None:
    (row,) = measure_latency(engine, [], prompts.first(1), settings(batch=(2,), repeats=1))
    assert row.prompts == 2


@pytest.mark.parametrize(("entries", "plain_runs"), [(["ngram"], 1), (["ngram@1", "ngram@2", "ngram@3", "mask@1"], 2)])
def test_every_run_is_announced(engine: Engine, prompts: PromptSet, entries: list[str], plain_runs: int) -> None:
    """Plain decoding is repeated if there are more variants than run beside it once."""
    told: list[str] = []
    variants = read_variants(entries, (), engine.loaded.target)
    rows = measure_latency(engine, variants, prompts, settings(), told.append)
    assert len(told) == count_runs(variants, settings()) == 2 * (1 + 3 * len(entries) + 2 * plain_runs)
    assert sum("round" in what and what.endswith("plain") for what in told) == 2 * 2 * plain_runs
    assert [len(row.ratios) for row in rows[: 1 + len(entries)]] == [2 * plain_runs] + [2] * len(entries)


def test_a_run_ends_with_the_environment(rows: list[LatencyRow], tmp_path: Path) -> None:
    path = tmp_path / "new" / "latency.jsonl"
    append_result(path, "latency", settings(), rows=[row.to_json() for row in rows])
    [document] = read_results(path)
    assert list(document) == ["benchmark", "settings", "rows", "environment"]
    assert {"cpu", "torch", "torch_threads", "load_average"} <= set(document["environment"])
    first = document["rows"][0]
    assert {"ttft_s", "tpot_s", "itl_s", "tokens_per_step", "conditional", "marginal"} <= set(first)
    assert not {"times", "acceptance"} & set(first)


def test_the_table_marks_lossy_rows(rows: list[LatencyRow]) -> None:
    console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(latency_table(rows))
    text = console.export_text()
    assert "mask@2:trust:0.5*" in text and "* lossy" in text and "prefix cache off" in text


def test_simulated_acceptance_is_labelled(engine: Engine, prompts: PromptSet, rows: list[LatencyRow]) -> None:
    """In the row, in its label and below the table; other tables do not mention it."""
    variants = read_variants(["ngram@2:synthetic:1.5"], (), engine.loaded.target)
    _, row = found = measure_latency(engine, variants, prompts, settings(batch=(1,), repeats=1))
    about = row.to_json()
    assert (about["acceptance_rule"], about["acceptance_length"], about["simulated"]) == ("synthetic", 1.5, True)
    assert (row.lossless, row.identical) == (False, None)
    texts = []
    for each in (found, rows):
        console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(latency_table(each))
        texts.append(console.export_text())
    assert "ngram@2:synthetic:1.5*" in texts[0] and "simulated acceptance" in texts[0]
    assert "simulated" not in texts[1]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_chart_is_drawn(rows: list[LatencyRow], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"chart{suffix}"
    plot.plot_latency(rows, path)
    assert path.stat().st_size > 1000
    drafting = [row for row in rows if row.label != "plain"]
    deep = [replace(row, depth=depth, label=f"{row.drafter}@{depth}") for row in drafting for depth in (1, 2, 3)]
    plot.plot_latency(deep, path)
    assert path.stat().st_size > 1000


def test_a_chart_without_matplotlib_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'stridelm\[plot\]'"):
        plot.check_plot(Path("chart.png"))


def test_a_chart_of_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        plot.check_plot(Path("chart.bmp"))


@pytest.mark.parametrize(
    "wrong", [{"batch": ()}, {"batch": (0,)}, {"repeats": 0}, {"max_tokens": 0}, {"num_prompts": 0}]
)
def test_settings_that_measure_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        settings(**wrong)
