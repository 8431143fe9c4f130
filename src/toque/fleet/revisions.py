"""What a change of a deployment does to its row. Pure, but for the size of a model's files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from toque.errors import ConflictError, RequestError
from toque.fleet import rollout as rollouts
from toque.fleet.memory import estimate_mb
from toque.fleet.parse import parse_spec
from toque.fleet.spec import DeploymentSpec, RolloutPolicy
from toque.fleet.store import DeploymentRow, Proposal, Revision
from toque.registry.names import AliasRef, parse_reference


def revision_of(pinned: Revision, spec: DeploymentSpec) -> Revision:
    """The pinned version with the specification's engine options and memory. Other options are another key, and so is
    another state of a plain path."""
    key = pinned.digest or (f"{pinned.path}@{pinned.state}" if pinned.state else pinned.path)
    if spec.engine:
        key += "#" + hashlib.sha256(repr(sorted(spec.engine.items())).encode()).hexdigest()[:8]
    memory = spec.resources.memory_mb or estimate_mb(Path(pinned.path), spec.engine)
    return replace(pinned, key=key, engine=spec.engine, memory_mb=memory)


def first_row(spec: DeploymentSpec, pinned: Revision, now: float) -> DeploymentRow:
    """A deployment that has just been made. RequestError for what cannot be."""
    check(spec)
    revision = revision_of(pinned, spec)
    return DeploymentRow(spec.name, spec, (revision,), revision.key, used_at=now)


def check(spec: DeploymentSpec) -> None:
    """RequestError names the field and the value."""
    parse_spec(msgspec.to_builtins(spec))


def unchanged(row: DeploymentRow, revision: Revision) -> bool:
    """What is deployed anew is what runs, or what is being rolled out."""
    if row.rollout is not None and row.rollout.running:
        return revision.key == row.rollout.new
    return revision.key == row.current


def renewed(row: DeploymentRow, revision: Revision) -> DeploymentRow:
    """With what may change of a revision without another key: what it is called, and what memory it is given."""
    revisions = tuple(revision if known.key == revision.key else known for known in row.revisions)
    return replace(row, revisions=revisions)


def check_quiet(row: DeploymentRow) -> None:
    if row.rollout is not None and row.rollout.running:
        raise ConflictError(
            f"deployment {row.name} is rolling out ({row.rollout.phase}): promote or undo that first"
        )


def roll(row: DeploymentRow, new: Revision, policy: RolloutPolicy, now: float) -> DeploymentRow:
    check_quiet(row)
    if new.key == row.current:
        raise ConflictError(f"deployment {row.name} runs {new.label or new.key} already")
    if row.stopped:
        return switch(row, new)
    number = 1 if row.rollout is None else row.rollout.number + 1
    rollout = rollouts.begin(number, row.current, new.key, policy, now)
    proposed = _open(row, new)
    return replace(row, revisions=_with(row, new), previous="", rollout=rollout, proposed=proposed)


def switch(row: DeploymentRow, new: Revision) -> DeploymentRow:
    """Without any replicas there is nothing to roll out."""
    if new.key == row.current:
        return row
    proposed = _open(row, new)
    return replace(row, revisions=_with(row, new), previous=row.current, current=new.key, proposed=proposed)


def follows(row: DeploymentRow, model: str, alias: str) -> bool:
    """Whether ``model@alias`` is what is deployed, in whichever spelling."""
    try:
        reference = parse_reference(row.spec.model)
    except RequestError:  # a plain path
        return False
    return reference == AliasRef(model, alias) and not row.deleted


def offered(row: DeploymentRow, proposal: Proposal | None) -> DeploymentRow:
    """A rollout to another version than what runs, or is being rolled out, is proposed; None withdraws it."""
    rolling = row.rollout is not None and row.rollout.running
    now = row.revision(row.rollout.new if row.rollout is not None and rolling else row.current)
    if proposal is not None and proposal.digest == now.digest:
        proposal = None
    return replace(row, proposed=proposal)


def _open(row: DeploymentRow, new: Revision) -> Proposal | None:
    """What stays proposed of a row, whose specification is the new one already, while ``new`` takes over."""
    known = row.proposed
    if known is None or known.digest == new.digest or known.reference != row.spec.model:
        return None
    return known


def pruned(row: DeploymentRow, running: Iterable[str]) -> DeploymentRow:
    """Without revisions that nothing runs (``running``: keys) and nothing leads back to."""
    needed = {row.current, row.previous, *running}
    if row.rollout is not None:
        needed |= {row.rollout.old, row.rollout.new}
    kept = tuple(revision for revision in row.revisions if revision.key in needed)
    return row if len(kept) == len(row.revisions) else replace(row, revisions=kept)


def _with(row: DeploymentRow, new: Revision) -> tuple[Revision, ...]:
    """Those that are not needed any more go once none of their replicas is left."""
    return (*(revision for revision in row.revisions if revision.key != new.key), new)
