"""Reports as text: exactly what Markdown and HTML get, and what cells become in a table."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from stridelm.bench.serving.cells import Cell
from stridelm.bench.serving.charts import charts_of
from stridelm.bench.serving.document import Document, Table
from stridelm.bench.serving.figures import Figures, Percentiles, Ratio
from stridelm.bench.serving.files import check_report, write_report
from stridelm.bench.serving.objective import Objective
from stridelm.bench.serving.record import Completion, Run
from stridelm.bench.serving.render import as_html, as_markdown, as_text
from stridelm.bench.serving.report import number, ratio, serving_document, share, times
from stridelm.bench.serving.settings import ServingSettings

DOCUMENT = Document(
    "A <title>",
    [("model", "a|b")],
    [Table("Speed", [("way", False), ("tokens/s", True)], [["x|y", "1.0"], ["[bold]&", "2.0"]])],
    ["one note"],
)


def cell(label: str, scenario: str = "retrieval", load: str = "1 stream", speed: Ratio | None = None) -> Cell:
    run = Run(2.0, (Completion([0.1, 0.2], 3, 5, "abc", steps=2), Completion([0.3], 1, 5, "d", steps=1)))
    figures = Figures.of([run], Objective.of(["ttft=200"]))
    return Cell("in process", scenario, load, label, "*" not in label, False, figures, speed)


def test_markdown() -> None:
    assert as_markdown(DOCUMENT, ["c.svg"]) == (
        "# A <title>\n\n- model: a|b\n\n![A <title>](c.svg)\n\n## Speed\n\n"
        "| way | tokens/s |\n|---|---:|\n| x\\|y | 1.0 |\n| [bold]& | 2.0 |\n\n- one note\n"
    )


def test_html_is_one_page_that_says_everything_literally() -> None:
    page = as_html(DOCUMENT, ["<svg></svg>"])
    assert "<title>A &lt;title&gt;</title>" in page and "<figure><svg></svg></figure>" in page
    assert "<dt>model</dt><dd>a|b</dd>" in page and "<li>one note</li>" in page
    assert '<tr><td>[bold]&amp;</td><td class="number">2.0</td></tr>' in page
    table = page[page.index("<table>") : page.index("</table>") + len("</table>")]
    assert [row.tag for row in ElementTree.fromstring(table).iter("tr")] == ["tr"] * 3


def test_text_is_literal_too() -> None:
    console = Console(width=80, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(as_text(DOCUMENT))
    shown = capture.get()
    assert "[bold]&" in shown and "model: a|b" in shown and shown.index("Speed") < shown.index("one note")


def test_cells_of_a_table() -> None:
    assert times(Percentiles(1.234, 99.94, 1234.5)) == "1.2 / 99.9 / 1234"
    assert times(Percentiles(None, None, None)) == number(None) == share(None) == ratio(None) == "-"
    assert ratio(Ratio(1.5, 1.25, 2.0, (1.25, 1.5, 2.0))) == "1.50x (1.25 to 2.00)"


def test_a_serving_document() -> None:
    """A row for each cell; what no cell has gets no column; lossy rows bring their warning."""
    cells = [cell("plain"), cell("mask@3:trust*", speed=Ratio(2.0, 1.5, 2.5, (1.5, 2.0, 2.5)))]
    document = serving_document(cells, ServingSettings(slo=("ttft=200",)), {"model": "m"}, "A title", True)
    [table] = document.tables
    names = [name for name, _ in table.columns]
    assert "goodput" in names and "client" not in names
    second = dict(zip(names, table.rows[1]))
    assert second["decoding"] == "mask@3:trust*" and second["speed over plain"] == "2.00x (1.50 to 2.50)"
    assert second["tokens/s"] == "2.0" and second["tokens/step"] == "1.33" and second["goodput"] == "0.50 (50%)"
    assert ("model", "m") in document.about
    assert ("prefix cache", "flushed before every run") in document.about
    assert document.notes[-1].startswith("* lossy")
    assert not any(note.startswith("* lossy") for note in serving_document(
        cells[:1], ServingSettings(), {}, "", True
    ).notes)  # fmt: skip


def test_charts_have_a_panel_for_each_scenario() -> None:
    """And name scenarios, loads and ways of decoding as text."""
    pytest.importorskip("matplotlib")
    speed = Ratio(2.0, 1.5, 2.5, (2.0,))
    cells = [
        cell(label, scenario, load, None if label == "plain" else speed)
        for scenario in ("retrieval", "code-file", "multi-turn", "repetition")
        for load in ("1 stream", "4 streams")
        for label in ("plain", "ngram@4")
    ]
    drawn = [draw() for draw in charts_of(cells)]
    assert len(drawn) == 4 and len(charts_of(cells[:1])) == 3
    for chart in drawn:
        texts = [
            "".join(text.itertext()).strip() for text in ElementTree.fromstring(chart).iter() if "text" in text.tag
        ]
        assert {"retrieval", "code-file", "multi-turn", "repetition", "4 streams", "ngram@4"} <= set(texts)


def test_files(tmp_path: Path) -> None:
    write_report(tmp_path / "a.md", DOCUMENT, [lambda: "<svg/>", lambda: "<svg></svg>"])
    assert (tmp_path / "a-2.svg").read_text() == "<svg></svg>" and "(a-1.svg)" in (tmp_path / "a.md").read_text()
    write_report(tmp_path / "b.html", DOCUMENT, [lambda: "<svg/>"])
    assert {path.name for path in tmp_path.iterdir()} == {"a.md", "a-1.svg", "a-2.svg", "b.html"}
    with pytest.raises(ValueError, match="name another file"):
        write_report(tmp_path / "a.md" / "c.md", DOCUMENT, [])
    with pytest.raises(ValueError, match=r"must end in \.md or \.html"):
        check_report(tmp_path / "a.txt")
