"""Masks logits by the grammars of their rows' requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from stridelm.faults import on_behalf_of
from stridelm.grammar.guide import Guide, allowed
from stridelm.sample.rows import Rows, TokenHistory
from stridelm.upload import upload

Asked = tuple[Guide, Sequence[int]]
"""A guide, and the path after which its mask is wanted."""


def mask_by_grammar(logits_MV: torch.Tensor, rows: Rows, guides: Sequence[Guide | None], history: TokenHistory) -> None:
    """Forbid the tokens that the requests' grammars do not allow after the rows' histories. Matchers run on the host,
    so unless it knows the histories (`Rows.path`), this waits for the device."""
    asked = _read(rows, guides, history) if rows.path is None else _known(rows.path, guides)
    masks = {row: mask for row, one in asked.items() if (mask := _mask(*one)) is not None}
    if not masks:
        return
    device, made = logits_MV.device, list(masks.values())
    # Pinned, or the copy would wait for the forward pass, which masks are made beside.
    masks_GW = torch.empty(len(made), len(made[0]), dtype=torch.int32, pin_memory=logits_MV.is_cuda)
    torch.stack(made, out=masks_GW)
    forbidden_GV = ~allowed(masks_GW.to(device, non_blocking=True), logits_MV.shape[1])
    index = upload(list(masks), device)
    logits_MV.index_copy_(0, index, logits_MV.index_select(0, index).masked_fill_(forbidden_GV, -math.inf))


def _mask(guide: Guide, path: Sequence[int]) -> torch.Tensor | None:
    with on_behalf_of(guide.request):
        return guide.mask(path)


def _known(path: Callable[[int], list[int] | None], guides: Sequence[Guide | None]) -> dict[int, Asked]:
    """Row -> guide and path, from what the host knows."""
    asked: dict[int, Asked] = {}
    for row, guide in enumerate(guides):
        tokens = None if guide is None else path(row)
        if guide is not None and tokens is not None:
            with on_behalf_of(guide.request):
                guide.catch_up()
            asked[row] = guide, tokens
    return asked


def _read(rows: Rows, guides: Sequence[Guide | None], history: TokenHistory) -> dict[int, Asked]:
    """The same, from the device."""
    known, positions = history.known[rows.slots].tolist(), rows.positions.tolist()
    extra = [[]] * len(known) if rows.extra is None else rows.extra.tolist()
    asked: dict[int, Asked] = {}
    for row, guide in enumerate(guides):
        path = [token for token in extra[row] if token >= 0]
        # A drafter may draw at a position without giving all tokens before it: what is allowed there is not known.
        if guide is None or known[row] + len(path) != positions[row]:
            continue
        with on_behalf_of(guide.request):
            guide.catch_up()
            if guide.read < known[row]:  # tokens drawn but not emitted yet
                path = history.tokens[rows.slots[row], guide.read : known[row]].tolist() + path
        asked[row] = guide, path
    return asked
