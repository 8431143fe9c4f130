"""`toque catalog`: well-known open models, and which of them this machine can serve."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from toque.registry.catalog import CatalogEntry


@click.command()
@click.argument("words", nargs=-1)
@click.option("--fits", is_flag=True, help="Only those that fit into this machine's free memory.")
@click.option(
    "--memory-gb",
    type=click.FloatRange(0, min_open=True),
    help="As if so much were free.  [default: measured]",
)
@click.option(
    "--context", type=click.IntRange(1), default=4_096, show_default=True, help="Tokens to leave room for."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(words: tuple[str, ...], fits: bool, memory_gb: float | None, context: int, as_json: bool) -> None:
    """List open models by size, with license, context, and whether each fits here; those that WORDS describe.

    The memory that a model takes is estimated: its weights, one conversation of --context tokens, and what the engine
    needs besides. `toque plan MODEL` computes it for one that was pulled.
    """
    from toque.cli.admin_api import table
    from toque.engine.memory import available_bytes
    from toque.registry.catalog import builtin
    from toque.registry.store import Store

    available = int(memory_gb * 1e9) if memory_gb else available_bytes()
    here = {record.name for record in Store().list()}
    rows = []
    for entry in sorted(builtin().values(), key=lambda entry: entry.size):
        said = f"{entry.name} {entry.description} {entry.license} {entry.architecture}".lower()
        room = None if available is None else entry.memory(context) <= available
        if all(word.lower() in said for word in words) and not (fits and room is False):
            rows.append((entry, room))
    if as_json:
        click.echo(json.dumps([_facts(entry, room, context, here) for entry, room in rows], indent=2))
        return
    if not rows:
        click.echo("nothing fits" if fits else "the catalog has nothing like that")
        return
    lines = [
        (
            entry.name,
            _count(entry.parameters),
            _bytes(entry.size),
            _bytes(entry.memory(context)),
            f"{entry.context // 1024}k" if entry.context >= 1024 else str(entry.context),
            "pulled" if entry.name in here else {True: "yes", False: "no", None: "?"}[room],
            entry.license,
            entry.description,
        )
        for entry, room in rows
    ]
    click.echo(
        table(("NAME", "PARAMS", "SIZE", "MEMORY", "CONTEXT", "FITS", "LICENSE", "DESCRIPTION"), lines)
    )
    if available is not None:
        click.echo(f"\n{_bytes(available)} of memory are free; a model is pulled with: toque pull NAME")


def _facts(entry: CatalogEntry, room: bool | None, context: int, here: set[str]) -> dict[str, Any]:
    return {
        "name": entry.name,
        "description": entry.description,
        "license": entry.license,
        "architecture": entry.architecture,
        "parameters": entry.parameters,
        "size": entry.size,
        "memory": entry.memory(context),
        "context": entry.context,
        "fits": room,
        "pulled": entry.name in here,
        "sources": [str(entry.source)]
        if entry.source
        else [str(p) for file in entry.files for p in file.parts],
    }


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
