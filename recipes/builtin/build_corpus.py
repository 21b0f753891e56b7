"""Build the corpus of Stride's built-in model from permissively licensed Python packages.

    python recipes/builtin/build_corpus.py --work data --archive .corpus/corpus.tar.xz

The corpus itself is not in the repository; this script, `packages.txt` and `held_out.txt` reproduce it. It fetches
every pinned wheel through pip (without building anything), refuses packages and single files whose licence is not
permissive, adds one CPython standard library, cleans and deduplicates with `stridelm.train.corpus` and `caps.py`, holds
out whole packages, and writes `train/` and `valid/` into one archive. Every package used and its licence are recorded
in `licences.json`.
"""

from __future__ import annotations

import argparse
import email
import email.message
import io
import json
import logging
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath

from caps import cap_packages

from stridelm.train.corpus import Document, Report, read_documents, split

logger = logging.getLogger("build_corpus")

HERE = Path(__file__).parent
SUFFIXES = (".py", ".pyi")
MB = 1_000_000
# Maximum text per package. Breadth teaches more than depth at this size, so the limit is low, and the
# packages whose code Python developers call and imitate the most get more room.
CAP = 0.7 * MB
ROOM_BY_SIZE = {
    14: "cpython",
    12: "torch transformers",
    5: "django jax matplotlib numpy pandas scikit-learn scipy",
    3: "diffusers keras pydantic pytest sqlalchemy sympy",
    2: "accelerate aiohttp astropy celery dask datasets distributed flax ipython mypy numba optax peft "
    "setuptools sphinx statsmodels timm tornado trl twisted xarray",
}
ROOM = {package: size * MB for size, packages in ROOM_BY_SIZE.items() for package in packages.split()}
HELD_OUT_CAP = 0.4 * MB  # of each held-out package: a varied validation set that is still quick to evaluate
FETCH_SECONDS = 240

PERMISSIVE = re.compile(r"\b(MIT|BSD|0BSD|Apache|PSF|Python Software Foundation|ISC|Python-2\.0)\b", re.IGNORECASE)
# Licences that are accepted only together with one of the above, on small bundled parts ("BSD-3-Clause AND Zlib").
COMPANION = re.compile(r"\b(Zlib|CC0-1\.0|Unlicense|MIT-0|BSL-1\.0|Unicode-3\.0|HPND|MIT-CMU|LLVM-exception)\b", re.I)
COPYLEFT = re.compile(
    r"\b[AL]?GPL|General Public|Mozilla Public|\bMPL\b|\bEPL\b|Eclipse Public|CDDL|EUPL|Proprietary"
    r"|Commons Clause|modified|Repoze|CC[- ]BY[- ](?:NC|SA)|Non-?Commercial"
    r"|Business Source|\bBUSL|\bSSPL|Elastic License",
    re.IGNORECASE,
)
# Scientific wheels state the licence of the Fortran runtime they bundle as a binary; no Python text comes
# from it.
RUNTIME = re.compile(r"\(?L?GPL-[\d.]+(?:-or-later|-only|\+)? WITH GCC-exception-[\d.]+\)?", re.IGNORECASE)
# A single file may have another licence than its package (vendored code), stated in its header.
FILE_COPYLEFT = re.compile(
    r"GNU (?:Lesser |Library |Affero )?(?:General )?Public Licen[sc]e"
    r"|SPDX-License-Identifier:[^\n]*\b(?:[AL]?GPL|MPL)"
    r"|Mozilla Public License|under the (?:terms of the )?[AL]?GPL|MPL[- ]?(?:v\.? ?)?2",
    re.IGNORECASE,
)
SHEBANG = re.compile(r"#!.*\n")
HEADER = re.compile(r"(?:[ \t]*(?:#.*)?\n)+")
NOTICE = re.compile(r"copyright|licen[sc]e|all rights reserved", re.IGNORECASE)
# Folders with copies of other projects: duplicates at best, under another licence at worst.
VENDORED = re.compile(r"_?vendor(?:ed)?|_?extern|externals|third_?party")


