"""`toque show`: one model of the local store, or one version of the registry."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from toque.registry.record import StoredFile
    from toque.registry.store import Store


@click.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, as_json: bool) -> None:
    """Show one model, or a version or alias of a registered one: its files with their digests, where it came from."""
    from toque.registry.names import AliasRef, CatalogRef, VersionRef, parse_reference
    from toque.registry.store import Store

    store = Store()
    parsed = parse_reference(model)
    registered = (
        isinstance(parsed, CatalogRef) and store.find(model) is None and store.registry.exists(store.home)
    )
    if isinstance(parsed, VersionRef | AliasRef) or registered:
        _show_version(store, model, as_json)
        return
    record = store.show(model)
    path = store.path(model)
    if as_json:
        click.echo(json.dumps({**record.to_dict(), "path": str(path)}, indent=2))
        return
    pulled = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.pulled_at))
    facts = {
        "name": record.name,
        "description": record.description,
        "source": record.source,
        "revision": record.revision,
        "license": record.license,
        "pulled": pulled,
        "format": record.format,
        "architecture": record.architecture,
        "parameters": f"{record.parameters / 1e6:.0f} million" if record.parameters else "",
        "quantization": record.quantization,
        "context": f"{record.context_length} tokens" if record.context_length else "",
        "problem": record.problem,
        "size": f"{record.size / 1e6:.1f} MB",
        "digest": record.digest,
        "path": str(path),
    }
    _print(facts, record.files)


def _show_version(store: Store, model: str, as_json: bool) -> None:
    """What the registry knows; the files need not be on this machine."""
    from toque.registry.registry import Registry

    with Registry(store) as registry:
        version = registry.find(model)
        run, inputs, results = registry.database.origin(version.model, version.version)
    if as_json:
        more = {
            "lineage": None if run is None else asdict(run),
            "inputs": [asdict(given) for given in inputs],
            "evaluations": [asdict(result) for result in results],
        }
        click.echo(json.dumps({**version.to_dict(), **more}, indent=2))
        return
    facts = {
        "version": version.reference,
        "status": version.status.value,
        "aliases": ", ".join(version.aliases),
        "source": version.resolved_uri or version.source_uri,
        "base model": f"{version.base_model} ({version.base_relation})" if version.base_model else "",
        "license": version.license,
        "registered": time.strftime("%Y-%m-%d %H:%M", time.localtime(version.created_at / 1e6)),
        "by": version.created_by,
        "format": version.format,
        "architecture": version.arch,
        "parameters": f"{version.params / 1e6:.0f} million" if version.params else "",
        "quantization": version.quantization,
        "context": f"{version.context_length} tokens" if version.context_length else "",
        "tags": ", ".join(f"{key}={value}" for key, value in version.tags.items()),
        "evaluations": ", ".join(f"{result.metric} {result.value:.6g}" for result in results),
        "problem": version.problem,
        "size": f"{version.size / 1e6:.1f} MB",
        "digest": version.digest,
    }
    _print(facts, version.files)


def _print(facts: dict[str, str], files: Iterable[StoredFile]) -> None:
    for key, value in facts.items():
        if value:
            click.echo(f"{key + ':':<14}{value}")
    click.echo("files:")
    for file in files:
        click.echo(f"  {file.sha256}  {file.size:>12}  {file.name}")
