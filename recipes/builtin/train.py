"""Train Stride's built-in model from its corpus archive, in one run on one GPU.

    PYTHONPATH=src python recipes/builtin/train.py --corpus .corpus/corpus.tar.xz \
        --tokenizer .corpus/tokenizer --work /tmp/builtin --parts /tmp/parts --base-minutes 7 --mask-minutes 5

Unpacks, encodes, trains the base and then its mask-token form, and writes both checkpoints into --work. --parts gets
them cut into parts of limited size (`cat base.safetensors.part-* > model.safetensors` joins them), each as soon as its
stage is over, so that no later failure can lose it. `--set base:muon_lr=0.03` changes a setting of one stage.
"""

from __future__ import annotations

import argparse
import json
import logging
import tarfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from stridelm.train.export import load_for_training
from stridelm.train.objective import plain_validation_loss
from stridelm.train.prepare import Prepared, on_device, prepare
from stridelm.train.settings import (
    BaseSettings,
    DataSettings,
    MaskOptimSettings,
    MaskSettings,
    ModelShape,
    OptimSettings,
    RunSettings,
)
from stridelm.train.stages import WORK, pick_device, train_base, train_mask
from stridelm.train.trainer import Result
from stridelm.train.windows import fixed_windows

logger = logging.getLogger("builtin")

PART_BYTES = 14 << 20
DEFAULTS: dict[str, dict[str, Any]] = {
    "base": {"eval_steps": 300, "log_steps": 50},
    "mask": {"batch_tokens": 65_536, "eval_steps": 400, "eval_tokens": 500_000},
}
STAGES: dict[str, tuple[type, ...]] = {
    "base": (ModelShape, BaseSettings, RunSettings, OptimSettings),
    "mask": (MaskSettings, RunSettings, MaskOptimSettings),
}


def main() -> None:
    """Parse the arguments and run every stage."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--corpus", type=Path, required=True, help="tar.xz or folder of train/ and valid/")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="scratch; holds both checkpoints at the end")
    parser.add_argument("--parts", type=Path, required=True, help="folder for the results, cut into parts")
    parser.add_argument("--base-minutes", type=float, default=7.0)
    parser.add_argument("--mask-minutes", type=float, default=5.0)
    parser.add_argument("--base-steps", type=int, help="instead of minutes")
    parser.add_argument("--mask-steps", type=int, help="instead of minutes")
    parser.add_argument("--base", type=Path, help="skip base training and start from this checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", action="append", default=[], metavar="STAGE:NAME=VALUE", help="a setting of a stage; may be repeated"
    )
    args = parser.parse_args()
    with carried_off(args.parts):
        run(args, overrides(args.set, STAGES))


@contextmanager
def carried_off(parts: Path) -> Iterator[None]:
    """Log with timestamps, and write the traceback of any error into `parts`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True)
    parts.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        (parts / "error.txt").write_text(traceback.format_exc())
        raise


def run(args: argparse.Namespace, chosen: dict[str, dict[str, str]]) -> None:
    """The recipe, stage by stage; ends with one JSON line of results."""
    began = time.monotonic()
    corpus = unpack(args.corpus, args.work)
    data = prepare(corpus, args.work / "tokens", args.tokenizer, DataSettings(), 2048, args.seed)
    logger.info("data ready after %.0f s: %d training tokens", time.monotonic() - began, len(data.train))
    summary: dict[str, Any] = {"data_seconds": round(time.monotonic() - began)}
    base = args.base or args.work / "base"
    if not args.base:
        limit = {"steps": args.base_steps} if args.base_steps else {"minutes": args.base_minutes}
        stage = {**DEFAULTS["base"], **limit, "seed": args.seed}
        result = train_base(base, data, *(made(cls, stage, chosen["base"]) for cls in STAGES["base"]))
        summary["base"] = described(result)
        carry(base, args.parts, "base")
    limit = {"steps": args.mask_steps} if args.mask_steps else {"minutes": args.mask_minutes}
    stage = {**DEFAULTS["mask"], **limit, "seed": args.seed}
    out = args.work / "mask"
    result = train_mask(out, base, data, *(made(cls, stage, chosen["mask"]) for cls in STAGES["mask"]))
    summary["mask"] = described(result)
    carry(out, args.parts, "mask")
    summary["exported_loss"] = {path.name: exported_losses(path, data) for path in (base, out)}
    summary["wall_seconds"] = round(time.monotonic() - began)
    (args.parts / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary), flush=True)


