"""`toque keys`: the API keys of this machine's servers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from toque.gateway.key_file import KeyFile

_FILE = click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the keys are kept.  [default: keys.json in TOQUE_HOME]",
)


@click.group()
def command() -> None:
    """Create, list and revoke API keys. Running servers follow within a second.

    Once there is a key, also one that was revoked since, every request needs one.
    """


@command.command()
@click.argument("tenant")
@click.option("--note", default="", help="What it is for, for people.")
@click.option("--requests-per-minute", type=int, default=None, help="0: no bound.  [default: the server's]")
@click.option("--tokens-per-minute", type=int, default=None, help="0: no bound.  [default: the server's]")
@click.option("--concurrent-requests", type=int, default=None, help="0: no bound.  [default: the server's]")
@click.option("--admin", is_flag=True, help="It may also deploy, scale and roll out models.")
@_FILE
def create(
    tenant: str,
    note: str,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    concurrent_requests: int | None,
    admin: bool,
    file: Path | None,
) -> None:
    """Make a key for TENANT and print it, this once. Keys of one tenant share its place in the queue and its cache."""
    keys = _open(file)
    key, text = keys.create(
        tenant,
        note=note,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent_requests=concurrent_requests,
        admin=admin,
    )
    click.echo(text)
    click.echo(f"key {key.id} of {tenant}: keep it now, only its digest is stored in {keys.path}", err=True)


@command.command("list")
@_FILE
def list_keys(file: Path | None) -> None:
    """List the keys by their ids."""
    keys = _open(file)
    stored = keys.read()
    if not stored:
        click.echo(f"there are no keys in {keys.path}")
        return
    width = max(6, *(len(key.tenant) for key in stored))
    click.echo(f"{'ID':<11}  {'TENANT':<{width}}  CREATED     REQUESTS/MIN  TOKENS/MIN  AT ONCE  ADMIN  NOTE")
    for key in stored:
        created = time.strftime("%Y-%m-%d", time.localtime(key.created))
        bounds = f"{_bound(key.requests_per_minute):>12}  {_bound(key.tokens_per_minute):>10}"
        at_once, admin = _bound(key.concurrent_requests), "yes" if key.admin else ""
        click.echo(
            f"{key.id:<11}  {key.tenant:<{width}}  {created}  {bounds}  {at_once:>7}  {admin:<5}  {key.note}".rstrip()
        )


@command.command()
@click.argument("id")
@_FILE
def revoke(id: str, file: Path | None) -> None:
    """Remove the key with this ID. What it has begun may finish."""
    key = _open(file).revoke(id)
    click.echo(f"revoked {key.id} of {key.tenant}")


def _open(file: Path | None) -> KeyFile:
    from toque.gateway.key_file import NAME, KeyFile
    from toque.registry.home import default_home

    return KeyFile(default_home() / NAME if file is None else file)


def _bound(bound: int | None) -> str:
    return "default" if bound is None else str(bound) if bound else "-"
