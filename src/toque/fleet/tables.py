"""The fleet's tables, in the registry's database. A row's ``document`` is all of it, as JSON; the other columns are
what is searched for, and what people look at."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, Index, String, Table, Text

from toque.registry.tables import metadata

deployment = Table(
    "deployment",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("reference", Text, nullable=False),  # the model as it was asked for
    Column("current", Text, nullable=False),  # the revision that it is pinned to
    Column("generation", BigInteger, nullable=False),
    Column("observed_generation", BigInteger, nullable=False),
    Column("stamp", BigInteger, nullable=False),  # counts the row's writes
    Column("document", Text, nullable=False),
)

replica = Table(
    "replica",
    metadata,
    Column("id", String(160), primary_key=True),
    Column("deployment", String(128), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("address", Text, nullable=False),
    Column("document", Text, nullable=False),
)

routing = Table(
    "routing",  # one row: all routing tables
    metadata,
    Column("name", String(32), primary_key=True),
    Column("number", BigInteger, nullable=False),  # counts its writes
    Column("document", Text, nullable=False),
)

lease = Table(
    "lease",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("holder", String(128), nullable=False),
    Column("epoch", BigInteger, nullable=False),  # rises with each new holder
    Column("until", Double, nullable=False),  # seconds since the epoch
)

gateway_signal = Table(
    "gateway_signal",
    metadata,
    Column("gateway", String(128), primary_key=True),
    Column("deployment", String(128), primary_key=True),
    Column("at", Double, nullable=False),  # seconds since the epoch
    Column("document", Text, nullable=False),
    Index("gateway_signal_at", "at"),
)
