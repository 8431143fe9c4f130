"""The registry's tables. Times are microseconds since the epoch; "" and 0 stand for what is not known.

::

    model ◀── model_version ◀── model_alias        alias_event: every move of an alias, append-only
                   ▲
                   ├── lineage        how it was made: 0..1
                   ├── version_signature  who has signed it
                   ├── version_input  what it was made from
                   └── eval_result    how well it does; more may come at any time
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData()

_COUNTER = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only what it calls INTEGER


def _model() -> Column[str]:
    return Column("model", String(96), primary_key=True)


def _version() -> Column[int]:
    return Column("version", Integer, primary_key=True, autoincrement=False)


def _of_version() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["model", "version"], ["model_version.model", "model_version.version"])


model = Table(
    "model",
    metadata,
    Column("name", String(96), primary_key=True),
    Column("description", Text, nullable=False),
    Column("tags", JSON, nullable=False),  # {name: text}
    Column("created_at", BigInteger, nullable=False),
)

model_version = Table(
    "model_version",
    metadata,
    Column("model", String(96), ForeignKey("model.name"), primary_key=True),
    _version(),
    Column("status", String(16), nullable=False),  # PENDING, READY, FAILED, ARCHIVED
    Column("problem", Text, nullable=False),  # why it FAILED, or why Toque cannot run it yet
    Column("source_uri", Text, nullable=False),  # what was asked for
    Column("resolved_uri", Text, nullable=False),  # the same, pinned to what it meant then
    Column("digest", String(64), nullable=False),  # over the files' names and contents
    Column("files", JSON, nullable=False),  # [{name, size, sha256}]
    Column("size", BigInteger, nullable=False),  # bytes of all files
    Column("format", String(32), nullable=False),
    Column("arch", String(64), nullable=False),
    Column("params", BigInteger, nullable=False),
    Column("dtype", String(32), nullable=False),
    Column("quantization", String(32), nullable=False),
    Column("context_length", BigInteger, nullable=False),
    Column("license", String(128), nullable=False),
    Column("base_model", String(512), nullable=False),
    Column("base_relation", String(32), nullable=False),  # finetune, adapter, merge, quantized, import
    Column("card", JSON, nullable=False),  # the README's front matter
    Column("tags", JSON, nullable=False),
    Column("created_by", String(128), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Index("model_version_digest", "digest"),
)

model_alias = Table(
    "model_alias",
    metadata,
    _model(),
    Column("alias", String(64), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("moved_at", BigInteger, nullable=False),
    _of_version(),
)

alias_event = Table(
    "alias_event",
    metadata,
    Column("id", _COUNTER, primary_key=True),
    Column("model", String(96), nullable=False),
    Column("alias", String(64), nullable=False),
    Column("previous", Integer, nullable=True),  # NULL: there was none
    Column("version", Integer, nullable=True),  # NULL: it was removed
    Column("actor", String(128), nullable=False),
    Column("at", BigInteger, nullable=False),
    Index("alias_event_model", "model", "alias"),
)

lineage = Table(
    "lineage",
    metadata,
    _model(),
    _version(),
    Column("system", String(64), nullable=False),  # transformers, trl, peft, mlflow, import …
    Column("run_id", String(256), nullable=False),
    Column("run_url", Text, nullable=False),
    Column("external_model_id", String(512), nullable=False),
    Column("git_commit", String(64), nullable=False),
    Column("params", JSON, nullable=False),  # of the training
    Column("metrics", JSON, nullable=False),  # its last values: {name: number}
    _of_version(),
)

version_input = Table(
    "version_input",
    metadata,
    _model(),
    _version(),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("kind", String(16), nullable=False),  # dataset, model
    Column("name", String(512), nullable=False),
    Column("digest", String(128), nullable=False),
    Column("source_type", String(64), nullable=False),
    Column("source", Text, nullable=False),
    Column("context", String(64), nullable=False),  # training, validation, parent, base …
    _of_version(),
)

eval_result = Table(
    "eval_result",
    metadata,
    Column("id", _COUNTER, primary_key=True),
    Column("model", String(96), nullable=False),
    Column("version", Integer, nullable=False),
    Column("task", String(256), nullable=False),
    Column("dataset", String(512), nullable=False),
    Column("revision", String(128), nullable=False),
    Column("split", String(64), nullable=False),
    Column("metric", String(128), nullable=False),
    Column("value", Double, nullable=False),
    Column("source", Text, nullable=False),
    _of_version(),
    Index("eval_result_version", "model", "version"),
)

version_signature = Table(
    "version_signature",
    metadata,
    _model(),
    _version(),
    Column("key", String(64), primary_key=True),  # the public key that verifies it
    Column("value", String(96), nullable=False),
    Column("signed_by", String(128), nullable=False),
    Column("at", BigInteger, nullable=False),
    _of_version(),
)
