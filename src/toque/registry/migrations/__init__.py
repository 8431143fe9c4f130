"""The registry's migrations, one file each in ``versions/``.

The fleet's tables live in the same database, so that a deployment and the version that it pins are one transaction
apart: a change of either is the next file here (``v0002_fleet.py`` with ``revision = "0002"`` and
``down_revision = "0001"``). Nothing else is to be edited: the newest file is what a database is brought up to. Its
tables are declared beside the code that uses them, on the registry's own metadata::

    from toque.registry.tables import metadata
    deployment = Table("deployment", metadata, ...)

A migration repeats the columns rather than importing them: it says what a database was given then, whatever the
tables have become since.
"""
