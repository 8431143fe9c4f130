"""Log lines for people and for machines."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from toque.monitor.log_format import answering, configure_logs, fields


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def logged(form: str) -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    configure_logs("info", form, stream)
    return logging.getLogger("toque.test"), stream


def test_a_json_line_has_the_request_and_the_fields_of_the_call() -> None:
    log, stream = logged("json")
    about = answering.set(("req-1", "ab" * 16))
    log.info("%d of %s", 3, "four", extra=fields(status=200, model="m"))
    answering.reset(about)
    log.warning("outside")
    log.debug("not asked for")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info", "logger": "toque.test", "message": "3 of four", "request_id": "req-1",
        "trace_id": "ab" * 16, "status": 200, "model": "m",
    }  # fmt: skip
    assert "request_id" not in second
    assert second["level"] == "warning"


def test_whatever_is_logged_is_one_line_of_json() -> None:
    log, stream = logged("json")
    try:
        raise ValueError("several\nlines \ud800")
    except ValueError:
        log.exception("it\nbroke", extra=fields(thing=object(), ids=(1, 2)))
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert told["message"] == "it\nbroke"
    assert "Traceback" in told["exception"]
    assert told["thing"].startswith("<object")


def test_text_is_as_it_was() -> None:
    log, stream = logged("text")
    log.info("hello", extra=fields(status=200))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO toque\.test: hello\n", stream.getvalue())


def test_libraries_are_quiet_and_a_second_call_replaces_the_first() -> None:
    _, first = logged("text")
    _, second = logged("json")
    logging.getLogger("httpx").info("routine")
    logging.getLogger("toque.x").info("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1
