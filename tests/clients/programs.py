"""Clients that run in a process of their own: those whose dependencies are not the environment's, and those of npm."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", "."]
NPM = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]


def python_client(name: str, url: str) -> dict[str, Any]:
    """What the Python program `name` printed of the server at this URL, with the packages of `name`.txt before ours."""
    wanted = HERE / "apart" / f"{name}.txt"
    packages = _installed([wanted], [*PIP, "-r", str(wanted)])
    path = os.pathsep.join([str(packages), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it downloads its prices otherwise
    return _printed([sys.executable, str(HERE / "apart" / f"{name}_client.py"), f"{url}/v1"], env)


def node_client(name: str, url: str) -> dict[str, Any]:
    """What the JavaScript program `name` printed of the server at this URL."""
    place = _installed([HERE / "js" / "package.json", HERE / "js" / "package-lock.json"], NPM)
    for program in (HERE / "js").glob("*.js"):  # where node finds the packages beside them
        shutil.copy(program, place)
    return _printed(["node", str(place / f"{name}_client.js"), f"{url}/v1"], {})


def _installed(files: list[Path], command: list[str]) -> Path:
    """The folder into which the command has put what these files list: once per environment. The test is skipped where
    that cannot be, except in CI."""
    listed = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    place = Path(sys.prefix) / "share" / "clients" / f"{files[0].stem}-{listed[:12]}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    begun = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        for file in files:
            shutil.copy(file, begun)
        subprocess.run(command, cwd=begun, check=True, capture_output=True, text=True, timeout=280)
        os.replace(begun, place)
    except (OSError, subprocess.SubprocessError) as error:
        if place.is_dir():  # another process was faster
            return place
        if "CI" in os.environ:
            raise AssertionError(f"{error}: {getattr(error, 'stderr', '')}") from error
        pytest.skip(f"what {files[0].name} lists cannot be installed: {error}")
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return place


def _printed(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
