"""`stride serve`: an HTTP server with OpenAI's API.

Every option may also be set in a YAML file (--config), spelt like the option without its leading dashes, or in the
environment, as STRIDE_MAX_NUM_SEQS for --max-num-seqs. The command line takes precedence over the environment, and the
environment over the file.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stridelm.cli.main import Parser
from stridelm.cli.options import add_options, given_options
from stridelm.cli.service_links import service_links
from stridelm.config import EngineConfig
from stridelm.options import settings
from stridelm.server.config import ServerConfig

if TYPE_CHECKING:
    from stridelm.server.messages import Ready

FIXED: dict[str, Any] = {"skip_tokenizer_init": False}
"""Fields of EngineConfig that are not options here, since clients send text."""
PREFIX = "STRIDE_"
logger = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    """Add `serve` to the main command."""
    parser = subparsers.add_parser("serve", help="serve a model over HTTP", description=__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with options")
    _add_groups(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Raises ValueError if the configuration cannot be served."""
    import uvloop

    from stridelm.server.logs import set_up_logging

    # A shell has its background jobs ignore SIGINT. A server handles the signal all the same, from here to its end: it
    # is sent by who wants to stop it, and one that went on would keep its port and its device.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    server, engine = read_configs(args, os.environ)
    server = server.resolve(engine)
    set_up_logging(logging.WARNING, server.log_json)
    logging.getLogger("stridelm.access").setLevel(logging.INFO)
    if links := service_links(os.environ, PREFIX):
        logger.warning(
            "ignored %s: addresses of a Kubernetes service, not options; set enableServiceLinks: false in the pod spec "
            "to avoid them",
            ", ".join(links),
        )
    if server.api_server_count == 1:
        from stridelm.server.run import serve
    else:  # a process that only starts others needs less
        from stridelm.server.frontends.parent import serve
    try:
        uvloop.run(serve(server, engine, partial(_announce, server.names_of(engine.model)[0])))
    except RuntimeError as error:
        print(f"stride: error: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:  # SIGTERM while it was loading
        return 128 + signal.SIGTERM
    return 0


def read_configs(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[ServerConfig, EngineConfig]:
    """Merge file, environment and command line. Raises ValueError for options that are unknown or out of range."""
    given: dict[str, Any] = {}
    if args.config is not None:
        given |= _from_file(args.config)
    given |= _from_environment(environment)
    given |= given_options(args, ServerConfig) | given_options(args, EngineConfig)
    if args.model is not None:
        given["model"] = args.model
    server = {name: value for name, value in given.items() if name in _names(ServerConfig)}
    engine = {name: value for name, value in given.items() if name in _names(EngineConfig)}
    return ServerConfig(**server), EngineConfig(**engine, **FIXED)


def _add_groups(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_argument_group("server"), ServerConfig)
    add_options(parser.add_argument_group("engine"), EngineConfig, skip=("model", *FIXED))


def _names(cls: type) -> set[str]:
    return set(settings(cls)) - set(FIXED)


def _check_known(names: set[str], where: str) -> None:
    known = _names(ServerConfig) | _names(EngineConfig)
    unknown = sorted(names - known)
    if unknown:
        raise ValueError(f"{where}: unknown option {', '.join(unknown)}; see `stride serve --help`")


def _from_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read ({error}); name a YAML file of options") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"--config {path} contains no options; write lines such as max-num-seqs: 64")
    options = {name.replace("-", "_"): value for name, value in content.items()}
    _check_known(set(options), f"--config {path}")
    return options


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Values are parsed as on the command line; a flag is true or false, a repeated option is separated by commas."""
    links = service_links(environment, PREFIX)
    ours = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in links
    }
    _check_known(set(ours), "the environment")
    model = ours.pop("model", None)
    parser = Parser(prog="stride serve (environment)")
    _add_groups(parser)
    repeated = {"api_key", "operator_key", "allowed_hosts", "served_model_name", "drafter_model"}
    words: list[str] = []
    for name, value in ours.items():
        option = "--" + name.replace("_", "-")
        if value.lower() in ("true", "false"):
            words.append(option if value.lower() == "true" else f"--no-{option.removeprefix('--')}")
        else:
            words += [f"{option}={one}" for one in (value.split(",") if name in repeated else [value])]
    args = parser.parse_args(words)
    given = given_options(args, ServerConfig) | given_options(args, EngineConfig)
    return given if model is None else {**given, "model": model}


def _announce(name: str, ready: Ready, address: str) -> None:
    """Print the line that reports that the server is up. name: the model's."""
    depth = f", depth {ready.depth}" if ready.depth else ""
    print(
        f"serving {name} at {address} | drafter {ready.drafter}{depth}, {ready.acceptance} ({ready.why})",
        flush=True,
    )
