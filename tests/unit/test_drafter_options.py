"""An option is a field of its drafter's or rule's dataclass: that alone makes it known everywhere."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch

from stridelm import LLM, SamplingParams, Speculation
from stridelm.batch import Draft
from stridelm.bench.variants import read_variants
from stridelm.cli.main import build_parser
from stridelm.cli.serve import read_configs
from stridelm.config import EngineConfig
from stridelm.draft.base import Drafter, Group, TargetInfo, empty_draft
from stridelm.draft.options import LookupOptions
from stridelm.draft.settle import settle
from stridelm.options import Options, flat, known
from stridelm.server.config import ServerConfig
from stridelm.server.errors import ApiError
from stridelm.server.messages import encode, plain
from stridelm.server.openai.schemas import ChatRequest, CompletionRequest
from stridelm.server.sglang.schemas import NativeSampling
from stridelm.text.generation_config import GenerationDefaults
from stridelm.values import option
from support.doubles.tree_drafter import registered

TARGET = TargetInfo(9, 9, 9, (), None, torch.device("cpu"))
DEFAULTS = GenerationDefaults()


@dataclass(frozen=True)
class ShyOptions(LookupOptions):
    shy_rows: int = option(1, "with shy: rows that it thinks of", low=1, high=9)
    shy_mood: Literal["calm", "tense"] | None = option(None, "with shy: why")
    shy_aloud: bool = option(False, "with shy: whether it says so")
    shy_friends: tuple[str, ...] | None = option(
        None, "with shy: names", parse=lambda value: tuple(value.split(",") if isinstance(value, str) else value)
    )


class Shy(Drafter):
    """Thinks of rows and proposes none."""

    name = "shy"
    default_depth = 2

    def rows_by_depth(self, speculation: Speculation) -> tuple[int, ...]:
        depth, rows = self.depth_of(speculation), speculation.read(ShyOptions).shy_rows
        if rows > depth:
            raise ValueError(f"shy_rows {rows} is over depth {depth}; lower it")
        return tuple(range(depth + 1))

    def propose(self, group: Group) -> Draft:
        return empty_draft(len(group.spans), group.arena)


@pytest.fixture
def shy() -> Iterator[None]:
    with registered(Shy, ShyOptions):
        yield


HTTP: dict[str, Callable[[dict[str, Any]], SamplingParams]] = {
    "completions": lambda asked: CompletionRequest.model_validate({"prompt": "x", "speculation": asked}).sampling(
        DEFAULTS
    ),
    "chat": lambda asked: ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "speculation": asked}
    ).sampling(DEFAULTS),
    "generate": lambda asked: NativeSampling.model_validate({}).sampling(
        DEFAULTS, speculation=NativeSampling.model_validate({"speculation": asked}).speculation
    ),
}
"""How each endpoint reads a request's speculation."""


# Where options come from


@pytest.mark.usefixtures("shy")
def test_of_one_request() -> None:
    """Checked and normalised where it is given; options left open are read with their defaults."""
    asked: Any = Speculation("shy", shy_rows=3, shy_friends=["a", "b"])
    assert (asked.shy_rows, asked.shy_mood, asked.shy_friends) == (3, None, ("a", "b"))
    assert asked.read(ShyOptions) == ShyOptions(shy_rows=3, shy_friends=("a", "b"))
    assert asked.read(LookupOptions) == LookupOptions()
    assert SamplingParams(speculation={"drafter": "shy", "shy_rows": 3, "shy_friends": "a,b"}).speculation == asked
    assert Speculation(shy_mood="calm").over(asked) == replace(asked, shy_mood="calm")
    assert Speculation("none").over(asked) == Speculation("none")
    assert replace(asked, shy_rows=None) == Speculation("shy", shy_friends=("a", "b"))
    assert hash(asked) == hash(pickle.loads(pickle.dumps(asked))) and {asked: 1}[replace(asked)] == 1


@pytest.mark.usefixtures("shy")
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("shy_rows", 0, "shy_rows must be an integer from 1 to 9; got 0"),
        ("shy_rows", 1.5, "an integer"),
        ("shy_rows", True, "an integer"),
        ("shy_mood", "glad", "shy_mood must be calm or tense; got 'glad'"),
        ("shy_aloud", "no", "shy_aloud must be True or False"),
    ],
)
def test_values_that_cannot_be(name: str, value: Any, says: str) -> None:
    """Refused in every interface alike."""
    doors: list[Callable[[], Any]] = [
        lambda: Speculation("shy", **{name: value}),
        lambda: SamplingParams(speculation={"drafter": "shy", name: value}),
        lambda: EngineConfig(**{name: value}),
        lambda: LLM("nowhere", **{name: value}),
    ]
    for door in doors:
        with pytest.raises(ValueError, match=says):
            door()
    for ask in HTTP.values():
        with pytest.raises(ApiError, match=says):
            ask({"drafter": "shy", name: value})


@pytest.mark.usefixtures("shy")
@pytest.mark.parametrize("endpoint", HTTP)
def test_over_http(endpoint: str) -> None:
    """It reaches the engine's process unchanged."""
    params = HTTP[endpoint]({"drafter": "shy", "shy_rows": 2, "shy_friends": ["a"]})
    assert params.speculation == Speculation("shy", shy_rows=2, shy_friends=("a",))
    assert SamplingParams(**msgspec.msgpack.decode(encode(plain(params)))) == replace(params, n=1)


