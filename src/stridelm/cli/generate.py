"""`stride generate`: complete one prompt, streaming the text, and print metrics.

Text goes to stdout and everything else to stderr, so that a pipe receives only the completion.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stridelm.builtin import builtin_path
from stridelm.cli.main import INTERRUPTED
from stridelm.cli.options import add_options, given_options
from stridelm.config import EngineConfig
from stridelm.params import SamplingParams, Speculation
from stridelm.text.generation_config import read_generation_config

if TYPE_CHECKING:
    from stridelm.llm import LLM, RequestOutput

ALONE: dict[str, Any] = {
    "max_num_seqs": 1,
    "enable_prefix_caching": False,
    "per_request_spec_decode_metrics": "none",
    "skip_tokenizer_init": False,
}
"""EngineConfig for a single prompt given as text."""
SEEN_BY_PROGRAMS = ("logprobs", "prompt_logprobs", "logprob_token_ids", "return_hidden_states")
UNSEEN = ("n", *SEEN_BY_PROGRAMS, "priority", "target_tps", "structured_outputs", "speculation")
"""SamplingParams without effect here, where one sample is shown as text and no other request waits."""
DEFAULTS: dict[str, Any] = {"max_tokens": 256, "temperature": 0.0}
"""Defaults of this command in place of SamplingParams', unless the checkpoint recommends others: a longer output, and
the same one each time."""
HARMLESS = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Replacements for control characters of the model's output, which a terminal would otherwise execute."""


def add_parser(subparsers: Any) -> None:
    """Add `generate` to the main command."""
    parser = subparsers.add_parser("generate", help="complete a prompt", description=__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint directory (default: the built-in model)")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to complete")
    prompt.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="the same from a file, without its final newline; - for standard input",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write every step's rows and verdict as JSON lines")
    add_options(parser.add_argument_group("sampling"), SamplingParams, skip=UNSEEN, shown=DEFAULTS)
    add_options(parser.add_argument_group("engine"), EngineConfig, skip=("model", *ALONE))


def run(args: argparse.Namespace) -> int:
    """Complete the prompt. Raises ValueError if it cannot be served."""
    prompt, params = _read_prompt(args), _read_params(args)
    if isinstance(sys.stdout, io.TextIOWrapper):  # replace characters that the terminal lacks
        sys.stdout.reconfigure(errors="replace")
    with _trace_file(args.trace) as trace:
        llm = _load(args)
        if trace is not None:
            from stridelm.engine.trace import JsonTracer

            llm.engine.tracer = JsonTracer(llm.engine.ledger, llm.engine.stats, llm.engine.tokenizer, trace)
        return _complete(llm, prompt, params, args.json)


def _read_params(args: argparse.Namespace) -> SamplingParams:
    """In order of precedence: the given options, the checkpoint's recommendations, the command's defaults."""
    config = EngineConfig(**given_options(args, EngineConfig), **ALONE)
    path = Path(config.model) if config.model is not None else builtin_path()
    recommended = read_generation_config(config.generation_config, path)
    recommended.tell()
    return SamplingParams(**{**DEFAULTS, **recommended.values, **given_options(args, SamplingParams)})


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return str(args.prompt)
    name = args.prompt_file
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        # Editors end a file with a newline, which the model would take for part of the prompt.
        return data.decode("utf-8").removesuffix("\n")
    except OSError as error:
        raise ValueError(f"--prompt-file {name} cannot be read: {error.strerror}; name a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {name} is not UTF-8 ({error.reason}); convert it first") from error


@contextmanager
def _trace_file(path: Path | None) -> Iterator[TextIO | None]:
    """The file to trace to, opened before the model is loaded, so that a bad path is reported at once."""
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--trace {path} cannot be written: {error.strerror}; name another file") from error
    with file:
        yield file


def _load(args: argparse.Namespace) -> LLM:
    """The model and its engine; on a terminal, with a status message."""
    from rich.console import Console

    console = Console(stderr=True)
    waiting = console.status("loading the model") if console.is_terminal else nullcontext()
    with waiting:
        from stridelm.llm import LLM

        return LLM(**given_options(args, EngineConfig), **ALONE)


def _complete(llm: LLM, prompt: str, params: SamplingParams, as_json: bool) -> int:
    """Stream the completion, or collect it for one JSON object; then print the metrics. Returns the exit code."""
    job: RequestOutput | None = None
    code, shown = 0, 0
    marks = HARMLESS if sys.stdout.isatty() else {}
    started = time.perf_counter()
    with closing(llm.stream(prompt, params)) as outputs:
        if not as_json:
            _echo(prompt)
        try:
            for job in outputs:
                if not as_json:
                    sys.stdout.write(job.outputs[0].text[shown:].translate(marks))
                    sys.stdout.flush()
                    shown = len(job.outputs[0].text)
        except KeyboardInterrupt:  # show the text so far and abort the request
            code = INTERRUPTED
    if job is None:
        return code
    record = _record(llm, job, time.perf_counter() - started)
    if as_json:
        sys.stdout.write(json.dumps(record) + "\n")
    else:
        sys.stdout.write("" if record["text"].endswith("\n") else "\n")
        sys.stdout.flush()
        _print_figures(record)
    return code


def _echo(prompt: str) -> None:
    """Print the prompt on a terminal, so that the completion continues it; a pipe receives only the completion."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        Console(soft_wrap=True).print(Text(prompt, style="dim"), end="")


def _record(llm: LLM, job: RequestOutput, elapsed_s: float) -> dict[str, Any]:
    """The completion and its metrics, as the JSON object that `--json` prints.

    elapsed_s: time since the request was made, used if it was aborted.
    """
    sample = job.outputs[0]
    metrics = sample.metrics
    assert metrics is not None
    count = len(sample.token_ids)
    return {
        "model": str(llm.engine.loaded.path),
        "drafter": metrics.drafter,
        "depth": metrics.depth,
        "acceptance": metrics.acceptance,
        "acceptance_length": metrics.acceptance_length,
        "simulated": metrics.simulated,
        "lossless": metrics.lossless,
        "seed": metrics.seed,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "prompt_tokens": len(job.prompt_token_ids),
        "completion_tokens": count,
        "finish_reason": sample.finish_reason or "abort",
        "stop_reason": sample.stop_reason,
        "steps": metrics.steps,
        "tokens_per_step": count / metrics.steps,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "ttft_s": metrics.ttft_s,
        "tokens_per_s": count / (metrics.latency_s or elapsed_s),
    }


def _print_figures(record: dict[str, Any]) -> None:
    """Print one line of metrics to stderr."""
    from rich.console import Console
    from rich.text import Text

    rule = Speculation(acceptance=record["acceptance"], acceptance_length=record["acceptance_length"]).rule
    lossy = "" if record["lossless"] else " (simulated acceptance)" if record["simulated"] else " (lossy)"
    parts = (
        f"{record['drafter']}, {rule}{lossy}",
        f"{record['completion_tokens']} tokens in {record['steps']} steps",
        f"{record['tokens_per_step']:.2f} tokens/step",
        f"first token after {record['ttft_s']:.2f} s",
        f"{record['tokens_per_s']:.1f} tokens/s",
    )
    Console(stderr=True, soft_wrap=True).print(Text(" | ".join(parts), style="dim"))
