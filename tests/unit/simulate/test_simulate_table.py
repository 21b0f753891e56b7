"""Cost tables: what lies between points, what a file holds, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.params import Speculation
from stridelm.simulate.curve import DecodeCurve, DecodePoint, PromptCurve, PromptPoint
from stridelm.simulate.table import CostTable
from stridelm.simulate.table_file import FORMAT, read_table, write_table
from stridelm.types import Follow, Request, Span

WIDTHS = (0, 1, 2, 3)
TABLE: dict[str, Any] = {
    "format": FORMAT,
    "hardware": "a card",
    "model": "a model",
    "engine": {"max_num_batched_tokens": 256, "page_size": 16, "num_pages": 512, "max_model_len": 512},
    "drafters": {
        "none": {
            "rows_by_depth": [0],
            "decode": [[1, 1, 0, 0, 0.01], [8, 8, 0, 0, 0.017]],
            "prompts": [[1, 0, 0.01], [101, 0, 0.11]],
        },
        "mtp": {
            "rows_by_depth": [0, 1, 2],
            "decode": [[n, n * (1 + d), d, 0, round(0.01 + 0.001 * (d + n), 4)] for n in (1, 8) for d in (0, 1, 2)],
            "prompts": [[1, 0, 0.01], [101, 0, 0.11]],
        },
    },
    "requests": [{"prompt_tokens": 20, "max_tokens": 10, "chances": {"mtp": [0.8, 0.5]}}],
}


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Any], Path]:
    def write(table: Any) -> Path:
        path = tmp_path / "table.json"
        path.write_text(table if isinstance(table, str) else json.dumps(table), encoding="utf-8")
        return path

    return write


def changed(place: str, value: Any) -> dict[str, Any]:
    """TABLE with one entry changed, such as "drafters/none/prompts"."""
    table = json.loads(json.dumps(TABLE))
    *above, name = place.split("/")
    inner = table
    for each in above:
        inner = inner[each]
    inner[name] = value
    return table


def span(prompt: int, real: int, depth: int, start: int = 0, behind: int = 0, follow: Follow = Follow.NOW) -> Span:
    request = Request("", [0] * prompt, SamplingParams(), Speculation(drafter="mtp"), (0, 1, 2))
    return Span(request, start, real, depth, depth, start + real == prompt, behind, follow)


# Between points


def some_points(seed: int) -> list[DecodePoint]:
    """A grid whose times grow with everything."""
    draw = random.Random(seed)
    steps = {n: draw.random() for n in (1, 3, 8)}
    return [
        DecodePoint(n, n + share * d, d, context, 1 + steps[1] * n + share * d * steps[3] + context * n * steps[8] / 50)
        for n in (1, 3, 8)
        for d in range(4)
        for share in sorted({1, n // 2 or 1, n})
        for context in (10, 100)
        if d or share == n
    ]


@pytest.mark.parametrize("seed", range(3))
def test_points_are_kept(seed: int) -> None:
    curve = DecodeCurve(some_points(seed), WIDTHS)
    for point in some_points(seed):
        assert curve.seconds(point.requests, point.rows, point.depth, point.context) == pytest.approx(point.seconds)


@pytest.mark.parametrize("seed", range(3))
def test_times_grow_where_the_points_do(seed: int) -> None:
    """More requests that all draft, a deeper draft, more of them and a longer context never take less."""
    curve, draw = DecodeCurve(some_points(seed), WIDTHS), random.Random(seed)
    for _ in range(300):
        n, depth, context = draw.randint(1, 8), draw.randint(0, 3), draw.uniform(0, 200)
        drafting = draw.randint(1, n)
        here = curve.seconds(n, n + depth * drafting, depth, context)
        assert here <= curve.seconds(n, n + depth * drafting, depth, context + draw.uniform(0, 100)) + 1e-12
        assert here <= curve.seconds(n, n + depth * n, depth, context) + 1e-12
        whole = curve.seconds(n, n + depth * n, depth, context)
        assert n == 8 or whole <= curve.seconds(n + 1, (n + 1) * (depth + 1), depth, context) + 1e-12
        assert depth == 3 or whole <= curve.seconds(n, n * (depth + 2), depth + 1, context) + 1e-12


def test_between_two_points_lies_a_line() -> None:
    points = [DecodePoint(2, 2, 0, 0, 1.0), DecodePoint(2, 2, 0, 10, 2.0), DecodePoint(6, 6, 0, 0, 3.0)]
    curve = DecodeCurve(points, (0,))
    assert curve.seconds(2, 2, 0, 4) == pytest.approx(1.4)
    assert curve.seconds(2, 2, 0, 30) == pytest.approx(4.0)  # beyond the last context it goes on
    assert curve.seconds(3, 3, 0, 0) == pytest.approx(1.5)
    assert curve.seconds(1, 1, 0, 0) == 1.0  # fewer than were measured


def test_stairs_are_climbed_whole() -> None:
    """A step is padded to the next captured size, and takes what that takes."""
    points = [DecodePoint(n, n, 0, 0, float(n)) for n in (1, 4, 8)]
    curve = DecodeCurve(points, (0,), stairs=(1, 4, 8))
    assert [curve.seconds(n, n, 0, 0) for n in (1, 2, 4, 5, 8)] == [1.0, 4.0, 4.0, 8.0, 8.0]


def test_prompts_cost_by_rows_and_by_what_they_see() -> None:
    points = [PromptPoint(n, seen, 0.1 * n + 0.01 * seen) for n in (10, 20) for seen in (0, 100)]
    curve = PromptCurve(points)
    assert curve.seconds(15, 50) == pytest.approx(2.0)
    assert curve.seconds(40, 0) == pytest.approx(4.0)
    assert curve.seconds(1, 0) == pytest.approx(1.0)


def test_a_step_of_both(written: Callable[[Any], Path]) -> None:
    """Known tokens take what they take in a step of prompts, and drafts what they add to a step of decoding."""
    costs = read_table(written(TABLE)).drafters["mtp"]
    decodes = [span(5, 1, 2, start=4) for _ in range(8)]
    assert costs.seconds(decodes) == pytest.approx(0.012 + 0.008)
    assert costs.seconds([span(30, 30, 0)]) == pytest.approx(0.01 + 29 * 0.001)
    assert costs.seconds([span(30, 30, 2)]) == pytest.approx(0.01 + 29 * 0.001 + 0.002)
    assert costs.seconds([*decodes[1:], span(90, 30, 0)]) == pytest.approx(0.01 + 36 * 0.001 + 0.002)


def test_a_step_in_which_drafters_wait_or_catch_up(written: Callable[[Any], Path]) -> None:
    """By their share of real rows they take what plain decoding takes; catching up, as long as reading so many rows."""
    table = read_table(written(changed("drafters/mtp/prompts", [[1, 0, 0.01], [101, 0, 0.21]])))

    def seconds(*spans: Span) -> float:
        return table.seconds("mtp", spans)

    decode, wait = span(5, 1, 0, start=4), span(5, 1, 0, start=4, follow=Follow.LATER)
    deep, prompt = span(5, 1, 2, start=4), span(51, 51, 0, follow=Follow.LATER)
    assert seconds(*[decode] * 8) == pytest.approx(0.018)
    assert seconds(*[wait] * 8) == pytest.approx(0.017)  # as plain decoding
    assert seconds(deep, *[wait] * 7) == pytest.approx(0.020 - 0.001 * 7 / 8)
    assert seconds(prompt) == pytest.approx(0.06)
    assert seconds(span(5, 1, 0, start=4, behind=51), *[decode] * 7) == pytest.approx(0.018 + 0.05)
    assert seconds(replace(wait, behind=51), *[wait] * 7) == pytest.approx(0.017)


# Files


def test_what_is_written_is_read(written: Callable[[Any], Path], tmp_path: Path) -> None:
    table = read_table(written({**TABLE, "stairs": [1, 8], "scenario": "code"}))
    write_table(table, tmp_path / "new" / "again.json")
    assert read_table(tmp_path / "new" / "again.json") == table
    assert (table.most_requests, table.drafters["mtp"].usual_depth) == (8, 2)


def test_who_may_wait_is_written_and_older_tables_say_nothing_of_it(
    written: Callable[[Any], Path], tmp_path: Path
) -> None:
    old = read_table(written({**TABLE, "format": "stride-cost-table-1"}))
    assert (old.engine.patience, old.engine.apart, old.drafters["mtp"].may_wait) == (0, False, False)
    mtp = replace(old.drafters["mtp"], may_wait=True)
    table = replace(old, engine=replace(old.engine, patience=128, apart=True), drafters={**old.drafters, "mtp": mtp})
    write_table(table, tmp_path / "new.json")
    assert read_table(tmp_path / "new.json") == table


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("nothing", "stride bench cost"),
        ({**TABLE, "format": "other"}, "stride bench cost"),
        ([], "stride bench cost"),
        ({name: value for name, value in TABLE.items() if name != "engine"}, "has no 'engine'; .*stride bench cost"),
        (changed("drafters", {"mtp": TABLE["drafters"]["mtp"]}), "no 'none'"),
        (changed("drafters", 3), "wrong kind"),
        (changed("drafters/none/decode", []), "at least one point"),
        (changed("drafters/none/prompts", []), "at least one point"),
        (changed("drafters/none/prompts", [[1, 0, 0.1], [1, 0, 0.2]]), "same step.*leave one out"),
        (changed("drafters/none/decode", [[1, 1, 0, 0, 0.1]] * 2), "same step.*leave one out"),
        (changed("drafters/none/decode", [[1, 1, 0, 0]]), r"\[requests, rows, depth, context, seconds\]"),
        (changed("drafters/none/prompts", [[1, 1]]), r"\[rows, context, seconds\]"),
        (changed("drafters/none/decode", [[1, 1, 0, 0, 0.0]]), "seconds must be a number above 0"),
        (changed("drafters/none/decode", [[1, 1, 0, 0, "x"]]), "seconds must be a number above 0"),
        (changed("drafters/none/decode", [[2, 1, 0, 0, 0.1]]), "2 to 2 rows"),
        (changed("drafters/none/decode", [[1, 1, 1, 0, 0.1]]), "depth must be an integer from 0 to 0"),
        (changed("drafters/mtp/decode", TABLE["drafters"]["mtp"]["decode"][:-1]), "8 requests at depth 2.*add one"),
        (changed("drafters/mtp/rows_by_depth", [1, 2]), "begin with 0"),
        (changed("drafters/mtp/usual_depth", 3), "usual_depth must be an integer from 0 to 2"),
        (changed("engine/num_pages", 0), "num_pages must be an integer from 1"),
        (changed("engine/lag", 2), "lag must be an integer from 0 to 1"),
        (changed("engine/patience", -1), "patience must be an integer from 0"),
        (changed("engine/colour", 2), "wrong kind.*colour"),
        (
            changed("requests/0".replace("/0", ""), [{"prompt_tokens": 1, "max_tokens": 1, "chances": {"mtp": [2]}}]),
            "0 to 1",
        ),
        ({**TABLE, "stairs": [1, 4]}, "add stairs"),
    ],
)
def test_bad_tables_are_refused(written: Callable[[Any], Path], table: Any, words: str) -> None:
    """With the file's name and what to do."""
    with pytest.raises(ValueError, match=words) as caught:
        read_table(written(table))
    assert "table.json" in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*stride bench cost"):
        read_table(tmp_path / "none.json")


def test_a_table_that_cannot_be_written(written: Callable[[Any], Path], tmp_path: Path) -> None:
    table = read_table(written(TABLE))
    assert isinstance(table, CostTable)
    with pytest.raises(ValueError, match="name another file"):
        write_table(table, tmp_path)
