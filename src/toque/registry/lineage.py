"""The family tree of a version."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from toque.errors import RequestError
from toque.registry.database import RegistryDatabase
from toque.registry.names import VersionRef, parse_reference
from toque.registry.version import ModelVersion

MAX_NODES = 500


def ancestry(database: RegistryDatabase, version: ModelVersion, depth: int = 20) -> dict[str, Any]:
    """A version and what it was made from, as far as the registry knows, as plain values.

    Each node has ``reference``, ``digest``, ``status``, ``relation`` to its base, ``run`` (or None), ``datasets``,
    ``evaluations`` and ``parents``; the root also ``children``: references of what was made from it. A model that is
    none of the registry's is a node without a status. A version that comes up again is not followed again.
    """
    seen: set[str] = set()
    tree = _node(database, version, depth, seen)
    return tree | {"children": database.children(version.model, version.version)}


def _node(database: RegistryDatabase, version: ModelVersion, depth: int, seen: set[str]) -> dict[str, Any]:
    again = version.reference in seen or len(seen) >= MAX_NODES
    seen.add(version.reference)
    run, inputs, evaluations = database.origin(version.model, version.version)
    parents = []
    for given in inputs:
        if given.kind != "model" or again or depth <= 0:
            continue
        parent = _registered(database, given.name)
        if parent is not None:
            parents.append(_node(database, parent, depth - 1, seen))
        else:
            parents.append(_foreign(given.name, given.digest))
    return {
        "reference": version.reference,
        "digest": version.digest,
        "status": version.status.value,
        "source": version.source_uri,
        "relation": version.base_relation,
        "run": None if run is None else asdict(run),
        "datasets": [asdict(given) for given in inputs if given.kind == "dataset"],
        "evaluations": [asdict(result) for result in evaluations],
        "parents": parents,
    }


def _registered(database: RegistryDatabase, name: str) -> ModelVersion | None:
    try:
        parsed = parse_reference(name)
    except RequestError:  # somebody else's way to name models
        return None
    return database.find(parsed.model, parsed.version) if isinstance(parsed, VersionRef) else None


def _foreign(name: str, digest: str) -> dict[str, Any]:
    nothing: dict[str, Any] = {"status": "", "source": "", "relation": "", "run": None}
    return {"reference": name, "digest": digest, **nothing, "datasets": [], "evaluations": [], "parents": []}
