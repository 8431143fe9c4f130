"""`toque version`: what is installed and what this machine can run."""

from __future__ import annotations

import json
import platform

import click

import toque


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Print the version, the backends and the instruction sets this machine can run."""
    from toque import _native

    facts = {
        "version": toque.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "isas": list(_native.isas()),
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"toque {facts['version']} (Python {facts['python']}, {facts['machine']})")
    click.echo(f"cpu backend: {', '.join(facts['isas'])}")
