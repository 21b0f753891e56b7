"""Pick the benchmark's default prompts from the held-out packages of the built-in model's corpus.

    python recipes/builtin/make_prompts.py --corpus data/corpus --out src/stridelm/bench/prompts.json

Whole packages were held out, so no prompt was trained on. A prompt starts at the beginning of a function and is cut
either after its signature (and docstring) or between two statements of the body; the model continues from there.
Prompts are chosen by hash: the same corpus gives the same file, and nobody's taste influences it. The file alternates
between packages, so that its first N prompts are as mixed as all of them. Each prompt is listed with its package,
version and licence.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SHORTEST, LONGEST = 200, 800
"""Characters of a prompt: about 60 to 250 tokens with the built-in tokenizer."""
KINDS = ("signature", "body")
TEST_SHARE = 4
"""At most one prompt in this many comes from a package's tests, which are all alike."""

VENDORED = {"blib2to3", "_vendor", "vendor"}
"""Folders under another licence than their package's."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Candidate:
    path: str
    kind: str
    first_line: int
    last_line: int
    text: str

    @property
    def rank(self) -> str:
        """A sort key that is independent of the text's meaning."""
        return hashlib.sha256(f"{self.path}:{self.kind}:{self.last_line}:{self.text}".encode()).hexdigest()

    @property
    def is_test(self) -> bool:
        return any(part.startswith("test") or part == "conftest.py" for part in Path(self.path).parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus", type=Path, required=True, help="directory with valid/<package>/ from build_corpus.py"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--each", type=int, default=4, help="prompts of each package (default: 4)")
    args = parser.parse_args()
    packages = (HERE / "held_out.txt").read_text(encoding="utf-8").split()
    licences = json.loads((HERE / "licences.json").read_text(encoding="utf-8"))
    chosen = {package: choose(args.corpus / "valid" / package, args.each) for package in packages}
    prompts = [
        described(package, licences[package], chosen[package][turn])
        for turn in range(args.each)
        for package in packages
    ]
    document = {"name": "held-out Python", "source": "recipes/builtin/make_prompts.py", "prompts": prompts}
    args.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(prompts)} prompts, {args.out.stat().st_size} bytes")


def described(package: str, licence: dict[str, str], candidate: Candidate) -> dict[str, str]:
    where = f"{candidate.path}:{candidate.first_line}-{candidate.last_line}"
    about = {"package": package, "version": licence["version"], "licence": licence["licence"]}
    return {"name": f"{package}/{where}", **about, "kind": candidate.kind, "text": candidate.text}


def choose(root: Path, count: int) -> list[Candidate]:
    """`count` candidates of a package, alternating between kinds and with no file twice. Raises ValueError if there are
    fewer."""
    files_here = [path for path in sorted(root.rglob("*.py")) if not VENDORED & set(path.relative_to(root).parts)]
    found = sorted((c for path in files_here for c in candidates(root, path)), key=lambda c: c.rank)
    tests_left = count // TEST_SHARE
    picked: list[Candidate] = []
    while len(picked) < count:
        kind = KINDS[len(picked) % len(KINDS)]
        files = {c.path for c in picked}
        fit = (c for c in found if c.kind == kind and c.path not in files and (tests_left or not c.is_test))
        best = next(fit, None)
        if best is None:
            raise ValueError(f"{root} has fewer than {count} prompts; lower --each")
        tests_left -= best.is_test
        picked.append(best)
    return picked


def candidates(root: Path, path: Path) -> Iterator[Candidate]:
    """Every possible prompt of a file."""
    source = path.read_text(encoding="utf-8")
    if not source.isascii():
        return
    try:
        module = ast.parse(source)
    except SyntaxError:
        return
    lines = source.splitlines(keepends=True)
    name = str(path.relative_to(root))
    for start, function in functions(module):
        for kind, last in cuts(function):
            # Without the last line break: tokenizers merge it with the indentation that the model should write.
            text = "".join(lines[start - 1 : last]).rstrip()
            if SHORTEST <= len(text) <= LONGEST:
                yield Candidate(name, kind, start, last, text)


def functions(module: ast.Module) -> Iterator[tuple[int, Function]]:
    """(line at which a prompt starts, the function in which it is cut). The start is the function's own first line, or
    that of the function or class before it, so that some prompts show how this file is written."""
    for block in ast.walk(module):
        body = getattr(block, "body", None)
        if not isinstance(body, list) or not isinstance(block, ast.Module | ast.ClassDef):
            continue
        for i, node in enumerate(body):
            if isinstance(node, Function):
                yield first_line(node), node
                if i and isinstance(body[i - 1], Function):
                    yield first_line(body[i - 1]), node
        if isinstance(block, ast.ClassDef) and body and isinstance(body[-1], Function):
            yield first_line(block), body[-1]


def first_line(node: Function | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def cuts(function: Function) -> Iterator[tuple[str, int]]:
    """(kind, last line of the prompt). At least three lines of the function are left for the model."""
    body = function.body
    documented = len(body) > 1 and ast.get_docstring(function) is not None
    signature = last_line(body[0]) if documented else body[0].lineno - 1
    end = last_line(function)
    if function.lineno <= signature <= end - 3:
        yield "signature", signature
    for statement in body[documented:-1]:
        if last_line(statement) <= end - 3:
            yield "body", last_line(statement)


def last_line(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


if __name__ == "__main__":
    main()
