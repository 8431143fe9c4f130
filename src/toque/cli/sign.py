"""`toque sign`: say with a key of one's own that a version may be served."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("reference", default="")
@click.option("--key", type=click.Path(path_type=Path), help="The private key, an Ed25519 key in PEM.")
@click.option("--new-key", type=click.Path(path_type=Path), help="Make a private key in this file, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(reference: str, key: Path | None, new_key: Path | None, as_json: bool) -> None:
    """Sign a version of a registered model: REFERENCE is its name/7 or name@alias.

    What is signed is the version's reference and its digest, which covers all its files. Servers whose settings say
    registry.require_signature serve only what one of registry.trusted_keys has signed.
    """
    from toque.registry import signing
    from toque.registry.registry import Registry, somebody

    if new_key is not None:
        if reference or key is not None:
            raise click.UsageError("--new-key takes no REFERENCE and no --key")
        public = signing.make_key(new_key)
        click.echo(json.dumps({"key": public, "id": signing.key_id(public)}) if as_json else public)
        return
    if not reference or key is None:
        raise click.UsageError("give a REFERENCE and its --key FILE, or --new-key FILE")
    with Registry() as registry:
        version = registry.find(reference)
        signature = signing.sign(key, version.reference, version.digest)
        registry.database.add_signature(version.model, version.version, signature, somebody())
    if as_json:
        said = {"reference": version.reference, "digest": version.digest, "key": signature.key}
        click.echo(json.dumps({**said, "signature": signature.value}))
        return
    click.echo(f"signed {version.reference} ({version.digest[:12]}) with key {signing.key_id(signature.key)}")
