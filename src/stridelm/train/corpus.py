"""Turn a directory of text into a clean training corpus.

A model learns whatever its corpus repeats, so the work here is mostly subtraction: files that are not prose
or code written by people (tables, blobs, minified or generated text), exact copies, and near copies such as
vendored or forked modules. The same machinery keeps a hold-out honest: validation is made of whole packages,
and anything that also occurs on the other side of the split is removed.

Everything is deterministic: the same files give the same corpus, whatever the order the file system lists
them in.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.progress import track

logger = logging.getLogger(__name__)

MAX_BYTES = 400_000
MIN_BYTES = 200

#: Consecutive non-blank lines that make one shingle. Shorter shingles match on idiom (an import block, a
#: licence header); longer ones miss copies with a few edited lines.
SHINGLE_LINES = 4
#: A file is a near-duplicate when at least this share of its shingles already occurs in files that were kept.
DUPLICATE_CONTAINMENT = 0.6
#: Across the train/validation split the bar is lower: even partial copies flatter a validation loss.
LEAK_CONTAINMENT = 0.3

_LONG_LINE = 400  # characters; people wrap well before this
_LONG_LINE_SHARE = 0.2  # of a file's characters
_MAX_LINE = 20_000  # characters; one such line is a blob whatever surrounds it
_DIGIT_SHARE = 0.22  # of non-space characters; numeric tables are above, the densest tests below
_BLOB_SHARE = 0.1  # of a file's characters inside hex escapes, hex numbers or base64-like runs
_COMPRESSED_SHARE = 0.09  # zlib level 1; source is 0.2-0.4, tables of one repeated row fall under 0.1

_BLOB = re.compile(r"(?:\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[0-7]{3}|0x[0-9a-fA-F]{2,}[,\s]*)+|[A-Za-z0-9+/=]{80,}")
_GENERATED = re.compile(
    r"(?:auto(?:matically)?[- ]?generated|generated (?:by|from|code)|code generator)(?s:.{0,300}?)"
    r"do(?: not|n't) (?:edit|modify|change)"
    r"|do(?: not|n't) (?:edit|modify|change)(?s:.{0,300}?)generated|@generated\b",
    re.IGNORECASE,
)
_GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi", "parsetab.py", "lextab.py")


@dataclass(frozen=True)
class Document:
    """One text file. `package` is the first path component under the corpus root, the unit of hold-out;
    `path` is the POSIX path below that root (it starts with `package`); `text` is the decoded content with
    `\\n` line ends."""

    package: str
    path: str
    text: str


@dataclass
class Report:
    """What reading a corpus kept and why it dropped the rest; pass one to `read_documents` to have it
    filled."""

    seen: int = 0
    kept: int = 0
    kept_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """One line for a log: files seen and kept, then each reason with its count."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common()) or "none"
        return f"kept {self.kept} of {self.seen} files ({self.kept_bytes / 1e6:.1f} MB); dropped: {reasons}"


# ---------------------------------------------------------------------------------------- reading and filters


def read_documents(
    root: str | os.PathLike[str],
    suffixes: Sequence[str] = (".py",),
    max_bytes: int = MAX_BYTES,
    min_bytes: int = MIN_BYTES,
    *,
    near_duplicates: float | None = DUPLICATE_CONTAINMENT,
    report: Report | None = None,
) -> list[Document]:
    """Read every file below `root` that ends in one of `suffixes`, dropping what a model should not learn
    from.

    Dropped: files outside `min_bytes..max_bytes` (bytes on disk), undecodable as UTF-8, generated, minified
    or data-like (see `unsuitable`), exact duplicates up to whitespace, and near-duplicates
    (`drop_near_duplicates` with `near_duplicates` as its threshold; None keeps them). A file directly in
    `root` is its own package.

    Returns the documents sorted by path. Raises ValueError if `root` is no directory, holds no file with the
    suffixes, or nothing survives.
    """
    root = Path(root)
    report = Report() if report is None else report
    documents = list(_readable(_listing(root, suffixes), root, max_bytes, min_bytes, report))
    documents = _drop(documents, drop_exact_duplicates(documents), "exact duplicate", report)
    if near_duplicates is not None:
        documents = _drop(documents, drop_near_duplicates(documents, near_duplicates), "near duplicate", report)
    report.kept = len(documents)
    report.kept_bytes = sum(len(document.text.encode()) for document in documents)
    logger.info("%s: %s", root, report.summary())
    if not documents:
        raise ValueError(
            f"none of the {report.seen} files under {root} are usable ({report.summary()}); "
            f"widen min_bytes/max_bytes ({min_bytes}..{max_bytes}) or point at other text"
        )
    return documents