def read_list(path: Path) -> list[str]:
    """Non-empty lines of a text file without their comments."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


# --------------------------------------------------------------------------------------------------- fetching


def fetch(requirement: str, wheels: Path) -> Path | None:
    """Download the wheel of one requirement (`name==version`) into `wheels/<name>/`; None if pip cannot."""
    name = re.split(r"[=<>~! ]", requirement)[0]
    folder = wheels / name
    if not any(folder.glob("*.whl")):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        try:
            done = subprocess.run(
                [*command, "-d", str(folder), requirement],
                capture_output=True,
                text=True,
                timeout=FETCH_SECONDS,
            )
        except subprocess.TimeoutExpired:
            logger.warning("%s: skipped, no wheel within %d s", requirement, FETCH_SECONDS)
            return None
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "ERROR" in line), "pip failed")
            logger.warning("%s: skipped, %s", requirement, reason)
            return None
    return next(iter(sorted(folder.glob("*.whl"))), None)


def unpack(wheel: Path, target: Path) -> int:
    """Extract the Python sources of a wheel below `target`; returns the number of files."""
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            inside = PurePosixPath(entry.filename)
            if not wanted(inside) or ".." in inside.parts or inside.is_absolute():
                continue
            destination = target / inside
            destination.parent.mkdir(parents=True, exist_ok=True)
            destination.write_bytes(archive.read(entry))
            count += 1
    return count


def wanted(path: PurePosixPath) -> bool:
    """Python source that the package wrote itself."""
    return path.suffix in SUFFIXES and not any(map(VENDORED.fullmatch, path.parts[:-1]))


def copy_stdlib(source: Path, target: Path) -> int:
    """Copy a standard library (`.../lib/python3.x`) with its tests below `target`; returns the number of
    files."""
    count = 0
    for file in sorted(source.rglob("*")):
        inside = PurePosixPath(file.relative_to(source).as_posix())
        # Site-packages is other packages; the two test folders hold deliberately broken encodings.
        if {"site-packages", "bad_coding", "cjkencodings"}.intersection(inside.parts):
            continue
        if wanted(inside) and file.is_file():
            destination = target / inside
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, destination)
            count += 1
    return count


# --------------------------------------------------------------------------------------------------- licences


def licence_of(wheel: Path) -> tuple[str, str, str]:
    """(name, version, licence) from a wheel's metadata; the licence is "" if it states none."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        headers = email.message_from_bytes(archive.read(metadata))
        licence = stated_licence(headers) or _licence_file(archive, names)
    return str(headers["Name"]), str(headers["Version"]), licence


def stated_licence(headers: email.message.Message) -> str:
    """The licence that package metadata states: the SPDX expression, else classifiers, else the free-text
    field."""
    if headers["License-Expression"]:
        return str(headers["License-Expression"]).strip()
    classifiers = [
        str(value).split("::")[-1].strip()
        for value in headers.get_all("Classifier", [])
        if str(value).startswith("License ::") and not str(value).endswith("OSI Approved")
    ]
    # Full licence texts are sometimes pasted in; their first line names the licence.
    free = next((line.strip() for line in str(headers["License"] or "").splitlines() if line.strip()), "")
    free = "" if free.lower() in ("unknown", "none", "dual license", "see license", "other") else free[:100]
    if classifiers:
        return " AND ".join(classifiers) + (f" ({free})" if COPYLEFT.search(free) else "")
    return free


def _licence_file(archive: zipfile.ZipFile, names: Iterable[str]) -> str:
    """Recognise the licence text itself, for packages that only ship the file."""
    for name in names:
        if re.search(r"\.dist-info/(?:licenses/)?(?:LICEN[SC]E|COPYING)[^/]*$", name, re.IGNORECASE):
            text = " ".join(archive.read(name).decode("utf-8", "replace").split())
            if COPYLEFT.search(text[:3000]):
                return "copyleft (licence file)"
            if "Permission is hereby granted, free of charge" in text:
                return "MIT (licence file)"
            if "Apache License" in text[:400]:
                return "Apache-2.0 (licence file)"
            if "Redistribution and use in source and binary forms" in text:
                return "BSD (licence file)"
    return ""


def permissive(licence: str) -> bool:
    """Whether every part of a stated licence is permissive. For "A OR B" one permissive choice is enough."""
    licence = RUNTIME.sub("", licence)
    if " OR " in licence and " AND " not in licence:
        return any(permissive(choice) for choice in licence.strip("() ").split(" OR "))
    if COPYLEFT.search(licence):
        return False
    parts = [part.strip("() ") for part in re.split(r" AND | and ", licence)]
    return bool(PERMISSIVE.search(licence)) and all(
        PERMISSIVE.search(part) or COMPANION.search(part) for part in parts if part
    )


# --------------------------------------------------------------------------------------------------- assembly


def gather(
    requirements: list[str], corpus: Path, wheels: Path, stdlib: Path, keep_archives: bool
) -> dict[str, dict[str, object]]:
    """Fill `corpus/<package>/` and return the licence record of each package; unusable ones are skipped."""
    records: dict[str, dict[str, object]] = {}
    with ThreadPoolExecutor(2) as pool:
        for requirement, wheel in zip(requirements, pool.map(lambda r: fetch(r, wheels), requirements), strict=True):
            if wheel is None:
                continue
            name, version, licence = licence_of(wheel)
            package = re.sub(r"[-_.]+", "-", name).lower()
            if not permissive(licence):
                logger.warning("%s: refused, licence is %r", requirement, licence)
            elif unpack(wheel, corpus / package):
                records[package] = {"version": version, "licence": licence}
            else:
                logger.warning("%s: skipped, it holds no Python source", requirement)
            if not keep_archives:
                shutil.rmtree(wheel.parent)
    copy_stdlib(stdlib, corpus / "cpython")
    records["cpython"] = {"version": stdlib.name.removeprefix("python"), "licence": "PSF-2.0"}
    return records


