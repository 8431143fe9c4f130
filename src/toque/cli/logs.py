"""`toque logs`: what became of one request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("request_id")
@click.option(
    "--config", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The server's YAML file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(request_id: str, config: Path | None, as_json: bool) -> None:
    """What became of REQUEST_ID: the id of an answer (chatcmpl-…), its x-request-id, or its trace id.

    Read from this machine's ledger and event log, or the ledger that --config or TOQUE_LEDGER_URL names.
    """
    from toque.config import load_settings
    from toque.errors import NotFoundError
    from toque.monitor.event_log import find_trails
    from toque.monitor.timeline import moments, tell
    from toque.registry.home import default_home

    settings = load_settings(file=config).ledger
    folder = settings.place(default_home())
    if not settings.url and not (folder / "ledger.db").exists() and not folder.exists():
        raise NotFoundError(f"there is no ledger in {folder} yet: nothing has been served")
    trails = {trail.request_id: trail for trail in find_trails(folder, request_id)}
    rows = {
        row["request_id"]: row
        for row in _rows(request_id, list(trails), settings.database_url(default_home()))
    }
    known = list(dict.fromkeys([*rows, *trails]))
    if not known:
        raise NotFoundError(
            f"the ledger has no request {request_id[:80]!r}; it is written within a second or so"
        )
    if as_json:
        told = [
            (rows.get(name) or {"request_id": name})
            | {"events": moments(trails[name]) if name in trails else None}
            for name in known
        ]
        click.echo(json.dumps(told, indent=2))
        return
    for number, name in enumerate(known):
        if number:
            click.echo("")
        for line in tell(rows.get(name), trails.get(name), settings.currency):
            click.echo(line)


def _rows(request_id: str, others: list[str], url: str) -> list[dict[str, Any]]:
    from toque.monitor.ledger.database import Database

    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        return []
    database = Database(url, migrate=False)
    try:
        # A trace id is in no row, but its trail knows the request's own.
        return database.find(request_id) or [row for other in others for row in database.find(other)]
    finally:
        database.close()
