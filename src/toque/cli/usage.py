"""`toque usage`: what was used, what it is sold for, what it cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toque.cli.statement import command as statement

if TYPE_CHECKING:
    from toque.monitor.ledger.database import Database
    from toque.monitor.settings import LedgerSettings


@click.group(invoke_without_command=True)
@click.option("--by", "group_by", default="model", metavar="NAMES", show_default=True,
              help="Comma-separated: model, version, tenant, key, endpoint, and hour or day.")  # fmt: skip
@click.option(
    "--since", default="", metavar="WHEN", help="24h, 7d, 2026-09-01, 2026-09-01T12:00 (UTC). [30d]"
)
@click.option("--until", default="", metavar="WHEN", help="As --since; now, if not given.")
@click.option(
    "--month", default="", metavar="YYYY-MM", help="The statement of a month: by tenant, key and model."
)
@click.option("--tenant", help="Only this tenant.")
@click.option("--key", help="Only this key id.")
@click.option("--model", help="Only this model.")
@click.option("--version", help="Only this model version.")
@click.option("--endpoint", help="Only this endpoint.")
@click.option(
    "--config", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The server's YAML file."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with a total.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    context: click.Context,
    /,
    group_by: str,
    since: str,
    until: str,
    month: str,
    config: Path | None,
    as_csv: bool,
    as_json: bool,
    **filters: str | None,
) -> None:
    """Usage from this machine's ledger (or the one that --config or TOQUE_LEDGER_URL names).

    Last month, for the finance department: toque usage statement
    """
    if context.invoked_subcommand is not None:
        return
    from toque.errors import RequestError
    from toque.monitor.ledger.usage import UsageQuery, document, month_bounds, to_csv, usage
    from toque.monitor.ledger.when import moment

    if month and (since or until):
        raise RequestError("give either --month or --since and --until", param="month")
    names = tuple(name.strip() for name in group_by.split(",") if name.strip())
    end: int | None
    if month:
        begin, end = month_bounds(month)
        explicit = context.get_parameter_source("group_by")
        if explicit is click.core.ParameterSource.DEFAULT:
            names = ("tenant", "key", "model")
    else:
        begin = moment(since or "30d", param="since")
        end = moment(until, param="until") if until else None
    where = {name: value for name, value in filters.items() if value is not None}
    query = UsageQuery(names, begin, end, where)
    with open_ledger(config) as (database, settings):
        found = usage(database, query)
    if as_csv:
        click.echo(to_csv(found, settings.currency), nl=False)
    elif as_json:
        click.echo(json.dumps(document(found, settings.currency), indent=2))
    else:
        _table(found, settings.currency)


command.add_command(statement, "statement")


@contextmanager
def open_ledger(config: Path | None) -> Iterator[tuple[Database, LedgerSettings]]:
    """The ledger that the settings name. NotFoundError where nothing has been served yet."""
    from toque.config import load_settings
    from toque.errors import NotFoundError
    from toque.monitor.ledger.database import Database
    from toque.registry.home import default_home

    settings = load_settings(file=config).ledger
    home = default_home()
    if not settings.url and not (settings.place(home) / "ledger.db").exists():
        raise NotFoundError(f"there is no ledger in {settings.place(home)} yet: nothing has been served")
    database = Database(settings.database_url(home))
    try:
        yield database, settings
    finally:
        database.close()


def _table(found: Any, currency: str) -> None:
    """The figures that people look for first; CSV and JSON have all of them."""
    from toque.monitor.ledger.usage import iso, public_row

    columns = (
        "requests",
        "prompt",
        "cached",
        "completion",
        f"list {currency}",
        f"cost {currency}",
        "cost/Mtok",
    )

    def figures(row: dict[str, Any]) -> list[str]:
        shown = public_row(row, currency)
        return [
            str(shown["requests"]),
            str(shown["prompt_tokens"]),
            str(shown["cached_tokens"]),
            str(shown["completion_tokens"]),
            f"{row['list_nano'] / 1e9:.4f}",
            f"{row['cost_nano'] / 1e9:.4f}",
            f"{shown['cost_per_million_tokens']:.4f}",
        ]

    lines = [
        [iso(row[name]) if name in ("hour", "day") else row[name] or "-" for name in found.by] + figures(row)
        for row in found.rows
    ]
    head = [*found.by, *columns]
    total = [*(["total"] + [""] * (len(found.by) - 1) if found.by else []), *figures(found.total)]
    widths = [max(len(line[i]) for line in (head, total, *lines)) for i in range(len(head))]
    click.echo(f"{iso(found.since)} to {iso(found.until)}")
    for line in (head, *lines, total) if found.by else (head, total):
        cells = [
            f"{cell:<{width}}" if number < len(found.by) else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