@pytest.mark.usefixtures("shy")
def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line, its environment and a benchmark's entries; the help shows the default."""
    args = build_parser("serve").parse_args(["serve", "--shy-rows", "3", "--shy-friends", "a,b"])
    server, config = read_configs(args, {"STRIDE_SHY_MOOD": "calm", "STRIDE_SHY_ALOUD": "true"})
    assert config.speculation.read(ShyOptions) == ShyOptions(None, None, 3, "calm", True, ("a", "b"))
    assert server == ServerConfig()
    generate = build_parser("generate").parse_args(["generate", "--prompt", "x", "--no-shy-aloud"])
    assert generate.shy_aloud is False and not hasattr(generate, "shy_rows")
    with pytest.raises(SystemExit):
        build_parser("serve").parse_args(["serve", "--help"])
    assert "--shy-rows INT with shy: rows that it thinks of (1)" in " ".join(capsys.readouterr().out.split())
    found = read_variants(["shy@3+shy_rows=2+shy_mood=calm"], [], TARGET)
    assert [variant.label for variant in found] == ["shy@3+shy_rows=2+shy_mood=calm"]
    with pytest.raises(SystemExit):  # a benchmark takes it per entry
        build_parser("bench").parse_args(["bench", "latency", "--shy-rows", "3"])


@pytest.mark.usefixtures("shy")
def test_of_an_engine(checkpoint: Callable[..., Path]) -> None:
    """It reaches the drafter, whose own checks run when the engine is made; a request may set another value."""
    given: dict[str, Any] = {"drafter": "shy", "shy_rows": 2, "prompt_lookup_min": 1}
    config: Any = EngineConfig(**given)
    assert config.shy_rows == flat(config)["shy_rows"] == 2 and config.shy_mood is None
    assert EngineConfig(**flat(config)) == config
    path, stand = checkpoint("qwen3"), {"drafter": "shy", "num_pages": 20, "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match="shy_rows 3 is over depth 2; lower it"):
        LLM(str(path), **stand, shy_rows=3)
    llm, params = LLM(str(path), **stand, shy_rows=2), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert len(llm.generate([[5, 6]], params)[0].outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match="shy_rows 9 is over"):
        llm.generate([[5, 6]], replace(params, speculation={"shy_rows": 9}))


@pytest.mark.usefixtures("shy")
def test_idle_options_are_refused() -> None:
    settled: Any = settle(Speculation("shy", shy_rows=2, prompt_lookup_min=1), TARGET)
    assert settled.shy_rows == 2
    for asked in (Speculation("ngram", shy_rows=2), Speculation("none", acceptance="typical", shy_rows=2)):
        with pytest.raises(ValueError, match="shy_rows would have no effect with drafter"):
            settle(asked, TARGET)
    with pytest.raises(ValueError, match="confidence would have no effect"):
        settle(Speculation("shy", confidence=0.5), TARGET)


def test_without_the_drafter_there_are_no_options(checkpoint: Callable[..., Path]) -> None:
    """Unknown ones are refused, and the error lists the known ones."""
    with registered(Shy, ShyOptions):
        assert "shy_rows" in known() and known()["prompt_lookup_min"].field in fields(ShyOptions)
    assert "shy_rows" not in known() and "prompt_lookup_min" in known()
    with pytest.raises(TypeError, match=r"takes no shy_rows; known: .*prompt_lookup_min"):
        Speculation("shy", shy_rows=2)
    with pytest.raises(TypeError, match="takes no shy_rows"):
        EngineConfig(shy_rows=2)  # type: ignore[call-arg]
    for door in (lambda asked: SamplingParams(speculation=asked), *HTTP.values()):
        with pytest.raises((ValueError, ApiError), match=r"unknown speculation option shy_rows; known: .*confidence"):
            door({"shy_rows": 2})
    with pytest.raises(ValueError, match=r"unknown option shy_rows; known: .*prompt_lookup_min"):
        LLM(str(checkpoint("qwen3")), shy_rows=2)
    with pytest.raises(SystemExit):
        build_parser("serve").parse_args(["serve", "--shy-rows", "3"])
    with pytest.raises(AttributeError, match="shy_rows"):
        _ = Speculation().shy_rows  # type: ignore[attr-defined]


# Options that are declared wrongly


@dataclass(frozen=True)
class Namesake(Options):
    prompt_lookup_min: int = option(3, "another thing under that name")


@dataclass(frozen=True)
class Taken(Options):
    depth: int = option(3, "a name that everybody has")


@dataclass(frozen=True)
class Unclear(Options):
    things: frozenset[int] | None = option(None, "of a type that no check is known for")


@pytest.mark.parametrize(
    ("options", "says"),
    [(Namesake, "two options are called prompt_lookup_min"), (Taken, "depth"), (Unclear, "give it a parse")],
)
def test_options_that_cannot_be(options: type[Options], says: str) -> None:
    with registered(Shy, options), pytest.raises(AssertionError, match=says):
        build_parser("serve")


def test_listing_them_imports_no_torch() -> None:
    """So that `stride --help` responds at once."""
    lines = (
        "import sys",
        "from stridelm.cli.main import build_parser",
        "for command in ('serve', 'generate', 'bench', 'inspect'): build_parser(command)",
        "from stridelm import Speculation",
        "assert Speculation(confidence=0.5).confidence == 0.5",
        "sys.exit('torch' in sys.modules)",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False).returncode == 0
