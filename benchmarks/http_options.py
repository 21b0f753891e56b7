"""The command line of http_load.py, and what it settles."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from http_servers import installed_vllm
from load_requests import KINDS
from model_shapes import LLAMA_8B

from stridelm.bench.plot import check_plot
from stridelm.bench.settings import JSON_HELP

DRAFTERS = "ngram@3:synthetic:2.5,mask@2:synthetic:2.5,eagle@3:synthetic:2.5"


@dataclass(frozen=True)
class Settings:
    url: tuple[str, ...]
    serve: tuple[str, ...]
    streams: tuple[int, ...]
    kinds: tuple[str, ...]
    kind_streams: int
    drafters: tuple[str, ...]
    warm_up: float
    seconds: float
    layers: int
    tiny: bool
    in_process: bool
    server_options: str
    vllm: str | None
    """Its command, if it is among `serve`."""
    vllm_options: str

    @property
    def max_num_seqs(self) -> int:
        return max(*self.streams, self.kind_streams)

    def loads(self, server: str) -> list[tuple[str, int]]:
        """(kind, streams) of each load. Only Stride's requests may name drafters."""
        kinds = [kind for kind in self.kinds if not (server == "vllm" and kind == "drafters")]
        others = [(kind, self.kind_streams) for kind in kinds if kind != "plain"]
        base = [("plain", self.kind_streams)] if others and self.kind_streams not in self.streams else []
        return [*(("plain", streams) for streams in self.streams), *base, *others]


@dataclass(frozen=True)
class Options:
    settings: Settings
    json: Path | None
    plot: Path | None


def read_options(description: str | None, arguments: Sequence[str] | None) -> Options:
    """arguments: those of the process if None. Ends with the parser's error for options that would have no effect."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", action="append", default=[], help="a server that runs already; repeated: several")
    parser.add_argument(
        "--serve", help="servers to start, of stride,vllm (default: both that are installed, or none with --url)"
    )
    parser.add_argument("--streams", default="16,64,256")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--kind-streams", type=int, default=64, help="streams of the kinds that are not plain")
    parser.add_argument(
        "--drafters", default=DRAFTERS, help=f"NAME@DEPTH:RULE or NAME@auto:RULE of that kind's (default: {DRAFTERS})"
    )
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=30.0, help="the window")
    parser.add_argument("--layers", type=int, help="of the 8B shape (default: all 32)")
    parser.add_argument("--tiny", action="store_true", help="serve the built-in model; needs no GPU")
    parser.add_argument("--in-process", action=argparse.BooleanOptionalAction, help="the base without HTTP")
    parser.add_argument("--server-options", default="", metavar="OPTIONS", help="for `stride serve`, in quotes")
    parser.add_argument("--vllm-options", default="", metavar="OPTIONS", help="for `vllm serve`, in quotes")
    parser.add_argument("--vllm", metavar="COMMAND", help="vLLM's command, if not `vllm`")
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    parser.add_argument("--plot", type=Path, help="a chart of plain requests' times over streams (.svg, .png)")
    args = parser.parse_args(arguments)
    program = args.vllm or installed_vllm()
    installed = ["stride", *(["vllm"] if program else [])]
    serve = installed if args.serve is None and not args.url else [*filter(None, (args.serve or "").split(","))]
    if unknown := set(serve) - {"stride", "vllm"}:
        parser.error(f"--serve starts stride and vllm, not {', '.join(sorted(unknown))}; give others by --url")
    if "vllm" in serve and program is None:
        parser.error("there is no `vllm` on the path; install it, or name its command with --vllm")
    for name, given, server in (
        ("--server-options", args.server_options, "stride"),
        ("--vllm-options", args.vllm_options, "vllm"),
        ("--vllm", args.vllm, "vllm"),
    ):
        if given and server not in serve:
            parser.error(f"{name} is for a {server} server started here, and there will be none; leave it out")
    in_process = "stride" in serve if args.in_process is None else args.in_process
    if args.layers is not None and (args.tiny or not (serve or in_process)):
        parser.error("--layers is of the 8B shape, which nothing here will run; leave it out")
    if args.tiny and not (serve or in_process):
        parser.error("--tiny chooses what is served, and --url's servers have chosen; leave it out")
    kinds = tuple(args.kinds.split(","))
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kind {', '.join(sorted(unknown))}; choose of {', '.join(KINDS)}")
    settings = Settings(
        url=tuple(args.url),
        serve=tuple(serve),
        streams=tuple(int(count) for count in args.streams.split(",")),
        kinds=kinds,
        kind_streams=args.kind_streams,
        drafters=tuple(args.drafters.split(",")),
        warm_up=args.warm_up,
        seconds=args.seconds,
        layers=args.layers or LLAMA_8B["num_hidden_layers"],
        tiny=args.tiny,
        in_process=in_process,
        server_options=args.server_options,
        vllm=program if "vllm" in serve else None,
        vllm_options=args.vllm_options,
    )
    if args.plot:
        check_plot(args.plot)
    return Options(settings, args.json, args.plot)
