"""Exports a trained head as a directory that can be served: weights, config.json and provenance."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stridelm.draft.heads import DraftHead
from stridelm.train.head_kinds import HeadKind
from stridelm.train.weights import write_weights

logger = logging.getLogger(__name__)


def export_head(
    kind: HeadKind,
    head: DraftHead,
    target: Mapping[str, Any],
    out: Path,
    provenance: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write model.safetensors, config.json, provenance.json and README.md into `out`.

    target: config.json of the model that the head is for.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_weights(kind.tensors(head, dtype), out / "model.safetensors")
    config = kind.config(head, target) | {"dtype": str(dtype).removeprefix("torch.")}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (out / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(card(kind, provenance), encoding="utf-8")
    logger.info("wrote %s", out)


def card(kind: HeadKind, record: Mapping[str, Any]) -> str:
    """README.md, from the provenance record."""
    result, target, settings = record["result"], record["target"], record["settings"]
    best = result["best"]
    depths = range(1, 1 + sum(name.startswith("accept_") for name in best))
    accepts = " | ".join(f"{best[f'accept_{depth}']:.3f}" for depth in depths)
    losses = " | ".join(f"{best[f'loss_{depth}']:.3f}" for depth in depths)
    rows = "\n".join(_data_row(side, facts) for side, facts in record["data"].items())
    chosen = "\n".join(f"- {name}: " + _listed(values) for name, values in settings.items())
    return f"""# {kind.stage} head for {target["name"]}

{" ".join((type(kind).__doc__ or "").split())} {record["parameters"]:,} parameters.

    stride generate --model TARGET --drafter {kind.drafter} --drafter-model DIR

DIR is this directory; TARGET is {target["name"]}, whose weights have SHA-256 `{target["weights_sha256"]}`.

## Data

The target's own continuations of prompts from a text, part of them greedy, the others at temperature 1. Held-out
prompts are from the text's validation side.

| | sequences | greedy | prompt tokens | continuation tokens | greedy ones | ended | seed |
|---|---|---|---|---|---|---|---|
{rows}

## Training

{result["step"]:,} steps, {result["tokens"]:,} tokens (including prompts) in {result["seconds"]:.0f} s; seed
{record["seed"]}, device {record["hardware"]["device"]}. Best at step {result["best_step"]:,}, loss {best["loss"]:.4f}.

    {" ".join(record["command"])}

{chosen}

## Acceptance

Held-out greedy continuations, with a chain after every token: how often a guess is the target's next token, provided
that all guesses before it were right. Looping text is included. Such chains yield {best["tokens_a_step"]:.2f} tokens
per step.

| depth | {" | ".join(map(str, depths))} |
|---|{"---|" * len(depths)}
| accepted | {accepts} |
| loss, nats | {losses} |

`provenance.json` has all settings and results.
"""


def _data_row(side: str, facts: Mapping[str, Any]) -> str:
    names = ("sequences", "greedy_sequences", "prompt_tokens", "continuation_tokens", "greedy_continuation_tokens")
    counts = " | ".join(f"{facts[name]:,}" for name in (*names, "ended"))
    return f"| {side.replace('_', ' ')} | {counts} | {facts['seed']} |"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