def unsuitable(text: str, name: str = "") -> str | None:
    """Say why `text` is not worth training on ("generated", "minified", "data-like", ...), or None if it is
    fine.

    `name` is the file's name or path, used only to recognise generators that mark their output by name.
    """
    if "\0" in text:
        return "binary"
    if name.endswith(_GENERATED_SUFFIXES) or _GENERATED.search(text, 0, 2000):
        return "generated"
    lengths = [len(line) for line in text.split("\n")]
    if max(lengths) > _MAX_LINE or sum(n for n in lengths if n > _LONG_LINE) > _LONG_LINE_SHARE * len(text):
        return "minified"
    return "data-like" if _is_data(text) else None


def _is_data(text: str) -> bool:
    raw = text.encode()
    counts = np.bincount(np.frombuffer(raw, dtype=np.uint8), minlength=128)
    solid = len(raw) - int(counts[[9, 10, 13, 32]].sum())
    if not solid or int(counts[48:58].sum()) > _DIGIT_SHARE * solid:
        return True
    if sum(len(match) for match in _BLOB.findall(text)) > _BLOB_SHARE * len(text):
        return True
    # Short texts are left alone: the compressor has nothing to learn from yet, and copies are caught
    # elsewhere.
    return len(raw) > 4096 and len(zlib.compress(raw, 1)) < _COMPRESSED_SHARE * len(raw)


def _listing(root: Path, suffixes: Sequence[str]) -> list[Path]:
    if not root.is_dir():
        raise ValueError(f"no such directory: {root}; give the folder that holds the text files")
    if isinstance(suffixes, str) or not suffixes:
        raise ValueError(f'suffixes must be a list such as [".py", ".md"], not {suffixes!r}')
    wanted = tuple(suffixes)
    files = [Path(folder, name) for folder, _, names in os.walk(root) for name in names if name.endswith(wanted)]
    if not files:
        raise ValueError(f"no {' or '.join(wanted)} file under {root}; pass the suffixes your files have")
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def _readable(files: list[Path], root: Path, max_bytes: int, min_bytes: int, report: Report) -> Iterable[Document]:
    for file in track(files, description="reading", transient=True, disable=len(files) < 1000):
        report.seen += 1
        # A package is often installed with dangling or circular links; only real files count.
        if not file.is_file() or file.is_symlink():
            report.dropped["not a file"] += 1
            continue
        if not min_bytes <= file.stat().st_size <= max_bytes:
            report.dropped["size"] += 1
            continue
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            report.dropped["undecodable"] += 1
            continue
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        relative = file.relative_to(root)
        reason = unsuitable(text, relative.name)
        if reason:
            report.dropped[reason] += 1
        else:
            yield Document(relative.parts[0], relative.as_posix(), text)


def _drop(before: list[Document], after: list[Document], reason: str, report: Report) -> list[Document]:
    report.dropped[reason] += len(before) - len(after)
    return after


# ------------------------------------------------------------------------------------------------- duplicates


