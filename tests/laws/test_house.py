"""Structural laws of the package: imports run downwards, registries choose kernels, a drafter is a folder, only the
cache moves `computed`.

They are checked in the source, so that a violation fails as soon as it is written.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import stridelm
from support.doubles.forks import Forks, forks

PACKAGE = Path(stridelm.__path__[0])
LEAVES = (
    "types",
    "batch",
    "stats",
    "config",
    "faults",
    "registry",
    "options",
    "params",
    "values",
    "threads",
    "primitives",
)
LAYERS = (
    {*LEAVES, "arena", "builtin", "compiled", "heap", "progress", "upload"},
    {"kernels", "text", "parallel"},
    {"cache", "attention", "sample", "grammar", "chat", "models"},
    {"schedule", "draft", "run", "verify"},
    {"engine", "llm", "llm_inputs", "text_engine"},
    {"bench", "train", "simulate"},
    {"cli", "server"},
)
"""Packages and modules of Stride, bottom layer first. Each may import its own layer and those below."""
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
DRAFTER_AGNOSTIC = ("engine", "schedule", "cache", "attention", "run", "verify")
"""Packages that refer to no drafter by name."""
COMMON_WORDS = {"none", "mask", "model"}
"""Drafters' names that are also common words: `attention_mask` refers to no drafter, `mask_drafter` does."""

FILES = sorted(PACKAGE.rglob("*.py"))


