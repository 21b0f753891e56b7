"""An option is generated from a field: its name, its type, its default, and nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from stridelm.cli.options import add_options, given_options, read_options
from stridelm.config import EngineConfig
from stridelm.params import SamplingParams


@dataclass(frozen=True)
class Settings:
    batch_size: int = field(default=4, metadata={"help": "rows at once, 100% of them"})
    rate: float = 0.5
    name: str = "x"
    fast: bool = False
    rule: Literal["exact", "trust"] = "exact"
    limit: int | None = 16
    drafter: str | None = None
    drafters: tuple[str, ...] = ("none",)
    batch: tuple[int, ...] = (1,)
    stop: str | Sequence[str] | None = None
    ids: Sequence[int] | None = None
    mask: int | Sequence[int] | None = None
    phrases: Sequence[Sequence[int]] | None = None
    bias: Mapping[int, float] | None = None
    made: int = field(default=0, init=False)


def parse(*argv: str, cls: type = Settings, skip: tuple[str, ...] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, cls, skip=skip)
    return parser.parse_args(argv)


def test_nothing_given_is_the_default() -> None:
    assert given_options(parse(), Settings) == {}
    assert read_options(parse(), Settings) == Settings()


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--batch-size", "9"], "batch_size", 9),
        (["--rate", "1e-3"], "rate", 0.001),
        (["--fast"], "fast", True),
        (["--no-fast"], "fast", False),
        (["--rule", "trust"], "rule", "trust"),
        (["--limit", "3"], "limit", 3),
        (["--limit", "none"], "limit", None),
        (["--drafter", "none"], "drafter", "none"),  # a drafter's name, since the field holds text
        (["--drafters", "none,ngram"], "drafters", ("none", "ngram")),
        (["--drafters", "a=[(0,), (1,)],b,c=[2, 3]"], "drafters", ("a=[(0,), (1,)]", "b", "c=[2, 3]")),
        (["--batch", "1, 8"], "batch", (1, 8)),
        (["--batch", ""], "batch", ()),
        (["--stop", "a,b", "--stop", "\n"], "stop", ("a,b", "\n")),
        (["--ids", "1,2"], "ids", (1, 2)),
        (["--mask", "5"], "mask", (5,)),
        (["--phrases", "1,2", "--phrases", "3"], "phrases", ((1, 2), (3,))),
        (["--bias", "5=1.5", "--bias", "6=-2", "--bias", "5=0"], "bias", {5: 0.0, 6: -2.0}),
    ],
)
def test_values(argv: list[str], name: str, value: Any) -> None:
    assert given_options(parse(*argv), Settings) == {name: value}
    assert getattr(read_options(parse(*argv), Settings), name) == value


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--batch-size", "x"], "invalid int value"),
        (["--limit", "x"], "invalid int value"),
        (["--rule", "x"], "'x' is not one of: exact, trust"),
        (["--batch", "1,x"], "'1,x' is not a list of INT values separated by commas"),
        (["--bias", "5"], "'5' does not have the form INT=FLOAT"),
        (["--bias", "a=1"], "'a=1' does not have the form INT=FLOAT"),
        (["--batch_size", "1"], "unrecognized arguments"),
        (["--made", "1"], "unrecognized arguments"),
        (["--unknown", "1"], "unrecognized arguments"),
    ],
)
def test_refusals(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(*argv)
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err


def test_help_shows_text_and_default() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Settings)
    text = " ".join(parser.format_help().split())
    assert "--batch-size INT rows at once, 100% of them (default: 4)" in text
    assert "--rule {exact,trust}" in text
    assert "--bias KEY=VALUE" in text


def test_skipped_fields_and_extra_values() -> None:
    args = parse("--rate", "2", skip=("name",))
    assert read_options(args, Settings, name="y", rate=3.0) == Settings(name="y", rate=3.0)
    with pytest.raises(SystemExit):
        parse("--name", "y", skip=("name",))
    with pytest.raises(AssertionError, match="no field nome"):
        parse(skip=("nome",))


def test_a_command_may_have_defaults_of_its_own() -> None:
    """They appear in the help, whatever the dataclass says; options that were given are distinguished from them."""
    parser = argparse.ArgumentParser()
    add_options(parser, Settings, shown={"batch_size": 9, "name": "y"})
    assert given_options(parser.parse_args([]), Settings) == {}
    assert given_options(parser.parse_args(["--batch-size", "9"]), Settings) == {"batch_size": 9}
    assert "100% of them (default: 9)" in " ".join(parser.format_help().split())
    with pytest.raises(AssertionError, match="no field nome"):
        add_options(argparse.ArgumentParser(), Settings, shown={"nome": 1})


def test_two_dataclasses_share_a_parser() -> None:
    """The engine's configuration and the sampling parameters, as the commands use them."""
    parser = argparse.ArgumentParser()
    add_options(parser.add_argument_group("engine"), EngineConfig)
    add_options(parser.add_argument_group("sampling"), SamplingParams, skip=("speculation", "structured_outputs"))
    args = parser.parse_args(["--depth", "3", "--temperature", "0", "--stop", "\n\n", "--logit-bias", "7=-100"])
    assert read_options(args, EngineConfig).depth == 3
    params = read_options(args, SamplingParams)
    assert (params.temperature, params.stops, params.logit_bias) == (0.0, ("\n\n",), {7: -100.0})