def drop_exact_duplicates(documents: Sequence[Document]) -> list[Document]:
    """Keep the first of every group of documents whose text is equal once runs of whitespace are
    collapsed."""
    seen: set[bytes] = set()
    kept = []
    for document in documents:
        digest = hashlib.blake2b(" ".join(document.text.split()).encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            kept.append(document)
    return kept


def drop_near_duplicates(documents: Sequence[Document], containment: float = DUPLICATE_CONTAINMENT) -> list[Document]:
    """Drop documents that mostly repeat the ones kept before them; the order of the rest is unchanged.

    A document goes when at least `containment` (0..1] of its line shingles occur in the union of the kept
    documents, so a file stitched together from several others is caught too, which pairwise similarity would
    miss. Larger documents are considered first: of a module and its excerpt, the module stays.
    """
    if not 0 < containment <= 1:
        raise ValueError(f"containment must be in (0, 1], not {containment}; 0.6 suits source code")
    ids, starts, distinct = _dense_shingles(documents)
    seen = np.zeros(distinct, dtype=bool)
    keep = np.zeros(len(documents), dtype=bool)
    for index in sorted(range(len(documents)), key=lambda i: (-len(documents[i].text), documents[i].path)):
        own = ids[starts[index] : starts[index + 1]]
        if seen[own].mean() < containment:
            keep[index] = True
            seen[own] = True
    return [document for document, kept in zip(documents, keep, strict=True) if kept]


def overlap(documents: Sequence[Document], reference: Sequence[Document]) -> np.ndarray:
    """Share of each document's line shingles that occur anywhere in `reference`: float64, shape
    [len(documents)]."""
    ids, starts, distinct = _dense_shingles([*documents, *reference])
    seen = np.zeros(distinct, dtype=bool)
    seen[ids[starts[len(documents)] :]] = True
    return np.array([seen[ids[starts[i] : starts[i + 1]]].mean() for i in range(len(documents))])


def _dense_shingles(documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray, int]:
    """Number all shingles 0..n-1: (ids of all documents in a row, where each document starts (one more entry
    than documents), n). Dense ids let sets of shingles be boolean arrays, which is what makes 300 MB a matter
    of seconds."""
    shingles = [_shingles(document.text) for document in documents]
    starts = np.cumsum([0, *(len(own) for own in shingles)])
    if not shingles:
        return np.zeros(0, dtype=np.int64), starts, 0
    unique, ids = np.unique(np.concatenate(shingles), return_inverse=True)
    return ids, starts, len(unique)


def _shingles(text: str) -> np.ndarray:
    """64-bit hashes of every run of SHINGLE_LINES non-blank lines, ignoring indentation; at least one
    entry."""
    # crc32 rather than hash(): Python salts the latter per process, and the corpus must not depend on that.
    lines = [zlib.crc32(stripped) for line in text.encode().split(b"\n") if (stripped := line.strip())]
    lines += [0] * (SHINGLE_LINES - len(lines))
    crc = np.array(lines, dtype=np.uint64)
    count = len(crc) - SHINGLE_LINES + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(SHINGLE_LINES):
        # Multiply-and-rotate by position: order matters, and two equal lines must not cancel out.
        hashes = (hashes + crc[offset : offset + count] + np.uint64(offset)) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes


# --------------------------------------------------------------------------------------------------- hold-out


def split(
    documents: Sequence[Document],
    held_out: Collection[str] | float,
    seed: int = 0,
    *,
    leak: float | None = LEAK_CONTAINMENT,
) -> tuple[list[Document], list[Document]]:
    """Hold out whole packages: (train, valid), each in the order given.

    `held_out` names the packages, or is the fraction (0..1) of all bytes to hold out in packages drawn with
    `seed`. Documents that share at least `leak` of their line shingles with the other side are dropped from
    the side that contains them, so no validation text was seen in training even when one package vendors
    another; None skips that. Raises ValueError if a name is unknown, or either side would be empty.
    """
    names = _draw(documents, held_out, seed) if isinstance(held_out, float | int) else _known(documents, held_out)
    train = [document for document in documents if document.package not in names]
    valid = [document for document in documents if document.package in names]
    if not train:
        raise ValueError("every package is held out; leave at least one for training")
    if leak is not None:
        leaked_train = overlap(train, valid) >= leak
        leaked_valid = overlap(valid, train) >= leak
        logger.info(
            "split: %d of %d validation and %d of %d training files overlap and are dropped",
            leaked_valid.sum(), len(valid), leaked_train.sum(), len(train),
        )  # fmt: skip
        train = [document for document, leaked in zip(train, leaked_train, strict=True) if not leaked]
        valid = [document for document, leaked in zip(valid, leaked_valid, strict=True) if not leaked]
    if not train or not valid:
        side = "training" if not train else "held-out"
        raise ValueError(f"every {side} document repeats the other side; hold out packages that are not copies")
    return train, valid


def _known(documents: Sequence[Document], held_out: Collection[str]) -> set[str]:
    names = {held_out} if isinstance(held_out, str) else set(held_out)
    if not names:
        raise ValueError("nothing is held out; name at least one package or give a fraction such as 0.02")
    present = {document.package for document in documents}
    if missing := sorted(names - present):
        some = ", ".join(sorted(present)[:8])
        raise ValueError(f"held-out packages not in the corpus: {', '.join(missing)}; it has {some}, ...")
    return names


def _draw(documents: Sequence[Document], fraction: float, seed: int) -> set[str]:
    if not 0 < fraction < 1:
        raise ValueError(f"the held-out fraction must lie between 0 and 1, not {fraction}; 0.02 is usual")
    sizes: Counter[str] = Counter()
    for document in documents:
        sizes[document.package] += len(document.text.encode())
    if len(sizes) < 2:
        raise ValueError(
            "holding out needs at least two packages (folders directly under the root); "
            "put the text into several folders, or name a separate validation directory"
        )
    names = sorted(sizes)
    random.Random(seed).shuffle(names)
    target = fraction * sum(sizes.values())
    chosen: set[str] = set()
    held = 0
    for name in names:
        # A package far beyond what is still missing would turn a 2 % hold-out into 30 %; try the next one.
        if held < target and held + sizes[name] <= 1.5 * target:
            chosen.add(name)
            held += sizes[name]
    # With few or lopsided packages nothing may fit; the smallest one is then the closest to what was asked.
    return chosen or {min(names, key=lambda name: (sizes[name], name))}
