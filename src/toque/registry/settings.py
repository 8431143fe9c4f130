"""Where the registry keeps its metadata and its files. Read by the configuration before a cold start, so: small."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from toque.errors import ConfigError

PUBLIC_KEY = re.compile(r"ed25519:[A-Za-z0-9+/]{43}=")  # 32 bytes in base64


class RegistrySettings(Struct, frozen=True):
    """``url`` is SQLAlchemy's; "" is SQLite in TOQUE_HOME. ``blobs`` is ``s3://bucket/prefix``; "" is TOQUE_HOME.
    ``require_signature``: only versions are served that one of ``trusted_keys`` (as `toque sign` spells them) signed.
    """

    url: str = ""
    blobs: str = ""
    require_signature: bool = False
    trusted_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_keys(self.trusted_keys, "trusted_keys")
        if self.require_signature and not self.trusted_keys:
            raise ConfigError(
                "require_signature needs trusted_keys: without one nothing could be served",
                param="require_signature",
            )

    def database_url(self, home: Path) -> str:
        return self.url or f"sqlite:///{home / 'registry.db'}"

    def exists(self, home: Path) -> bool:
        """Whether there may be a registry, without opening it: one that was never written to has no file."""
        return bool(self.url) or (home / "registry.db").exists()


def from_environment() -> RegistrySettings:
    """The variables TOQUE_REGISTRY_*, for callers that read no other settings."""
    keys = os.environ.get("TOQUE_REGISTRY_TRUSTED_KEYS", "")
    return RegistrySettings(
        os.environ.get("TOQUE_REGISTRY_URL", ""),
        os.environ.get("TOQUE_REGISTRY_BLOBS", ""),
        os.environ.get("TOQUE_REGISTRY_REQUIRE_SIGNATURE", "").strip().lower() in ("1", "true"),
        tuple(key.strip() for key in keys.split(",") if key.strip()),
    )


def check_keys(keys: Iterable[str], param: str) -> None:
    """ConfigError for a text that is no public key."""
    for key in keys:
        if not PUBLIC_KEY.fullmatch(key):
            raise ConfigError(
                f"{param} takes public keys such as ed25519:… (`toque sign --new-key FILE` prints one), "
                f"got {key[:60]!r}",
                param=param,
            )
