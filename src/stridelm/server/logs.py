"""Log lines: for people, or as JSON objects for machines. Nothing that a client sends can forge a log line, and nothing
that clients do logs more than one line of a kind per minute."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

ACCESS = logging.getLogger("stridelm.access")
"""One line per request."""

UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\\]")
"""What ends a line, moves a terminal's cursor or reverses text; and the backslash, which escapes it."""
LONGEST = 4000
RATE_LIMITED = (
    *("asyncio", "uvicorn.error", "stridelm.server.app", "stridelm.server.limits"),
    "stridelm.server.frontends.door",
)
"""Loggers that a client, or many, could flood."""
MINUTE_S = 60.0


def escaped(text: str) -> str:
    """On one line, with control characters escaped."""
    return UNSAFE.sub(lambda match: match.group().encode("unicode_escape", "backslashreplace").decode(), text)


class OneAMinute(logging.Filter):
    """Lets the first line of a kind pass, and then one per minute that says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[Any, ...], float] = {}
        self._left_out: dict[tuple[Any, ...], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name not in RATE_LIMITED:
            return True
        # asyncio puts details into the message itself, after its first line.
        error = record.exc_info[0] if record.exc_info else None
        kind = (record.name, record.levelno, str(record.msg).partition("\n")[0][:80], error)
        now, last = time.monotonic(), self._last.get(kind)
        if last is not None and now - last < MINUTE_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._last[kind] = now
        if left_out := self._left_out.pop(kind, 0):
            record.msg, record.args = f"{record.getMessage()} (and {left_out} times more since the last such line)", ()
        return True


class Lines(logging.Formatter):
    """A line for a person; a traceback follows it, indented."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname} {record.name}: {escaped(record.getMessage().rstrip()[:LONGEST])}"
        if record.exc_info:
            traceback = self.formatException(record.exc_info).splitlines()
            line += "".join(f"\n    {escaped(part[:LONGEST])}" for part in traceback)
        return line


class JsonLines(logging.Formatter):
    """A JSON object per line. Fields logged with extra={"fields": {...}} are added to it."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:LONGEST],
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # json.dumps escapes everything unsafe, since its output is ASCII, except DEL.
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")


def set_up_logging(level: int, as_json: bool) -> None:
    """To stderr, for the whole process."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else Lines())
    handler.addFilter(OneAMinute())
    logging.basicConfig(level=level, handlers=[handler], force=True)
