"""The shipped prompts are as documented, and users' files are read or refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

import stridelm
from stridelm.bench.prompts import BUILT_IN, load_prompts

REPOSITORY = Path(stridelm.__path__[0]).parents[1]
RECIPE = REPOSITORY / "recipes" / "builtin"


def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_prompts", RECIPE / "make_prompts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["make_prompts"] = module
    spec.loader.exec_module(module)
    return module


def test_shipped_prompts_come_from_every_held_out_package_with_its_licence() -> None:
    entries = json.loads(BUILT_IN.read_text(encoding="utf-8"))["prompts"]
    held_out = (RECIPE / "held_out.txt").read_text(encoding="utf-8").split()
    assert {entry["package"] for entry in entries} == set(held_out)
    assert all(entry["licence"] and entry["version"] for entry in entries)
    assert all(150 <= len(entry["text"]) <= 800 for entry in entries)
    assert len({entry["text"] for entry in entries}) == len(entries) == 48


def test_the_first_prompts_are_as_mixed_as_all() -> None:
    names = [prompt.name.partition("/")[0] for prompt in load_prompts().first(12).prompts]
    assert len(set(names)) == 12


def test_shipped_prompts_are_small() -> None:
    assert BUILT_IN.stat().st_size < 100_000


def test_prompts_are_cut_between_statements(tmp_path: Path) -> None:
    """A cut leaves three lines of the function to the model and never splits a statement."""
    body = "".join(f"    value_{i} = compute_something_long_enough({i})\n" for i in range(12))
    path = tmp_path / "module.py"
    path.write_text(f'def first(argument):\n    """What it does."""\n{body}    return argument\n', encoding="utf-8")
    found = list(recipe().candidates(tmp_path, path))
    assert {candidate.kind for candidate in found} == {"body"}
    lines = path.read_text(encoding="utf-8").splitlines()
    for candidate in found:
        assert candidate.text == "\n".join(lines[: candidate.last_line])
        assert candidate.last_line <= len(lines) - 3


def test_text_json_jsonl_and_directories(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('["one", {"text": "two"}]')
    (tmp_path / "b.jsonl").write_text('{"prompt": "three", "name": "third"}\n\n"four"\n')
    (tmp_path / "c.py").write_text("five\n")
    prompts = load_prompts(str(tmp_path)).prompts
    assert [prompt.text for prompt in prompts] == ["one", "two", "three", "four", "five\n"]
    assert prompts[2].name == "third" and prompts[4].name == "c.py"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.json", '{"x": 1}', "must hold a list"),
        ("a.json", "[3]", "neither a string"),
        ("a.json", "[]", "holds no prompt"),
        ("a.txt", "", "holds no prompt"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        load_prompts(str(path))


def test_a_missing_file_and_too_many_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="no prompts at"):
        load_prompts("/nowhere/at/all")
    with pytest.raises(ValueError, match="lower it"):
        load_prompts().first(1000)
