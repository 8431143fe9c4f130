"""How log lines look: text for people, or JSON, one object a line, for machines.

The standard library's logging is the one that every library here writes to; what it lacks is a formatter, and the
request that a line belongs to. No prompt, no answer and no key is ever put into a line, unless `server.log_prompts`
asks for prompts.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any, TextIO

FORMATS = ("text", "json")
QUIET = ("uvicorn", "alembic", "httpx", "opentelemetry")  # their routine steps are not this server's news

# The request that the running task answers: its id as the client knows it, and its trace's ("": none).
answering: ContextVar[tuple[str, str] | None] = ContextVar("answering", default=None)


def configure_logs(level: str, form: str, stream: TextIO | None = None) -> None:
    """Sets up the root logger of this process; a second call replaces the first."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for library in QUIET:
        logging.getLogger(library).setLevel(logging.WARNING)


def fields(**values: object) -> dict[str, dict[str, object]]:
    """For ``extra=`` of a log call: what machines read, beside the sentence."""
    return {"fields": values}


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")


class JsonFormatter(logging.Formatter):
    """``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, the request's ids, the fields of the call, and
    the ``exception`` where there was one. Never more than one line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = answering.get()
        if request is not None:
            line["request_id"], trace_id = request
            if trace_id:
                line["trace_id"] = trace_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            line["exception"] = record.exc_text
        return json.dumps(line, default=str)  # ASCII: half a character of somebody's text breaks nothing
