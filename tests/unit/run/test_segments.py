"""Which steps leave their captured forward pass, and that both ways end alike: on a CPU, where a replay runs the pass
again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from stridelm import SamplingParams
from stridelm.attention.base import Pairs
from stridelm.attention.triton import TritonAttention
from stridelm.attention.triton_latents import TritonLatents
from stridelm.batch import ForwardBatch
from stridelm.cache.layout import LayerState
from stridelm.run import segments
from stridelm.run.eager import EagerRunner, Logits
from stridelm.run.segments import PassTimes, Segments
from support.doubles.interpreter import INTERPRETED
from support.doubles.replays import Replay, ReplayPool
from support.doubles.stand import Stand
from support.oracles.attention import Piece, geometry, make_latent

LONG = 40
"""Rows from which on latents are expanded here."""


class Pool(ReplayPool):
    """In which passes over entries take as long as is said."""

    def __init__(self, pair: float) -> None:
        """pair: seconds more of a pass over many entries; one over few takes half a second."""
        super().__init__()
        self._pair, self._measured = pair, 0

    def seconds(self, graph: Replay) -> float:
        graph.replay()
        self._measured += 1
        return 0.5 + (0.0 if self._measured % 2 else self._pair)


@pytest.mark.parametrize(
    ("host", "pairs", "faster"),
    [
        (30e-3, Pairs(0, 0), False),
        (30e-3, Pairs(2e7, 1e7), True),  # 50 ms and 30
        (48e-3, Pairs(2e7, 1e7), False),  # 50 and 48
        (30e-3, Pairs(8e6, 4e6), False),  # 26 and 30
        (30e-3, Pairs(2e7, 1e6), False),  # 50 and 48
        (60e-3, Pairs(2e8, 1e8), True),  # 410 and 210
    ],
    ids=str,
)
def test_rule(host: float, pairs: Pairs, faster: bool) -> None:
    """10 ms without entries, and 2 ns for each pair more."""
    assert PassTimes(10e-3, 2e-9).is_faster_launched(pairs, host) == faster


@INTERPRETED
def test_pairs_are_those_of_long_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 70 rows after 300 and of 40 after none, not the decode and not the three rows. None where bits are
    promised, and none where it is not known what the spans see."""
    pieces = [Piece(300, 70), Piece(500, 1), Piece(0, LONG), Piece(60, 3)]
    case = make_latent(pieces, heads=4, rank=32, rope_dim=8, page_size=16)
    monkeypatch.setattr(TritonLatents, "least_rows", classmethod(lambda cls, state: LONG))
    assert case.latent is not None
    layers: dict[LayerState, int] = {replace(case.latent, expands=(16, 16)): 2}
    step = geometry(case)
    captured, spared = TritonAttention(False).pairs(step, layers)
    assert captured == 2 * (70 * 370 + LONG * LONG)
    assert spared == pytest.approx(2 * 30 * 370 * (2 * 32 - 32) / (2 * 32 + 8))
    assert TritonAttention(True).pairs(step, layers) == (0, 0)
    assert TritonAttention(False).pairs(replace(step, ends=()), layers) == (0, 0)


@INTERPRETED
@pytest.mark.parametrize(
    ("pair", "sizes", "leaving"), [(1e4, (16, 24), {0, 24}), (0.0, (16, 24), set()), (1e4, (32,), set())]
)
def test_long_chunks_leave(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    pair: float,
    sizes: tuple[int, ...],
    leaving: set[int],
) -> None:
    """A prompt in chunks of 24 rows, where pairs of rows and entries take long: not the ten rows at its end, and no
    decode. None, where they do not, or where every captured pass is larger. The output is that of the whole prompt at
    once."""
    monkeypatch.setattr(TritonAttention, "device", None)  # it runs wherever its kernel does
    monkeypatch.setattr(TritonLatents, "lead", 17 / 32)  # 17 rows
    monkeypatch.setattr(segments, "ROWS", sizes)
    monkeypatch.setattr(segments, "SPANS", (2,))
    path = checkpoint("deepseek_v3", scale=3.0, v_head_dim=16)
    stand = Stand(path, "float32", options={"deterministic": False, "attention": "triton"})
    left: set[int] = set()
    forward = EagerRunner.forward

    def listening(self: EagerRunner, batch: ForwardBatch) -> Logits:
        left.update(span.start for span in batch.spans if span.start < len(prompt))  # not what captures run
        return forward(self, batch)

    rng = random.Random(0)
    prompt = [rng.randrange(stand.target.vocab_size) for _ in range(58)]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    wanted = stand.plain(prompt, params).outputs[0].token_ids
    llm = stand.llm(max_num_batched_tokens=24)
    pool = Pool(pair)
    llm.engine.capture_into(pool, Segments(llm.engine.runner, pool, 80))  # type: ignore[arg-type]
    monkeypatch.setattr(EagerRunner, "forward", listening)
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == wanted
    assert left == leaving