def shown(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def package_of(path: Path) -> str:
    """`engine` for engine/step.py, `types` for types.py, "" for the package's own __init__.py."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    parts = ("stridelm", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, node: ast.AST | None = None) -> Iterator[str]:
    """Dotted names of everything that a file imports, at any level and also under TYPE_CHECKING."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for child in ast.walk(node or tree_of(path)):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                above = package.split(".")[: len(package.split(".")) - child.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in child.names)


def imports_when_run(path: Path) -> set[str]:
    """Packages imported when the file is imported: not those under TYPE_CHECKING or inside functions."""
    found: set[str] = set()
    pending: list[ast.stmt] = list(tree_of(path).body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            pending += statement.orelse
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            found.update(name.split(".")[0] for name in imports(path, statement))
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    return found


def packages_imported(path: Path) -> set[str]:
    names = [name.split(".") for name in imports(path)]
    return {name[1] for name in names if name[0] == "stridelm" and len(name) > 1 and name[1] in LAYER_OF}


def folders() -> list[str]:
    """Drafters that live in a folder of their own, except `none`, which cannot be deleted: it is plain decoding."""
    inside = (PACKAGE / "draft").iterdir()
    return sorted(path.name for path in inside if (path / "drafter.py").is_file() and path.name != "none")


def rule_folders() -> list[str]:
    """Acceptance rules that live in a folder of their own."""
    return sorted(path.parent.name for path in (PACKAGE / "verify").glob("*/rule.py"))


# Layers


def test_every_package_has_a_layer() -> None:
    """A new package must be given a layer before anything imports it."""
    assert {package_of(path) for path in FILES} <= {"", *LAYER_OF}


def test_imports_run_downwards() -> None:
    faults = [
        f"{shown(path)} imports {other}"
        for path in FILES
        for other in packages_imported(path)
        if package_of(path) and LAYER_OF[other] > LAYER_OF[package_of(path)]
    ]
    assert not faults, faults


def test_no_import_cycles() -> None:
    """No file imports itself through others, not even for a type: files can be read in the order of their imports."""
    files = {module_name(path): path for path in FILES}
    needs = {
        module: {name if name in files else name.rpartition(".")[0] for name in imports(path)} & files.keys() - {module}
        for module, path in files.items()
    }
    while needs:
        ready = {module for module, others in needs.items() if not others & needs.keys()}
        assert ready, f"these import one another: {sorted(needs)}"
        needs = {module: others for module, others in needs.items() if module not in ready}


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_import_only_leaves(leaf: str) -> None:
    path = PACKAGE / f"{leaf}.py"
    assert packages_imported(path) <= set(LEAVES)
    assert "torch" not in imports_when_run(path)


def test_serving_never_imports_training() -> None:
    """Only `stride train` does so."""
    serving = [path for path in FILES if package_of(path) != "train" and path != PACKAGE / "cli" / "train.py"]
    faults = [shown(path) for path in serving if "train" in packages_imported(path)]
    assert not faults, faults


def test_the_package_imports_no_recipe() -> None:
    """Recipes are on the path here, for their tests, but not where the package is installed."""
    recipes = {path.stem for path in (PACKAGE.parents[1] / "recipes").glob("*/*.py")}
    faults = [shown(path) for path in FILES if recipes & {name.split(".")[0] for name in imports(path)}]
    assert not faults, faults


def test_the_planner_is_pure() -> None:
    """No tensor and no device, not even for a type: a plan is made from queue state and from what steps took. (Depths
    are chosen with arrays of the host, of as many numbers as there are requests and levels.)"""
    impure = {"torch", "triton"}
    planner = [path for path in FILES if package_of(path) == "schedule"]
    faults = [shown(path) for path in planner if impure & {name.split(".")[0] for name in imports(path)}]
    faults += [shown(path) for path in planner if "batch" in packages_imported(path)]
    assert planner
    assert not faults, faults


def test_registries_choose_kernels() -> None:
    """Code that imports a kernel inside a function bypasses the registry. Only products may: each weight type has its
    own kernel."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    choosing = {
        shown(path)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if package_of(path) != "kernels" and isinstance(node, functions)
        if any(name.startswith("stridelm.kernels") for name in imports(path, node))
    }
    layers = ("products", "expert_products", "fp8", "fp8_experts")
    assert choosing <= {f"models/layers/{name}.py" for name in layers}


def test_no_cache_of_the_process_holds_tensors() -> None:
    """What steps share belongs to their engine (arena.py), which gives its memory back."""
    caches = {"cache", "lru_cache"}
    faults = [
        f"{shown(path)}: {node.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and caches & {name_of(each) for each in node.decorator_list}
        if node.returns is not None and "Tensor" in ast.unparse(node.returns) and node.name not in GENERATOR
    ]
    assert not faults, faults


GENERATOR = {"_constants", "_weyl"}
"""The numbers of the noise's generator on a device: 24 of them, the same for all engines."""


def name_of(decorator: ast.expr) -> str:
    """Of `cache`, `functools.cache` or `lru_cache(maxsize=8)`: what is called."""
    return ast.unparse(decorator).partition("(")[0].rpartition(".")[2]


# Drafters


def words(identifier: str) -> list[str]:
    """`MaskDrafter` and `mask_drafter` as [mask, drafter]."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower().split("_")


def contains_name(identifier: str, name: str) -> bool:
    """Whether an identifier contains a drafter's name; if that is a common word, only together with `draft` or
    `drafter`."""
    parts, wanted = words(identifier), words(name)
    at = [i for i in range(len(parts)) if parts[i : i + len(wanted)] == wanted]
    return bool(at) and (name not in COMMON_WORDS or any(word.startswith("draft") for word in parts))


@cache
def identifiers(path: Path) -> frozenset[str]:
    fields = ("id", "attr", "arg", "name", "asname")
    values = (getattr(node, field, None) for node in ast.walk(tree_of(path)) for field in fields)
    return frozenset(part for value in values if isinstance(value, str) for part in value.split("."))


@cache
def strings(path: Path) -> frozenset[str]:
    """String literals except docstrings and other bare strings, which are prose."""
    nodes = list(ast.walk(tree_of(path)))
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    literals = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in prose)
    return frozenset(node.value for node in literals if isinstance(node.value, str))


def namings(path: Path, name: str) -> list[str]:
    """Every place where a file names a drafter: as an identifier, as a string, or by importing its folder."""
    home = f"stridelm.draft.{name}"
    found = [word for word in identifiers(path) if contains_name(word, name)]
    found += [repr(text) for text in strings(path) if text == name]
    found += [module for module in imports(path) if f"{module}.".startswith(f"{home}.")]
    return [f"{shown(path)} names {name}: {word}" for word in found]


def test_no_drafter_is_named() -> None:
    """Those packages treat all drafters alike."""
    from stridelm.draft import DRAFTERS

    agnostic = [path for path in FILES if package_of(path) in DRAFTER_AGNOSTIC]
    faults = [fault for path in agnostic for name in {*DRAFTERS, *folders()} for fault in namings(path, name)]
    assert not faults, faults


@pytest.mark.parametrize(
    ("identifier", "name", "expected"),
    [
        ("NgramDrafter", "ngram", True),
        ("max_ngram", "ngram", True),
        ("ngrams_seen", "ngram", False),
        ("frozen_kv_rows", "frozen_kv", True),
        ("attention_mask", "mask", False),
        ("MaskDrafter", "mask", True),
        ("mask_draft_rows", "mask", True),
        ("model", "model", False),
    ],
)
def test_contains_name(identifier: str, name: str, expected: bool) -> None:
    assert contains_name(identifier, name) == expected


@pytest.fixture(scope="module")
def programs() -> Iterator[Forks]:
    """They import Stride themselves, and find imported what it imports."""
    with forks(["fastapi", "numba", "torch._dynamo", "transformers.generation", "triton", "llguidance"]) as programs:
        yield programs


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("tiny")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def options_alone(package: str, name: str) -> set[str]:
    """Options that only this drafter or rule has."""
    from stridelm.draft import DRAFTERS
    from stridelm.verify import RULES

    pairs = [(registry, other) for registry in (RULES, DRAFTERS) for other in registry]
    owner = DRAFTERS if package == "draft" else RULES
    others = [registry.options(other) for registry, other in pairs if (registry, other) != (owner, name)]
    return set(owner.options(name).names()).difference(*(options.names() for options in others))


def test_options_alone() -> None:
    assert options_alone("draft", "suffix") == {"suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"}
    assert options_alone("verify", "trust") == {"confidence"}
    assert not options_alone("draft", "ngram")


@pytest.mark.parametrize(
    ("package", "name"), [*(("draft", name) for name in folders()), *(("verify", name) for name in rule_folders())]
)
def test_deleting_one_breaks_nothing_else(
    package: str, name: str, tiny_checkpoint: Path, programs: Forks, tmp_path: Path
) -> None:
    """Without the folder of a drafter or rule everything else imports, neither it nor its own options are listed, and
    prompts are completed."""
    copy = tmp_path / "stridelm"
    # With what lies compiled beside its source: to compile it anew would take most of the time.
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.rmtree(copy / package / name)
    arguments = str(copy), str(tiny_checkpoint), name, *options_alone(package, name)
    run = programs.run("support.checks.survivors", *arguments, path=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    plain, automatic = json.loads(run.stdout.splitlines()[-1])
    assert len(plain) == 6
    assert automatic == plain


# The ledger


def moves_computed(tree: ast.AST) -> Iterator[int]:
    """Lines that assign an attribute called `computed`, by a statement or by `setattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and node.attr == "computed":
            yield node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            if any(isinstance(arg, ast.Constant) and arg.value == "computed" for arg in node.args):
                yield node.lineno


def test_only_the_cache_moves_computed() -> None:
    others = [path for path in FILES if package_of(path) != "cache"]
    faults = [f"{shown(path)}:{line}" for path in others for line in moves_computed(tree_of(path))]
    assert not faults, faults


def test_moves_computed_finds_every_way() -> None:
    ways = "r.computed = 1\nr.computed += 1\na, r.computed = 1, 2\nsetattr(r, 'computed', 3)\nprint(r.computed)"
    assert sorted(moves_computed(ast.parse(ways))) == [1, 2, 3, 4]


# Every file


def test_every_file_has_a_docstring() -> None:
    """Only an empty file goes without one."""
    faults = [shown(path) for path in FILES if tree_of(path).body and not ast.get_docstring(tree_of(path))]
    assert not faults, faults


def test_annotations_are_not_evaluated() -> None:
    """`from __future__ import annotations` is in every file that defines something."""
    defining = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.AnnAssign
    files = [path for path in FILES if any(isinstance(node, defining) for node in tree_of(path).body)]
    faults = [shown(path) for path in files if "__future__.annotations" not in set(imports(path))]
    assert not faults, faults
