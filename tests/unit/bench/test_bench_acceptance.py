"""Rows of the acceptance benchmark: buckets are formed by the plain text, so all drafters have the same ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stridelm.bench.acceptance import AcceptanceReport, PlainText, measure_acceptance
from stridelm.bench.plot import plot_acceptance
from stridelm.bench.prompts import PromptSet
from stridelm.bench.report import acceptance_table
from stridelm.bench.settings import AcceptanceSettings
from stridelm.bench.variants import read_variants
from stridelm.engine.engine import Engine

ENTRIES = ("ngram@2", "mask@2", "mask@2:trust")


def settings(**changes: Any) -> AcceptanceSettings:
    return AcceptanceSettings(**{"drafters": ENTRIES, "max_tokens": 20, "batch": 2, **changes})


@pytest.fixture
def report(engine: Engine, prompts: PromptSet) -> AcceptanceReport:
    return measure_acceptance(engine, read_variants(ENTRIES, (), engine.loaded.target), prompts, settings())


def test_a_row_for_every_variant_temperature_and_bucket(report: AcceptanceReport) -> None:
    labels = ("ngram@2", "mask@2", "mask@2:trust*")
    buckets = ("under 0.3", "0.3 to 0.6", "above 0.6", "all")
    places = [(row.temperature, row.label, row.bucket) for row in report.rows]
    assert places == list(itertools.product((0.0, 1.0), labels, buckets))
    assert {row.bucket for row in report.rows if row.headline} == {"above 0.6"}


def test_buckets_are_the_plain_texts_and_add_up(report: AcceptanceReport) -> None:
    for text in report.plain:
        for label in {row.label for row in report.rows}:
            rows = {r.bucket: r for r in report.rows if (r.label, r.temperature) == (label, text.temperature)}
            assert rows.pop("all").prompts == text.prompts == 3
            assert {name: row.prompts for name, row in rows.items()} == text.buckets
        assert sum(text.buckets.values()) + text.too_short == 3


def test_lossless_outputs_are_plain_decodings_at_every_temperature(report: AcceptanceReport) -> None:
    assert all(row.identical is (True if row.lossless else None) for row in report.rows)


def test_empty_buckets_have_no_figures(report: AcceptanceReport) -> None:
    assert all((row.acceptance is None) == (row.prompts == 0) for row in report.rows)
    assert all("tokens_per_step" in row.to_json() for row in report.rows if row.prompts)


def test_loops_are_counted() -> None:
    text = PlainText.of(0.0, [[5] * 40, list(range(40)), [1, 2]])
    assert (text.loops, text.too_short, text.median_loop_start) == (1, 1, 0)
    assert text.buckets == {"under 0.3": 1, "0.3 to 0.6": 0, "above 0.6": 1}


def test_table_and_chart(report: AcceptanceReport, tmp_path: Path) -> None:
    console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(acceptance_table(report))
    text = console.export_text()
    assert "end in a loop" in text and "above 0.6" in text
    pytest.importorskip("matplotlib")
    plot_acceptance(report, tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").stat().st_size > 1000
    deep = [replace(row, depth=depth, label=f"{row.drafter}@{depth}") for row in report.rows for depth in (1, 2, 3)]
    plot_acceptance(replace(report, rows=deep), tmp_path / "lines.svg")
    assert (tmp_path / "lines.svg").stat().st_size > 1000


def test_no_drafter_has_seen_the_answers(engine: Engine, prompts: PromptSet) -> None:
    """What suffix decoding learns from one variant's outputs is forgotten before the next one's run."""
    once, other = read_variants(["suffix@6", "suffix@6:rejection"], (), engine.loaded.target)
    cold = settings(temperature=(0.0,))
    found = measure_acceptance(engine, [once, other, once], prompts, cold).rows
    alone = [row.acceptance for row in measure_acceptance(engine, [other], prompts, cold).rows]
    by_run = [[row.acceptance for row in found[i : i + 4]] for i in (0, 4, 8)]
    assert by_run[0] == by_run[2] and by_run[1] == alone and any(by_run[0]) and any(alone)


def test_what_cannot_run_is_refused_before_anything_does(engine: Engine, prompts: PromptSet) -> None:
    """Also errors that only the drafter itself can detect."""
    told: list[str] = []
    deep = read_variants(["ngram@2", "mask@9"], (), engine.loaded.target)
    with pytest.raises(ValueError, match="depth 9 is over 7"):
        measure_acceptance(engine, deep, prompts, settings(), told.append)
    assert not told


def test_too_few_tokens_to_judge_are_refused(engine: Engine, prompts: PromptSet) -> None:
    with pytest.raises(ValueError, match="at least 16"):
        measure_acceptance(engine, [], prompts, settings(max_tokens=8))


@pytest.mark.parametrize("wrong", [{"temperature": ()}, {"temperature": (-1.0,)}, {"temperature": (float("nan"),)}])
def test_temperatures_are_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="temperature must name"):
        settings(**wrong)
