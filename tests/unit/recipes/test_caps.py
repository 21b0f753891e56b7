"""How much of one package goes into the corpus of the built-in model."""

from __future__ import annotations

from caps import cap_packages

from stridelm.train.corpus import Document

SIZES = {"a": range(200, 300, 10), "b": range(500, 600, 10)}
"""Bytes of each package's files."""


def corpus() -> list[Document]:
    """Some bytes are the second of a two-byte character, so that counting characters instead would be detected."""
    return [Document(p, f"{p}/m{i}.py", "é" * (n // 2)) for p, sizes in SIZES.items() for i, n in enumerate(sizes)]


def test_a_package_is_cut_to_its_limit_and_order_is_kept() -> None:
    """In bytes; a package that is an exception has its own limit."""
    documents = corpus()
    kept = cap_packages(documents, 900, exceptions={"b": 10**9})
    assert kept == [document for document in documents if document in kept]
    sizes = [len(document.text.encode()) for document in kept if document.package == "a"]
    assert 3 <= len(sizes) <= 4 and sum(sizes) <= 900
    assert sum(document.package == "b" for document in kept) == len(SIZES["b"])


def test_what_is_kept_of_a_package_depends_on_the_seed_and_on_that_package_alone() -> None:
    documents = corpus()
    alone = [document for document in documents if document.package == "a"]
    both = [document for document in cap_packages(documents, 900, seed=1) if document.package == "a"]
    assert cap_packages(alone, 900, seed=1) == both
    assert cap_packages(documents, 900, seed=1) != cap_packages(documents, 900, seed=2)
