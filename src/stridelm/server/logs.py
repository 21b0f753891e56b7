"""Log lines: for people, or as JSON objects for machines."""

from __future__ import annotations

import json
import logging
import time

ACCESS = logging.getLogger("stridelm.access")
"""One line a request."""


class JsonLines(logging.Formatter):
    """A JSON object a line. What is logged with extra={"fields": {...}} stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(level: int, as_json: bool) -> None:
    """To stderr, for the whole process."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
