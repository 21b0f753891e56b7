"""`stride inspect`: describe a checkpoint, the size of its KV, and the drafters it can use. Loads no weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stridelm.cli.options import add_options, given_options
from stridelm.config import EngineConfig
from stridelm.options import settings

if TYPE_CHECKING:
    from rich.table import Table

    from stridelm.draft.base import TargetInfo
    from stridelm.models.layers.decoder import Decoder

RELEVANT = ("drafter_model", "mask_token_id", "max_model_len")
"""Fields of EngineConfig that change the description."""


def add_parser(subparsers: Any) -> None:
    """Add `inspect` to the main command."""
    parser = subparsers.add_parser("inspect", help="describe a checkpoint", description=__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint directory (default: the built-in model)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    irrelevant = [name for name in settings(EngineConfig) if name not in RELEVANT]
    add_options(parser, EngineConfig, skip=irrelevant)


def run(args: argparse.Namespace) -> int:
    """Describe the checkpoint. Raises ValueError if it could not be loaded."""
    config = EngineConfig(**given_options(args, EngineConfig))
    facts = describe(config)
    if args.json:
        sys.stdout.write(json.dumps(facts) + "\n")
        return 0
    from rich.console import Console

    console = Console()
    for table in (_model_table(facts), _drafter_table(facts)):
        console.print(table)
    return 0


def describe(config: EngineConfig) -> dict[str, Any]:
    """Everything that `stride inspect` prints. Reads only config.json and the headers of the weight files."""
    import torch

    from stridelm.builtin import builtin_path
    from stridelm.engine.load import describe_target
    from stridelm.models.files import read_headers
    from stridelm.models.loader import build_stored, check_headers, format_names, load_config
    from stridelm.text.tokenizer import VOCABULARY_FILES, checkpoint_eos_ids

    path = builtin_path() if config.model is None else Path(config.model)
    hf_config = load_config(path)
    target = describe_target(config, hf_config, path, torch.device("cpu"))
    model, loading = build_stored(hf_config, path)
    weights = dict(read_headers(path))
    check_headers(model, loading, path)
    return {
        "model": str(path),
        "architecture": (getattr(hf_config, "architectures", None) or [hf_config.model_type])[0],
        "model_type": hf_config.model_type,
        **_shape(model),
        "context": target.max_length,
        "weight_formats": format_names(model),
        "stored": dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in weights.values())),
        "weight_bytes": sum(tensor.nbytes for tensor in weights.values()),
        "kv_bytes_per_token": _kv_bytes(model),
        "tokenizer": any((path / name).is_file() for name in VOCABULARY_FILES),
        "eos_token_ids": list(checkpoint_eos_ids(path)),
        "mask_token_ids": list(target.mask_token_ids),
        "auto": _automatic(target),
        "drafters": _drafters(target),
    }


def _shape(model: Decoder) -> dict[str, Any]:
    from stridelm.models.layers.experts import MixtureSpec

    spec = model.spec
    mixers, mlps = ([getattr(layer, part) for layer in spec.layers] for part in ("mixer", "mlp"))
    routings = [mlp.routing for mlp in mlps if isinstance(mlp, MixtureSpec)]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": _of(mlps, "intermediate_size"),
        "num_experts": _of(routings, "num_experts"),
        "num_experts_per_tok": _of(routings, "num_experts_per_tok"),
        "moe_intermediate_size": _of(mlps, "moe_intermediate_size"),
        "heads": _of(mixers, "num_heads"),
        "kv_heads": _of(mixers, "num_kv_heads"),
        "head_dim": _of(mixers, "head_dim"),
        "latent_dim": _of(mixers, "rank"),
        "rope_dim": _of([rope.spec for rope in model.ropes], "dim"),
        "vocab_size": spec.vocab_size,
        "tied_embeddings": spec.tied,
        "rope": _of([rope.spec for rope in model.ropes], "kind"),
        "windows": sorted({mixer.window for mixer in mixers if mixer.window is not None}),
    }


def _of(parts: Sequence[Any], name: str) -> Any:
    """The value of the attribute `name` in the parts that have it, None if none has; a list of all values if they
    differ."""
    values = list(dict.fromkeys(getattr(part, name) for part in parts if hasattr(part, name)))
    return values if len(values) > 1 else next(iter(values), None)


def _kv_bytes(model: Decoder) -> dict[str, int]:
    """Dtype -> bytes that one token's KV takes over all layers."""
    from stridelm.cache.layout import bytes_per_token
    from stridelm.models.files import DTYPES

    return {name: bytes_per_token(model.layer_states, dtype) for name, dtype in DTYPES.items()}


