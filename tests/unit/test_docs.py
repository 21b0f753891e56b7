"""The documentation and the forge's forms: links lead somewhere, also on the site, and pictures match the output of
their script.

`make docs` checks the links of the site once more, with what builds it; here nothing of that need be installed.
"""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from stridelm.models import MODELS, WITH_TEXT
from stridelm.models.storage import METHODS

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
PICTURES = runpy.run_path(str(IMAGES / "architecture.py"))["pictures"]()
destination = runpy.run_path(str(ROOT / "tools" / "docs_site.py"))["destination"]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "tests/**/*.md", "src/**/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def text_of(document: Path) -> str:
    """Without code, in which brackets are not links and # does not begin a heading."""
    return FENCED.sub("", (ROOT / document).read_text(encoding="utf-8"))


def links_of(document: Path) -> list[str]:
    found = LINK.findall(re.sub(r"`[^`]*`", "", text_of(document)))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@cache
def anchors_of(document: Path) -> frozenset[str]:
    """As forges and Markdown's own `toc` derive them from headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(document), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("document", ["README.md", "docs/limits.md"])
def test_every_model_type_is_named(document: str) -> None:
    """Where users look whether theirs is supported."""
    text = text_of(Path(document))
    assert [kind for kind in MODELS if f"`{kind}`" not in text] == []


def test_every_model_type_has_a_row() -> None:
    """And no others have one, in the table of what is supported of each."""
    section = text_of(Path("docs/limits.md")).partition("### Families and formats")[2].partition("## ")[0]
    table = section.partition("| weights |")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == sorted({*MODELS, *WITH_TEXT})
    assert [method for method in METHODS if f"`quant_method: {method}`" not in section] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    """To an existing file, and to a heading in it."""
    wrong = []
    for link in links_of(document):
        path, _, anchor = link.partition("#")
        target = (ROOT / document.parent / path).resolve() if path else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors_of(target.relative_to(ROOT))):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize(
    ("page", "link", "leads_to"),
    [
        ("path.md", "../src/stridelm/types.py", "https://forge/x/blob/HEAD/src/stridelm/types.py"),
        ("benchmarks.md", "../benchmarks/results", "https://forge/x/tree/HEAD/benchmarks/results"),
        ("path.md", "decisions/0013-one-request-fails.md", "decisions/0013-one-request-fails.md"),
        ("operations.md", "../SECURITY.md", "security.md"),
        ("decisions/0003-row-invariance.md", "../../CONTRIBUTING.md#tests", "../contributing.md#tests"),
        ("index.md", "docs/serving.md#routes", "serving.md#routes"),
        ("index.md", "CONTRIBUTING.md", "contributing.md"),
        ("path.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("path.md", "#7-observe", "#7-observe"),
        ("path.md", "nowhere.md", "nowhere.md"),
    ],
)
def test_links_on_the_site(page: str, link: str, leads_to: str) -> None:
    """Links to documents become links to their pages, other files to the repository; MkDocs reports missing ones."""
    assert destination(page, link, "https://forge/x/") == leads_to


def test_a_file_without_a_repository_is_no_link() -> None:
    assert destination("path.md", "../src/stridelm/types.py", None) is None


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_their_script_draws(name: str) -> None:
    """To edit a picture, edit docs/images/architecture.py and run it."""
    assert (IMAGES / name).read_bytes() == PICTURES[name].encode()


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_say_what_they_show(name: str) -> None:
    """Well-formed, with a title and a description for those who cannot see them, and colours for a dark page."""
    tree = ElementTree.fromstring(PICTURES[name])
    space = "{http://www.w3.org/2000/svg}"
    assert all(tree.findtext(f"{space}{part}") for part in ("title", "desc"))
    assert "prefers-color-scheme: dark" in PICTURES[name]


def test_the_forge_runs_what_ci_runs() -> None:
    """A single step: a check written elsewhere could not be run locally."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
def test_forms_are_whole(name: str) -> None:
    """Every field has a label and an id of its own; a forge silently drops a form that it cannot read."""
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
    options = [option for field in fields for option in field["attributes"].get("options", ())]
    assert all(isinstance(option, str) for option in options)
