"""What KV in eight bits costs in quality: loss of text on which the model was not trained, and how many drafts are
accepted, with `--kv-cache-dtype auto` and `fp8`.

    python benchmarks/kv_dtype.py TEXT [MODEL] --dtype bfloat16 --json results/kv_dtype.jsonl

TEXT: a directory of Python files, such as that of an installed package which recipes/builtin/held_out.txt lists. Their
text is cut into windows, of which some are drawn by hash; the loss is over all their tokens but the first. Acceptance
is greedy, as `stride bench acceptance` measures it, over all shipped prompts. On a CPU give --attention reference, so
that nothing but the dtype of KV differs.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stridelm import LLM, SamplingParams
from stridelm.bench.acceptance import measure_acceptance
from stridelm.bench.prompts import load_prompts
from stridelm.bench.repetition import SHORTEST
from stridelm.bench.results import append_result
from stridelm.bench.settings import JSON_HELP, AcceptanceSettings
from stridelm.bench.variants import read_variants

KV = ("auto", "fp8")


@dataclass(frozen=True)
class Settings:
    model: str | None
    text: str
    dtype: str
    device: str
    attention: str
    windows: int
    window: int
    drafters: str
    max_tokens: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", metavar="TEXT", help="directory of Python files")
    parser.add_argument("model", nargs="?", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto", help="attention backend")
    parser.add_argument("--windows", type=int, default=64, help="windows of text")
    parser.add_argument("--window", type=int, default=512, help="tokens in a window")
    parser.add_argument("--drafters", default="mtp@3,eagle@3,mask@3")
    parser.add_argument("--max-tokens", type=int, default=max(64, SHORTEST))
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    args = vars(parser.parse_args())
    file = args.pop("json")
    settings = Settings(**args)
    measured = {kv: measure(settings, kv) for kv in KV}
    show(measured)
    if file:
        append_result(file, "kv_dtype", replace(settings, text=Path(settings.text).name), measured=measured)
    return 0


def measure(settings: Settings, kv: str) -> dict[str, Any]:
    """Nats per token, and tokens per step of each drafter."""
    llm = LLM(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        attention=settings.attention,
        kv_cache_dtype=kv,
        enable_prefix_caching=False,
        depth=None,
    )
    engine = llm.engine
    found = {"nats": nats(llm, windows(llm, settings))}
    variants = read_variants(settings.drafters.split(","), (), engine.loaded.target)
    acceptance = AcceptanceSettings(max_tokens=settings.max_tokens, temperature=(0.0,))
    for row in measure_acceptance(engine, variants, load_prompts(), acceptance).rows:
        if row.bucket == "all" and row.acceptance is not None:
            found[row.label] = row.acceptance.tokens_per_step
    return found


def windows(llm: LLM, settings: Settings) -> list[list[int]]:
    """Tokens of each window, the same for every model with this tokenizer."""
    assert llm.engine.tokenizer is not None
    found = []
    for path in sorted(Path(settings.text).rglob("*.py")):
        ids = llm.engine.tokenizer.encode(path.read_text(encoding="utf-8"))
        whole = range(0, len(ids) - settings.window + 1, settings.window)
        name = path.relative_to(settings.text)
        found += [(hashlib.sha256(f"{name} {at}".encode()).digest(), ids[at : at + settings.window]) for at in whole]
    if len(found) < settings.windows:
        raise SystemExit(f"{settings.text} has {len(found)} windows; give more text, or fewer --windows")
    return [ids for _, ids in sorted(found)[: settings.windows]]


def nats(llm: LLM, texts: list[list[int]]) -> float:
    """Mean over all tokens but each text's first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = [], 0
    for ids, output in zip(texts, llm.generate(texts, params), strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            total.append(-entry[token].logprob)
            count += 1
    return math.fsum(total) / count


def show(measured: dict[str, dict[str, Any]]) -> None:
    table = Table(
        "kv_cache_dtype", "nats per token", *(f"{name}, tokens per step" for name in list(measured["auto"])[1:])
    )
    for kv, values in measured.items():
        table.add_row(kv, *(f"{value:.4f}" for value in values.values()))
    Console(width=120, highlight=False).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
