"""Train heads that draft for Stride's built-in model, on its own continuations, on one GPU.

    python recipes/builtin/build_corpus.py --work data --archive .corpus/corpus.tar.xz --every 5
    PYTHONPATH=src python recipes/builtin/heads.py --corpus .corpus/corpus.tar.xz --work /tmp/heads --parts /tmp/parts

The corpus only provides prompts, so a part of it (a fifth, above) or other Python is enough: any folder with train/ and
valid/, or one of packages, with those for validation named by --held-out. Prompts are continued once, into --work; a
second call reuses the continuations, and `--stages eagle3` trains only that head. --parts gets each head's weights, in
parts of limited size, and its other files. `--set mtp:muon_lr=0.03` changes a setting of one head. `--dry-run` needs no
corpus and no GPU: it runs a few steps on the package's own source, to check that everything works.

A head has at most 4 MB in bfloat16. The MTP module has the shape of the model's own blocks: 1.8M parameters. The
EAGLE-3 head drafts the 2,048 most frequent of 4,096 tokens, 95% of Python text; it has 4 query heads, one key/value
head and an MLP of 304: 2.0M parameters, of which 0.4M project the model's states and 0.8M are output rows.
The frozen_kv head, two layers of 192 over the last layer's keys and values, has 1.9M, of which 0.8M are output rows:

    PYTHONPATH=src python recipes/builtin/heads.py --stages frozen_kv --corpus .corpus/corpus.tar.xz \
        --work /tmp/heads --parts /tmp/parts
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

from train import carried_off, carry, described, made, overrides, unpack

import stridelm
from stridelm import LLM, SamplingParams
from stridelm.builtin import builtin_path
from stridelm.train.head_stages import KINDS, Prompts, train_head
from stridelm.train.prepare import prepare
from stridelm.train.settings import (
    ContinuationSettings,
    DataSettings,
    EagleSettings,
    FrozenKVSettings,
    HeadOptimSettings,
    HeadRunSettings,
    MtpSettings,
)

logger = logging.getLogger("heads")

STAGES: dict[str, tuple[type, ...]] = {
    "mtp": (MtpSettings, ContinuationSettings, HeadRunSettings, HeadOptimSettings),
    "eagle3": (EagleSettings, ContinuationSettings, HeadRunSettings, HeadOptimSettings),
    "frozen_kv": (FrozenKVSettings, ContinuationSettings, HeadRunSettings, HeadOptimSettings),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mtp": {"train_tokens": 20_000_000},
    "eagle3": {"train_tokens": 20_000_000, "draft_vocab_size": 2048, "heads": 4, "kv_heads": 1, "mlp": 304},
    "frozen_kv": {"train_tokens": 20_000_000, "mlp": 512},
}
DRY: dict[str, Any] = {
    "prompt_tokens": 16,
    "new_tokens": 16,
    "train_tokens": 128,
    "generate_batch": 8,
    "steps": 3,
    "batch_tokens": 128,
    "length": 32,
    "eval_steps": 3,
    "eval_tokens": 128,
    "log_steps": 1,
    "compile": False,
}
SERVED_DEPTH, SERVED_PAGES = 3, 2048


def main() -> None:
    """Parse the arguments and train every head."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--corpus", type=Path, help="tar.xz or folder of text to take prompts from")
    parser.add_argument(
        "--held-out", default=DataSettings().held_out, help="validation packages, for a folder that is not split yet"
    )
    parser.add_argument("--target", type=Path, default=builtin_path(), help="default: the built-in model")
    parser.add_argument("--work", type=Path, required=True, help="scratch; holds the heads at the end")
    parser.add_argument("--parts", type=Path, required=True, help="folder for the results, cut into parts")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--minutes", type=float, default=2.5, help="training time per head, compilation excluded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--set", action="append", default=[], metavar="STAGE:NAME=VALUE", help="a setting of a head; may be repeated"
    )
    args = parser.parse_args()
    if not set(args.stages.split(",")) <= set(STAGES):
        parser.error(f"--stages {args.stages}: choose among {', '.join(STAGES)}")
    if args.corpus is None and not args.dry_run:
        parser.error("give text for the prompts with --corpus, or --dry-run")
    with carried_off(args.parts):
        run(args, overrides(args.set, STAGES))


def run(args: argparse.Namespace, chosen: dict[str, dict[str, str]]) -> None:
    """The recipe, head by head; ends with one JSON line of results."""
    began = time.monotonic()
    corpus = unpack(args.corpus, args.work) if args.corpus else Path(stridelm.__path__[0])
    text = DataSettings(held_out="train" if args.corpus is None else args.held_out)
    data = prepare(corpus, args.work / "tokens", args.target, text, 2048, args.seed)
    summary: dict[str, Any] = {"data_seconds": round(time.monotonic() - began)}
    stages = args.stages.split(",")
    for stage in stages:
        values = {**DEFAULTS[stage], "seed": args.seed, **(DRY if args.dry_run else {"minutes": args.minutes})}
        settings, said, watched, optim = (made(cls, values, chosen[stage]) for cls in STAGES[stage])
        out, prompts = args.work / stage, Prompts(data.train, data.valid)
        result = train_head(KINDS[stage](settings), out, args.target, prompts, said, watched, optim, args.work / "said")
        carry(out, args.parts, stage)
        summary[stage] = {**described(result), "bytes": (out / "model.safetensors").stat().st_size}
        (args.parts / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for stage in stages:  # last, so that a failure here cannot lose a head
        size = (4, 8) if args.dry_run else (48, 128)
        summary[stage]["served"] = served(args.target, args.work / stage, KINDS[stage].drafter, *size)
    summary["wall_seconds"] = round(time.monotonic() - began)
    (args.parts / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary), flush=True)


def served(target: Path, head: Path, drafter: str, prompts: int, tokens: int) -> dict[str, float]:
    """Complete the benchmark's first `prompts` prompts greedily with the head as drafter: tokens per step, and the
    share of outputs that equal plain decoding's."""
    file = Path(stridelm.__path__[0]) / "bench" / "prompts.json"
    texts = [prompt["text"] for prompt in json.loads(file.read_text(encoding="utf-8"))["prompts"][:prompts]]
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    options: dict[str, Any] = {"model": str(target), "num_pages": SERVED_PAGES}
    plain = LLM(**options, drafter="none").generate(texts, params)
    drafted = LLM(**options, drafter=drafter, drafter_model=str(head), depth=SERVED_DEPTH).generate(texts, params)
    outputs = [output.outputs[0].token_ids for output in drafted]
    same = sum(ours == theirs.outputs[0].token_ids for ours, theirs in zip(outputs, plain, strict=True))
    steps = sum(output.metrics.steps for output in drafted if output.metrics)
    return {"tokens_a_step": round(sum(map(len, outputs)) / steps, 3), "as_plain": round(same / len(texts), 3)}


if __name__ == "__main__":
    main()
