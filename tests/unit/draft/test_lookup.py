"""Prompt lookup against a search in plain Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stridelm.draft.base import Group, TargetInfo
from stridelm.draft.ngram.drafter import NgramDrafter
from stridelm.params import SamplingParams, Speculation
from stridelm.run.state import TokenTable
from stridelm.types import Request, Span

CPU = torch.device("cpu")


def naive(tokens: list[int], shortest: int, longest: int, room: int) -> list[int]:
    """The continuation of the latest of the longest earlier occurrences of the text's end."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                return tokens[end : end + room]
    return []


@pytest.mark.parametrize("vocab", [1, 2, 3, 20])
def test_lookup(vocab: int) -> None:
    """The tokens after the latest longest match, as many as the room and the text allow, else nothing."""
    rng = random.Random(vocab)
    for _ in range(60):
        count = rng.randint(1, 6)
        requests, spans = [], []
        table = TokenTable(count, 64, CPU)
        table.tokens.random_(0, vocab)  # garbage after the known tokens must not be matched
        for slot in range(count):
            shortest = rng.randint(1, 4)
            speculation = Speculation(
                "ngram", prompt_lookup_min=shortest, prompt_lookup_max=shortest + rng.randint(0, 5)
            )
            ids = [rng.randrange(vocab) for _ in range(rng.randint(1, 40))]
            cut = rng.randint(1, len(ids))
            request = Request(str(slot), ids[:cut], SamplingParams(), speculation, slot=slot, output_ids=ids[cut:])
            table.admit(slot, ids)
            requests.append(request)
            spans.append(Span(request, request.known - 1, 1, 0, rng.randint(1, 8)))
        slots = torch.arange(count)
        group = Group(tuple(spans), list(range(count)), slots, slots, table)
        draft = NgramDrafter(TargetInfo(vocab, 64, count, (), None, CPU), None).propose(group)  # type: ignore[arg-type]
        for row, (request, span) in enumerate(zip(requests, spans)):
            s: Any = request.speculation
            wanted = naive(request.token_ids, s.prompt_lookup_min or 0, s.prompt_lookup_max or 0, span.draft)
            valid = draft.valid[row].tolist()
            assert valid == [column < len(wanted) for column in range(draft.width)]
            assert draft.tokens[row, : len(wanted)].tolist() == wanted


def test_nothing_to_find() -> None:
    """A single token, and a text that never repeats, give no draft."""
    for ids in ([3], list(range(10))):
        assert naive(ids, 1, 5, 4) == []
    assert naive([1, 2, 3, 1, 2], 2, 3, 9) == [3, 1, 2]
    assert naive([5, 5, 5], 1, 8, 9) == [5]
