"""Known vulnerabilities of Stride's installed dependencies: `make audit`. Fails if there are any.

If PyPI's advisories are not available, pip-audit ends with an error or, behind a mirror that only serves files, reports
no vulnerabilities at all. So one package's advisories are requested first; if that fails, this is reported and nothing
is audited.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import metadata

import requests  # the client that pip-audit uses, so that both reach the same hosts
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ADVISORIES = "https://pypi.org/pypi"
TIMEOUT_S = 20


def installed(name: str) -> dict[str, str]:
    """Version of `name` and of everything that it depends on, without its extras."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(name, "")]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        name, extra = one
        distribution = metadata.distribution(name)
        versions[name] = Version(distribution.version).public  # 2.13.0 for 2.13.0+cpu: advisories do not list builds
        for line in distribution.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(needed.name), wanted) for wanted in ("", *needed.extras)]
    return versions


def silence(name: str, version: str) -> str | None:
    """Why a package's advisories are not available; None if they are."""
    try:
        answer = requests.get(f"{ADVISORIES}/{name}/{version}/json", timeout=TIMEOUT_S)
        answer.raise_for_status()
        return None if "vulnerabilities" in answer.json() else f"{answer.url} does not list any"
    except requests.RequestException as error:
        return str(error)


def main() -> int:
    versions = installed("stridelm")
    del versions["stridelm"]
    why = silence(*min(versions.items()))  # any package will do
    if why is not None:
        print(f"NOT AUDITED: {len(versions)} dependencies, because PyPI's advisories are not available: {why}")
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.writelines(f"{name}=={version}\n" for name, version in sorted(versions.items()))
        pins.flush()
        audit = ("-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner=off", "--requirement", pins.name)
        return subprocess.run([sys.executable, *audit]).returncode


if __name__ == "__main__":
    sys.exit(main())
