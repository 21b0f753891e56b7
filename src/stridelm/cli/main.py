"""Entry point of the command line: finds the subcommand, runs it, and turns errors into exit codes.

Only the chosen subcommand's file is imported, so that `stride --help` and a mistyped name respond at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from stridelm import __version__

COMMANDS = {
    "generate": "complete a prompt, streaming the text",
    "serve": "serve a model over HTTP, with OpenAI's API",
    "explain": "say of a traced step why its requests got their rows",
    "compile": "compile an engine's kernels ahead, for an image",
    "bench": "compare drafters with plain decoding",
    "simulate": "simulate loads on cards whose steps were measured",
    "train": "train a model or a drafter on your own text",
    "inspect": "describe a checkpoint and the drafters it can use",
}
"""Subcommand -> what it does. `stridelm.cli.<subcommand>` holds it."""

USER_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations: an option is spelt as documented, or refused."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message}\nSee `{self.prog} --help`.\n")


def build_parser(chosen: str | None = None) -> Parser:
    """The parser of the whole command, in which only the subcommand `chosen` has its options."""
    parser = Parser(prog="stride", description="Serve language models, with multi-token prediction as the normal case.")
    parser.add_argument("--version", action="version", version=f"stride {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name == chosen:
            importlib.import_module(f"stridelm.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `stride` with `argv` (default: the process's own arguments). Returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # The top level has no option that takes a value, so the first plain word is the subcommand.
    chosen = next((word for word in argv if not word.startswith("-")), None)
    try:
        args = build_parser(chosen if chosen in COMMANDS else None).parse_args(argv)
        return int(importlib.import_module(f"stridelm.cli.{args.command}").run(args))
    except ValueError as error:
        print(f"stride: error: {_one_line(error)}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`stride ... | head`). Without this, Python would report it again on its final
        # flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _one_line(error: ValueError) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
