"""How the verbs that steer a running server talk to it, and what they share: options, waiting, tables."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., None])

CALL_S = 600.0  # a model may be fetched meanwhile
_POLL_S = 0.2


def server_options(command: Command) -> Command:
    """--url, --key and --json: parameters ``api`` (an AdminApi) and ``as_json``."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--key", default="", help="A key that may administer.  [TOQUE_API_KEY]"),
        click.option("--url", default="", help="The server.  [TOQUE_URL, or http://127.0.0.1:8000]"),
    ):
        command = option(command)
    return command


def wait_options(command: Command) -> Command:
    """--wait and --timeout."""
    for option in (
        click.option(
            "--timeout",
            type=click.FloatRange(0.1),
            default=600.0,
            show_default=True,
            help="Of --wait: seconds.",
        ),
        click.option("--wait", is_flag=True, help="Return when it is done; exit code 1 when it failed."),
    ):
        command = option(command)
    return command


def engine_option(command: Command) -> Command:
    """--engine NAME=VALUE, repeated."""
    return click.option(
        "--engine",
        multiple=True,
        metavar="NAME=VALUE",
        help="An engine option, such as threads=1; repeatable.",
    )(command)


class AdminApi:
    """``/admin/v1`` of one server. Each call raises UnavailableError when no server answers, and what the server
    says is wrong as a RequestError with its words."""

    def __init__(self, url: str = "", key: str = "") -> None:
        from toque.errors import RequestError

        self.url = (url or os.environ.get("TOQUE_URL", "") or "http://127.0.0.1:8000").rstrip("/")
        self._key = key or os.environ.get("TOQUE_API_KEY", "")
        if not self.url.startswith(("http://", "https://")):
            raise RequestError(
                f"the server's URL begins with http:// or https://, got {self.url[:60]!r}", param="url"
            )

    def get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def post(self, path: str, body: object = None) -> Any:
        return self._call("POST", path, {} if body is None else body)

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path, None)

    def find(self, path: str) -> Any:
        """As `get`; None where there is nothing of that name."""
        from toque.errors import NotFoundError

        try:
            return self.get(path)
        except NotFoundError as error:
            if error.error_code == "no_fleet":
                raise
            return None

    def _call(self, method: str, path: str, body: object) -> Any:
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        from toque.errors import UnavailableError

        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["content-type"] = "application/json"
        request = Request(f"{self.url}/admin/v1/{path}", data=data, headers=headers, method=method)
        try:
            with urlopen(request, timeout=CALL_S) as answer:
                return json.load(answer)
        except HTTPError as error:
            with error:
                raise _said(error.code, error.read(4096)) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise UnavailableError(
                f"no server answers at {self.url} ({reason}); start one with `toque serve MODEL`, or give --url"
            ) from None


def _said(status: int, body: bytes) -> Exception:
    from toque.errors import NotFoundError, RequestError, UnavailableError

    try:
        told = json.loads(body)["error"]
        message, code, param = str(told["message"]), told.get("code"), told.get("param")
    except (ValueError, KeyError, TypeError):
        return UnavailableError(f"the server answers {status}: {body[:200].decode('utf-8', 'replace')!r}")
    if status == 404:
        return NotFoundError(message, param=param, code=code)
    if status == 503:
        return UnavailableError(message, code=code)
    return RequestError(message, param=param, code=code)


def wait_until(
    look: Callable[[], Any], done: Callable[[Any], bool], tell: Callable[[Any], str], timeout_s: float
) -> Any:
    """What ``look`` saw when it was ``done``; each new line that ``tell`` makes of it goes to stderr meanwhile.
    DeadlineError after ``timeout_s``."""
    from toque.errors import DeadlineError, UnavailableError

    end, last, seen = time.monotonic() + timeout_s, "", None
    while True:
        try:
            seen = look()
        except UnavailableError as error:  # a busy or restarting server is no reason to give up
            line = error.message
        else:
            if done(seen):
                return seen
            line = tell(seen)
        if line != last:
            click.echo(line, err=True)
            last = line
        if time.monotonic() > end:
            raise DeadlineError(f"not done after {timeout_s:g} s: {line}")
        time.sleep(_POLL_S)


def path_of(kind: str, name: str, step: str = "") -> str:
    """ "deployments", "chat", "scale" as a path, whatever is in the name."""
    from urllib.parse import quote

    return "/".join(part for part in (kind, quote(name, safe=""), step) if part)


def engine_values(given: Sequence[str]) -> dict[str, bool | int | float | str | None]:
    """``threads=1`` and so on by name. Whether there is such an option is for the server to say."""
    values: dict[str, bool | int | float | str | None] = {}
    for each in given:
        name, separator, text = each.partition("=")
        if not separator or not name:
            raise click.UsageError(f"--engine takes NAME=VALUE, such as threads=1, got {each[:60]!r}")
        values[name.replace("-", "_")] = _value(text)
    return values


def _value(text: str) -> bool | int | float | str | None:
    known: dict[str, bool | None] = {"true": True, "false": False, "default": None}
    if text.lower() in known:
        return known[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def settled(view: Any) -> bool:
    """A deployment is as it shall be, for now: nothing starts, rolls out or ends."""
    if view["observed_generation"] < view["generation"]:
        return False
    if view["status"] == "failed":
        return True
    if view["status"] in ("asleep", "stopped"):
        return bool(view["replicas"] == 0)
    return bool(view["status"] == "ready" and view["replicas"] == view["target"] == view["ready"])


def brief(view: Any) -> str:
    """A deployment in a line."""
    replicas = f"{view['ready']} of {view['target']} replica{'s' if view['target'] != 1 else ''} ready"
    reason = f" ({view['reason']})" if view["reason"] else ""
    return f"{view['name']}: {view['status']}, {view['version']}, {replicas}{reason}"


def brief_rollout(view: Any) -> str:
    """A rollout in a line."""
    paused = ", paused" if view["paused"] else ""
    reason = f" ({view['reason']})" if view["reason"] else ""
    share = "" if view["phase"] in ("done", "returned") else f", {view['share']:.0%} of the requests"
    return f"{view['deployment']}: {view['phase']}{paused}, {view['old']} to {view['new']}{share}{reason}"


def show(value: Any, as_json: bool, line: str) -> None:
    click.echo(json.dumps(value, indent=2) if as_json else line)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in (head, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)
