"""A process of http_load.py: up to 64 streams, each of which sends its next request when the last has ended.

Its first line of input is a `Job` as JSON, whereupon it writes a line when it is ready; the second is the times at
which to begin and to send no more, on the clock that all processes of a machine share. Its second line of output is a
`Report` as JSON. Nothing is parsed in between (stridelm.bench.http), and Python's garbage collector does not run.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop
from load_requests import Asked, body_of, stream_of

from stridelm.bench.http.answer import Answer
from stridelm.bench.http.connection import connect, post


@dataclass(frozen=True)
class Job:
    host: str
    port: int
    path: str
    """Of the completions' route."""
    model: str
    kind: str
    drafters: tuple[str, ...]
    streams: int
    """Of all processes together."""
    mine: Sequence[int] = ()
    """Which of them this process is."""
    ramp_s: float = 0.0
    """Over which the streams' first requests are spread evenly."""


@dataclass(frozen=True)
class Streamed:
    """A completion that arrived whole. `at`: when its events with tokens did."""

    sent: float
    at: list[float]
    tokens: int


@dataclass
class Report:
    streamed: list[Streamed] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    busy: float = 0.0
    """Share of the time for which this process computed: near 1, it and not the server was measured."""


async def load(job: Job, begin: float, end: float) -> Report:
    """All streams of this process, to the end of their last answers."""
    report = Report()
    answers: list[tuple[Asked, Answer]] = []
    await asyncio.sleep(begin - time.monotonic())
    worked, began = time.process_time(), time.monotonic()
    gc.disable()

    async def stream(index: int) -> None:
        await asyncio.sleep(job.ramp_s * index / job.streams)
        try:
            connection = await connect(job.host, job.port)
            for asked, message in messages(job, index):
                if time.monotonic() >= end:
                    break
                answers.append((asked, await connection.send(message)))
                if answers[-1][1].status != 200:
                    break
            connection.transport.close()
        except OSError as error:
            report.errors.append(repr(error))

    await asyncio.gather(*(stream(index) for index in job.mine))
    report.busy = (time.process_time() - worked) / (time.monotonic() - began)
    for asked, answer in answers:
        try:
            report.streamed.append(read(asked, answer, job.kind))
        except ValueError as error:
            report.errors.append(str(error))
    return report


def messages(job: Job, index: int) -> Iterator[tuple[Asked, bytes]]:
    for asked in stream_of(index, job.streams):
        body = body_of(asked, job.kind, job.model, job.drafters)
        yield asked, post(f"{job.host}:{job.port}", job.path, body)


def read(asked: Asked, answer: Answer, kind: str) -> Streamed:
    """Raises ValueError unless the answer is a stream with as many tokens as were asked for."""
    at: list[float] = []
    usage: dict[str, Any] | None = None
    for when, event in answer.events():
        if "error" in event:
            raise ValueError(f"request {asked.number}: {event['error']}")
        if event["choices"]:
            at.append(when)
        usage = event.get("usage") or usage
    if usage is None or not at:
        raise ValueError(f"request {asked.number}: the stream has no tokens, or no usage in its last event")
    tokens = usage["completion_tokens"]
    if tokens != asked.max_tokens and kind != "json_schema":  # which may end when the object does
        raise ValueError(f"request {asked.number}: {tokens} tokens instead of {asked.max_tokens}")
    return Streamed(answer.sent, at, tokens)


def main() -> None:
    job = Job(**json.loads(sys.stdin.readline()))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    begin, end = json.loads(sys.stdin.readline())
    report = uvloop.run(load(job, begin, end))
    os.set_blocking(sys.stdout.fileno(), True)  # the report is larger than a pipe
    sys.stdout.write(json.dumps(asdict(report)) + "\n")


if __name__ == "__main__":
    main()