def described(result: Result) -> dict[str, Any]:
    """Summary of a run in a few numbers."""
    return {
        "best": result.best, "best_step": result.best_step, "steps": result.step, "tokens": result.tokens,
        "seconds": round(result.seconds), "stopped": result.stopped,
    }  # fmt: skip


def overrides(pairs: list[str], stages: dict[str, tuple[type, ...]]) -> dict[str, dict[str, str]]:
    """`stage:name=value` settings by stage. Raises ValueError for an unknown stage, name or form."""
    chosen: dict[str, dict[str, str]] = {stage: {} for stage in stages}
    for pair in pairs:
        stage, colon, rest = pair.partition(":")
        name, equals, value = rest.partition("=")
        known = {field.name for cls in stages.get(stage, ()) for field in fields(cls)}
        if not colon or not equals or name not in known:
            raise ValueError(f"--set {pair}: give STAGE:NAME=VALUE with a stage ({', '.join(stages)}) and its setting")
        chosen[stage][name] = value
    return chosen


def made(cls: type, values: dict[str, Any], texts: dict[str, str]) -> Any:
    """A settings dataclass from the recipe's values and the command line's texts, as far as it has these fields."""
    hints, names = get_type_hints(cls), {field.name for field in fields(cls)}
    values = {name: value for name, value in values.items() if name in names}
    for name in names & set(texts):
        values[name] = parsed(texts[name], str(hints[name]))
    return cls(**values)


def parsed(text: str, hint: str) -> Any:
    """`text` converted to the annotated type."""
    if "bool" in hint:
        return text.lower() in ("1", "true", "yes")
    if "int" in hint:
        return int(text)
    return float(text) if "float" in hint else text


def unpack(corpus: Path, work: Path) -> Path:
    """The folder with train/ and valid/, unpacked from the archive if it is one."""
    if corpus.is_dir():
        return corpus
    folder = work / "corpus"
    if not (folder / "train").is_dir():
        with tarfile.open(corpus) as archive:
            archive.extractall(folder, filter="data")
    return folder


def exported_losses(path: Path, data: Prepared) -> dict[str, float]:
    """Plain validation loss (nats per token) of the weights as exported, at half the context and all of it."""
    device = pick_device("auto")
    model, config = load_for_training(path, device)
    tokens = on_device(data.valid, device)
    context = config.max_position_embeddings
    return {
        str(length): round(plain_validation_loss(model, fixed_windows(tokens, length, 1_000_000)), 4)
        for length in (context // 2, context)
        if len(tokens) > length
    }


def carry(checkpoint: Path, parts: Path, name: str) -> None:
    """Cut the weights into parts and pack the rest of the checkpoint into one archive."""
    weights = (checkpoint / "model.safetensors").read_bytes()
    for number, start in enumerate(range(0, len(weights), PART_BYTES)):
        (parts / f"{name}.safetensors.part-{number:02d}").write_bytes(weights[start : start + PART_BYTES])
    with tarfile.open(parts / f"{name}.tar.gz", "w:gz") as archive:
        for file in sorted(checkpoint.iterdir()):
            if file.is_file() and file.name != "model.safetensors":
                archive.add(file, f"{name}/{file.name}")
        archive.add(checkpoint / WORK / "log.jsonl", f"{name}/log.jsonl")
    logger.info("copied %s to %s: %.1f MB of weights", name, parts, len(weights) / 1e6)


if __name__ == "__main__":
    main()