def _automatic(target: TargetInfo) -> str:
    """The drafter that "auto" resolves to."""
    from stridelm.draft.settle import settle
    from stridelm.params import Speculation

    return settle(Speculation(), target).drafter or ""


def _drafters(target: TargetInfo) -> list[dict[str, Any]]:
    """Every registered drafter: whether it can serve this model, or why not, and its options."""
    from stridelm.draft import DRAFTERS
    from stridelm.verify import RULES

    rules = {name: RULES.get(name) for name in RULES}
    found = []
    for name in DRAFTERS:
        drafter = DRAFTERS.get(name)
        reason = drafter.why_not(target)
        able = {rule for rule in rules.values() if rule.works_with(drafter.rules, drafter.branches)}
        usable = sorted(rule.name for rule in able if not rule.simulated)
        read = (DRAFTERS.options(name), *map(RULES.options, usable))
        found.append(
            {
                "name": name,
                "usable": reason is None,
                "why_not": reason,
                "weights": str(target.heads[name]) if name in target.heads else None,
                "default_depth": drafter.usual_depth(target) if reason is None else drafter.default_depth,
                "acceptance": usable,
                "lossy": [rule for rule in usable if not rules[rule].lossless],
                "options": sorted({option for options in read for option in options.names()}),
            }
        )
    return found


def _model_table(facts: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from stridelm.progress import size

    stored = ", ".join(f"{count} tensors in {dtype}" for dtype, count in facts["stored"].items())
    kv = ", ".join(f"{size(count)} in {dtype}" for dtype, count in facts["kv_bytes_per_token"].items())
    windows = ", ".join(str(window) for window in facts["windows"])
    masks = ", ".join(str(token) for token in facts["mask_token_ids"])
    lines = {
        "architecture": f"{facts['architecture']} ({facts['model_type']})",
        "parameters": f"{facts['parameters']:,}" + (", embeddings tied" if facts["tied_embeddings"] else ""),
        "layers": f"{facts['layers']} of width {facts['hidden_size']}"
        + (f", MLP {facts['intermediate_size']}" if facts["intermediate_size"] else ""),
        "experts": f"{facts['num_experts_per_tok']} of {facts['num_experts']}, each of width "
        f"{facts['moe_intermediate_size']}"
        if facts["num_experts"]
        else "none",
        "attention": f"{facts['heads']} heads on {_stored(facts)}" + (f", sliding window {windows}" if windows else ""),
        "context": f"{facts['context']:,} tokens, {facts['rope']} RoPE"
        + (f" of {facts['rope_dim']} dimensions a head" if facts["rope_dim"] != facts["head_dim"] else ""),
        "vocabulary": f"{facts['vocab_size']:,} tokens" + ("" if facts["tokenizer"] else ", no tokenizer here"),
        "mask tokens": masks or "none",
        "weights": f"{size(facts['weight_bytes'])}: {stored}; {', '.join(facts['weight_formats'])}",
        "KV per token": kv,
    }
    table = Table(title=Text(facts["model"]), title_justify="left", show_header=False)
    for name, value in lines.items():
        table.add_row(name, Text(value))
    return table


def _stored(facts: dict[str, Any]) -> str:
    """What attention keeps per token."""
    if facts["latent_dim"] is not None:
        return f"latent rows of {facts['latent_dim']} + {facts['rope_dim']}"
    return f"{facts['kv_heads']} KV heads of {facts['head_dim']}"


def _drafter_table(facts: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("drafter", "available", "acceptance", "depth", title="Drafters", title_justify="left")
    for drafter in facts["drafters"]:
        name = drafter["name"]
        rules = [f"{rule} (lossy)" if rule in drafter["lossy"] else rule for rule in drafter["acceptance"]]
        table.add_row(
            f"{name}, the default" if name == facts["auto"] else name,
            Text("yes" if drafter["usable"] else f"no: {drafter['why_not']}"),
            ", ".join(rules),
            str(drafter["default_depth"]),
        )
    return table
