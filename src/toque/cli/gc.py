"""`toque gc`: free the files that nothing refers to."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be freed.")
@click.option(
    "--grace",
    "hours",
    type=click.FloatRange(0),
    default=24.0,
    show_default=True,
    help="Hours for which new files, and registrations that broke off, are left alone.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(dry_run: bool, hours: float, as_json: bool) -> None:
    """Free files that no model, no version and no deployment refers to: of this machine, and shared ones.

    Registrations that broke off are marked as failed; downloads that nobody continued are given up.
    """
    from toque.registry.gc import collect
    from toque.registry.store import Store

    store = Store()
    in_use: set[str] = set()
    if store.registry.exists(store.home):
        from toque.fleet.sql_store import digests_in_use
        from toque.registry.registry import Registry

        with Registry(store) as registry:
            in_use = digests_in_use(registry.database)
    swept = collect(store, in_use=in_use, grace_s=hours * 3600, dry_run=dry_run)
    if as_json:
        click.echo(json.dumps(asdict(swept), indent=2))
        return
    verb = "would free" if dry_run else "freed"
    click.echo(f"{verb} {swept.local_files} files here, {swept.local_bytes / 1e6:.0f} MB")
    if swept.shared_files:
        click.echo(f"{verb} {swept.shared_files} shared files, {swept.shared_bytes / 1e6:.0f} MB")
    if swept.folders:
        click.echo(f"gave up {swept.folders} downloads that nobody continued")
    for reference in swept.failed:
        click.echo(f"{reference}: its registration broke off, marked as FAILED")
