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
    """What became of REQUEST_ID: the id of an answer (chatcmpl-…), or its x-request-id.

    Read from this machine's ledger, or the one that --config or TOQUE_LEDGER_URL names.
    """
    from toque.config import load_settings
    from toque.errors import NotFoundError
    from toque.monitor.ledger.database import Database
    from toque.registry.store import default_home

    settings = load_settings(file=config).ledger
    home = default_home()
    if not settings.url and not (settings.place(home) / "ledger.db").exists():
        raise NotFoundError(f"there is no ledger in {settings.place(home)} yet: nothing has been served")
    database = Database(settings.database_url(home), migrate=False)
    try:
        rows = database.find(request_id)
    finally:
        database.close()
    if not rows:
        raise NotFoundError(
            f"the ledger has no request {request_id[:80]!r}; it is written within a second or so"
        )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for number, row in enumerate(rows):
        if number:
            click.echo("")
        for line in life(row, settings.currency):
            click.echo(line)


def life(row: dict[str, Any], currency: str) -> list[str]:
    """A request's row as a short story, a line per event, with seconds since its admission."""
    from toque.monitor.cost import currency_text
    from toque.monitor.ledger.usage import iso

    lines = [f"{row['request_id']}  ({row['client_id']})"]

    def event(at_us: int | None, text: str) -> None:
        when = "" if at_us is None else f"+{at_us / 1e6:.3f} s"
        lines.append(f"  {when:>11}  {text}")

    who = f", tenant {row['tenant']}" if row["tenant"] else ""
    how = "streamed" if row["stream"] else "whole"
    event(
        None,
        f"{iso(row['opened_at'] // 1_000_000)}  {row['endpoint']}, {how}, {row['choices']} choice(s){who}",
    )
    event(0, f"admitted for {row['model']} ({row['version'] or 'no version'})")
    if row["prompt_tokens"]:
        event(None, f"waited {row['queue_us'] / 1e6:.3f} s in its engine's queue")
        event(None, f"prompt of {row['prompt_tokens']} tokens, {row['cached_tokens']} of them cached")
    if row["ttft_us"]:
        event(row["ttft_us"], "first token")
    for attempt in row["attempts"]:
        event(
            None,
            f"attempt {attempt['number']} on {attempt['replica']}: {attempt['outcome']} {attempt['error_code']}",
        )
    if row["outcome"] == "open":
        event(None, f"running, or its gateway died: {row['completion_tokens']} tokens when last noted")
        return lines
    reason = row["error_code"] or row["finish_reason"]
    event(row["total_us"], f"{row['outcome']} {row['status']} ({reason}), {row['completion_tokens']} tokens")
    event(None, f"{row['device_ns'] / 1e9:.3f} device-seconds, list {currency_text(row['list_nano'])} {currency}, "
          f"cost {currency_text(row['cost_nano'])} {currency}")  # fmt: skip
    return lines
