"""Limits how much of one package goes into the corpus, so that the largest do not crowd out the rest."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from stridelm.train.corpus import Document


def cap_packages(
    documents: Sequence[Document],
    max_bytes: int,
    *,
    exceptions: Mapping[str, int] | None = None,
    seed: int = 0,
) -> list[Document]:
    """Keep randomly chosen whole files, at most `max_bytes` (UTF-8 bytes) per package, so that no single package
    dominates. `exceptions` gives other limits by package. The order of the remaining files is unchanged."""
    exceptions = exceptions or {}
    groups: dict[str, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.package, []).append(document)
    kept: set[str] = set()
    for package, group in groups.items():
        limit = exceptions.get(package, max_bytes)
        # Seeded by name: the choice within one package does not change when another is added.
        random.Random(f"{seed}:{package}").shuffle(group)
        used = 0
        for document in group:
            size = len(document.text.encode())
            if used + size <= limit:
                used += size
                kept.add(document.path)
    return [document for document in documents if document.path in kept]