def clean(corpus: Path, held_out: list[str], cap: float, seed: int) -> list[Document]:
    """Read, filter, deduplicate and cap (bytes per package) the gathered text."""
    report = Report()
    documents = read_documents(corpus, SUFFIXES, report=report)
    logger.info("read: %s", report.summary())
    allowed = [document for document in documents if not FILE_COPYLEFT.search(document.text, 0, 4000)]
    stripped = [replace(document, text=strip_header(document.text)) for document in allowed]
    allowed = [document for document in stripped if document.text.strip()]
    describe("after licence headers", allowed)
    room = {package: int(size) for package, size in ROOM.items()}
    room |= dict.fromkeys(held_out, int(HELD_OUT_CAP))
    capped = cap_packages(allowed, int(cap), exceptions=room, seed=seed)
    describe("after the cap", capped)
    return capped


def strip_header(text: str) -> str:
    """Remove a copyright or licence comment at the top of a file, keeping a shebang.

    Such a comment is in every other file, nearly word for word: it would take up much of a small model's vocabulary
    and attention, and make it look better at predicting than it is. `licences.json` records what was used.
    """
    shebang = SHEBANG.match(text)
    start = shebang.end() if shebang else 0
    header = HEADER.match(text, start)
    if header and NOTICE.search(header.group()):
        return text[:start] + text[header.end() :]
    return text


def describe(stage: str, documents: list[Document]) -> None:
    """Log the size of one stage."""
    size = sum(len(document.text.encode()) for document in documents)
    packages = len({document.package for document in documents})
    logger.info("%s: %d packages, %d files, %.1f MB", stage, packages, len(documents), size / MB)


def write_tree(documents: list[Document], root: Path) -> None:
    """Write documents as files below `root`, replacing what was there."""
    shutil.rmtree(root, ignore_errors=True)
    for document in documents:
        file = root / document.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(document.text, encoding="utf-8", newline="\n")


def write_archive(sides: dict[str, list[Document]], path: Path, dictionary: int) -> None:
    """Write one `tar.xz` with a folder per side, sorted by path and compressed with a dictionary (bytes) that spans the
    whole corpus, because repetition in source code is mostly across files. Owner and times are zero, so equal documents
    give an equal archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary, "nice_len": 273}]
    with (
        lzma.open(path, "wb", filters=filters) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for side, documents in sides.items():
            for document in documents:
                write_member(archive, f"{side}/{document.path}", document.text.encode())


def write_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Append one regular file."""
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def main() -> None:
    """Parse the arguments and run every stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the text; needs about 2 GB")
    parser.add_argument("--archive", type=Path, default=Path(".corpus/corpus.tar.xz"))
    parser.add_argument("--packages", type=Path, default=HERE / "packages.txt")
    parser.add_argument("--held-out", type=Path, default=HERE / "held_out.txt")
    parser.add_argument("--licences", type=Path, default=HERE / "licences.json", help="record of packages and licences")
    parser.add_argument("--stdlib", type=Path, default=Path(email.__file__).parents[1], help="default: this Python's")
    parser.add_argument("--cap-mb", type=float, default=CAP / MB, help="maximum text of most packages, in MB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dictionary-mb", type=int, default=256, help="xz dictionary; packing needs 11 times that")
    parser.add_argument("--every", type=int, default=1, help="archive only every N-th training file")
    parser.add_argument("--keep-archives", action="store_true", help="keep the downloaded wheels")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")

    raw = arguments.work / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    records = gather(
        read_list(arguments.packages),
        raw,
        arguments.work / "wheels",
        arguments.stdlib,
        arguments.keep_archives,
    )
    held_out = read_list(arguments.held_out)
    documents = clean(raw, held_out, arguments.cap_mb * MB, arguments.seed)
    train, valid = split(documents, held_out, arguments.seed)
    describe("train", train)
    describe("valid", valid)
    sides = {"train": train, "valid": valid}
    for side, chosen in sides.items():
        write_tree(chosen, arguments.work / "corpus" / side)
        for document in chosen:
            record = records[document.package]
            record["side"] = side
            record["files"] = int(str(record.get("files", 0))) + 1
            record["bytes"] = int(str(record.get("bytes", 0))) + len(document.text.encode())
    used = {name: record for name, record in sorted(records.items()) if "files" in record}
    arguments.licences.write_text(json.dumps(used, indent=1) + "\n")
    shutil.rmtree(raw)
    # The licence record covers everything that was read, even if only every N-th file is archived.
    sides["train"] = sides["train"][arguments.every - 1 :: arguments.every]
    write_archive(sides, arguments.archive, arguments.dictionary_mb << 20)
    logger.info("%s: %.1f MB", arguments.archive, arguments.archive.stat().st_size / MB)


if __name__ == "__main__":
    main()
