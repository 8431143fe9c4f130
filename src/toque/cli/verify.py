"""`toque verify`: whether somebody who is trusted has signed a version."""

from __future__ import annotations

import json
import time

import click


@click.command()
@click.argument("reference")
@click.option("--trust", multiple=True, metavar="KEY", help="A public key, beside those of the settings.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(reference: str, trust: tuple[str, ...], as_json: bool) -> None:
    """Check the signatures of a version of a registered model (name/7 or name@alias). Exit code 1 when none of them
    is valid and by a trusted key: of TOQUE_REGISTRY_TRUSTED_KEYS, or given with --trust.
    """
    from toque.registry import signing
    from toque.registry.registry import Registry
    from toque.registry.settings import check_keys

    check_keys(trust, "trust")
    with Registry() as registry:
        version = registry.find(reference)
        signatures = registry.database.signatures(version.model, version.version)
        trusted = {*registry.store.registry.trusted_keys, *trust}
    rows = [
        {
            "key": each.key,
            "id": signing.key_id(each.key),
            "valid": signing.verifies(each, version.reference, version.digest),
            "trusted": each.key in trusted,
            "signed_by": each.signed_by,
            "at": each.at,
        }
        for each in signatures
    ]
    good = any(row["valid"] and row["trusted"] for row in rows)
    if as_json:
        said = {"reference": version.reference, "digest": version.digest, "signed": good}
        click.echo(json.dumps({**said, "signatures": rows}, indent=2))
    else:
        words = "signed by a trusted key" if good else "not signed by a trusted key"
        click.echo(f"{version.reference} ({version.digest[:12]}): {words}")
        for each, row in zip(signatures, rows, strict=True):
            day = time.strftime("%Y-%m-%d", time.localtime(each.at / 1e6))
            valid = "valid" if row["valid"] else "INVALID"
            known = "trusted" if row["trusted"] else "not trusted"
            click.echo(f"  {row['id']}  {valid}, {known}, by {each.signed_by} on {day}  {each.key}")
    if not good:
        raise click.exceptions.Exit(1)
