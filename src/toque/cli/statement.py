"""`toque usage statement`: what a month is billed by."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click


@click.command()
@click.option("--month", default="", metavar="YYYY-MM", help="UTC.  [default: the last that is over]")
@click.option("--tenant", help="Only this tenant.")
@click.option(
    "--config", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The server's YAML file."
)
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print CSV: a line per tenant, key and model, and a total."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(month: str, tenant: str | None, config: Path | None, as_csv: bool, as_json: bool) -> None:
    """The statement of a month, as text, and checked: the exit code is 1 where it does not add up.

    For the finance department: toque usage statement --month 2026-10 --csv > october.csv
    """
    from toque.cli.usage import open_ledger
    from toque.monitor.ledger.statement import statement, text
    from toque.monitor.ledger.usage import document, to_csv

    with open_ledger(config) as (database, settings):
        made = statement(database, month or _last_month(), tenant=tenant)
    if as_csv:
        click.echo(to_csv(made.usage, settings.currency), nl=False)
    elif as_json:
        checks = {
            "month": made.month,
            "final": made.final,
            "checked": made.checked,
            "differs": list(made.differs),
        }
        click.echo(json.dumps(document(made.usage, settings.currency) | checks, indent=2))
    else:
        for line in text(made, settings.currency):
            click.echo(line)
    if made.differs:
        click.echo(f"toque: the statement differs from its requests in {', '.join(made.differs)}", err=True)
        sys.exit(1)


def _last_month() -> str:
    now = time.gmtime()
    year, month = (now.tm_year, now.tm_mon - 1) if now.tm_mon > 1 else (now.tm_year - 1, 12)
    return f"{year:04d}-{month:02d}"
