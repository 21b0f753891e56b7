"""`stride compile`: compile the kernels that an engine with these options needs, and keep them on disk, so that later
starts on such a machine only load them. For building images.

Only the checkpoint's config.json is read: kernels depend on shapes, and the weights are random.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from stridelm.cli.options import add_options, given_options
from stridelm.config import EngineConfig

if TYPE_CHECKING:
    from stridelm.engine.engine import Engine

FIXED: dict[str, Any] = {
    "load_format": "dummy",
    "per_request_spec_decode_metrics": "none",
    "skip_tokenizer_init": True,
    "check_drafting": False,
    "capture": "startup",
    "enforce_eager": False,
    "check_pages": False,
}
"""Fields of EngineConfig that are not options here."""


def add_parser(subparsers: Any) -> None:
    """Add `compile` to the main command."""
    parser = subparsers.add_parser("compile", help="compile an engine's kernels ahead", description=__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint directory (default: the built-in model)")
    add_options(parser, EngineConfig, skip=("model", *FIXED))


def run(args: argparse.Namespace) -> int:
    """Start an engine, which compiles what is missing, and stop it. Raises ValueError if it cannot be started."""
    from stridelm.engine.start import start

    config = EngineConfig(**given_options(args, EngineConfig), **FIXED)
    began = time.perf_counter()
    engine = start(config)
    _serve_one(engine)
    seconds = time.perf_counter() - began
    where = _numba_cache() if engine.capture is None else _triton_cache()
    print(f"ready on {engine.loaded.device} after {seconds:.1f} s; kernels are in {where}")
    return 0


def _serve_one(engine: Engine) -> None:
    """One request, since a CPU's kernels are compiled when they are first used."""
    from stridelm.params import SamplingParams

    engine.add("first", [0] * 8, SamplingParams(max_tokens=2, ignore_eos=True))
    while engine.busy:
        engine.step()


def _numba_cache() -> str:
    from numba import config

    return str(config.CACHE_DIR or "the package's own directory, or in the user's cache if that cannot be written")


def _triton_cache() -> str:
    from triton import knobs

    return str(knobs.cache.dir)
