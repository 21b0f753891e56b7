"""The load benchmarks' client: an answer is read exactly, however the network cuts it, and times are of the window."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_requests import KINDS, body_of, stream_of
from load_times import Exchange, Times

from stridelm.bench.http.answer import Answer

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TEXTS = ["a", "\r\n0\r\n\r\n", "data: [DONE]\n\n", "é" * 40, ""]


def chunked(parts: list[bytes]) -> tuple[bytes, list[int]]:
    """The answer, and where in it each byte of the content is."""
    raw, places = HEAD, list[int]()
    for part in parts:
        raw += b"%x\r\n" % len(part)
        places += range(len(raw), len(raw) + len(part))
        raw += part + b"\r\n"
    return raw + b"0\r\n\r\n", places


@given(
    texts=st.lists(st.sampled_from(TEXTS), max_size=6),
    line_end=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    cuts=st.lists(st.integers(1, 400), max_size=8),
    segments=st.lists(st.integers(1, 700), max_size=12),
)
def test_events_are_read_wherever_chunks_and_segments_end(
    texts: list[str], line_end: bytes, cuts: list[int], segments: list[int]
) -> None:
    """Each event once, with its content and the time of the segment that completes its line; and the answer is
    complete with its last byte, not before."""
    lines = [b"data: " + json.dumps({"text": text}, ensure_ascii=False).encode() + line_end for text in texts]
    content = b"".join([*lines, b"data: [DONE]" + line_end])
    marks = sorted({0, *(cut for cut in cuts if cut < len(content)), len(content)})
    raw, places = chunked([content[a:b] for a, b in itertools.pairwise(marks)])
    ends = sorted({*(end for end in segments if end < len(raw)), len(raw)})
    answer = Answer(sent=0.0)
    done = [answer.add(float(end), raw[begin:end]) for begin, end in zip([0, *ends], ends)]
    assert done == [False] * (len(ends) - 1) + [True]
    found = answer.events()
    assert [event["text"] for _, event in found] == texts
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    newlines = [places[content.index(b"\n", start)] for start in starts]
    assert [when for when, _ in found] == [next(end for end in ends if end > place) for place in newlines]


def test_an_answer_that_is_no_stream_is_an_error_with_its_text() -> None:
    answer = Answer(sent=0.0)
    assert not answer.add(1.0, b"HTTP/1.1 400 Bad Request\r\ncontent-length: 5\r\n\r\nwr")
    assert answer.add(2.0, b"ong")
    assert answer.status == 400
    with pytest.raises(ValueError, match="wrong"):
        answer.events()


def test_streams_share_one_list_of_requests() -> None:
    """Request 5 is the same whether 2 or 3 streams divide the list among themselves, and its prompt fits."""
    of_two, of_three = stream_of(1, 2), stream_of(2, 3)
    [_, _, two], [_, three] = [next(of_two) for _ in range(3)], [next(of_three) for _ in range(2)]
    assert two == three and two.number == 5
    assert 128 <= len(two.prompt) <= 512 and 128 <= two.max_tokens <= 384 and max(two.prompt) < 4088


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_differ_in_what_they_ask_for(kind: str) -> None:
    plain, other = (
        json.loads(body_of(next(stream_of(1, 3)), each, "m", ("ngram@3", "mask@2:synthetic:1.5")))
        for each in ("plain", kind)
    )
    assert {name: other[name] for name in ("prompt", "max_tokens")} == {
        name: plain[name] for name in ("prompt", "max_tokens")
    }
    assert (other == plain) == (kind == "plain")
    if kind == "drafters":
        assert other["speculation"] == {"drafter": "mask", "depth": 2, "acceptance": "synthetic:1.5"}


def test_times_are_those_of_the_window() -> None:
    """An event counts if it is in the window, a first token if its request was sent in it."""
    early = Exchange(sent=-2.0, at=[-1.0, 1.0, 3.0], counts=[1, 2, 4])
    late = Exchange(sent=1.0, at=[1.5, 12.0], counts=[3, 5])
    times = Times.of([early, late], 0.0, 10.0)
    assert times.tokens_per_s == (2 + 4 + 3) / 10
    assert times.first_p50 == times.first_p99 == pytest.approx(500)
    assert times.event_p50 == pytest.approx(2000)
    assert times.token_mean == pytest.approx(1e3 * 4 / 6)
    assert times.token_p99 == pytest.approx(1000)


def test_a_token_weighs_what_its_event_emitted() -> None:
    """The percentile over tokens is numpy's over one entry for each token."""
    draw = random.Random(0)
    at, counts = [0.0], [1]
    for _ in range(200):
        at.append(at[-1] + draw.random())
        counts.append(draw.randint(1, 5))
    each = sorted(gap / n for gap, n in zip((b - a for a, b in itertools.pairwise(at)), counts[1:]) for _ in range(n))
    times = Times.of([Exchange(0.0, at, counts)], 0.0, at[-1] + 1)
    assert times.token_p99 == pytest.approx(1e3 * each[-(len(each) // 100) - 1], rel=0.05)


def test_an_empty_window_has_no_times() -> None:
    times = Times.of([Exchange(0.0, [1.0, 2.0], [1, 1])], 5.0, 6.0)
    assert times.tokens_per_s == 0 and times.first_p50 is times.event_p99 is times.token_mean is None
