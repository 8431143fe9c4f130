"""Where the registry keeps its metadata and its files. Read by the configuration before a cold start, so: small."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct


class RegistrySettings(Struct, frozen=True):
    """``url`` is SQLAlchemy's; "" is SQLite in TOQUE_HOME. ``blobs`` is ``s3://bucket/prefix``; "" is TOQUE_HOME."""

    url: str = ""
    blobs: str = ""

    def database_url(self, home: Path) -> str:
        return self.url or f"sqlite:///{home / 'registry.db'}"

    def exists(self, home: Path) -> bool:
        """Whether there may be a registry, without opening it: one that was never written to has no file."""
        return bool(self.url) or (home / "registry.db").exists()


def from_environment() -> RegistrySettings:
    """TOQUE_REGISTRY_URL and TOQUE_REGISTRY_BLOBS, for callers that read no other settings."""
    return RegistrySettings(
        os.environ.get("TOQUE_REGISTRY_URL", ""), os.environ.get("TOQUE_REGISTRY_BLOBS", "")
    )
