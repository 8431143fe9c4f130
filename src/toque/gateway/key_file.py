"""The API keys of this machine: a JSON file that holds digests, never keys."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from toque.errors import ConfigError, NotFoundError, StoreError
from toque.registry.locks import locked

NAME = "keys.json"
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class StoredKey(Struct, frozen=True, kw_only=True):
    """A key as it is kept. ``id`` begins the key itself, so that people can tell which one they hold.

    The bounds are the server's defaults where None, and none at all where 0.
    """

    id: str
    tenant: str
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # SHA-256
    created: int  # seconds since the epoch
    note: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    admin: bool = False  # may deploy, scale, roll out


class _Document(Struct, kw_only=True):
    version: int = 1
    keys: list[StoredKey]


def digest(key: str) -> bytes:
    """A plain hash is enough: a key holds 256 random bits, so there is nothing to guess slowly."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyFile:
    """Guarantees: a reader sees the file before a change or after it, never half; of changes by several processes
    none is lost; a key cannot be recovered from the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[StoredKey, ...]:
        """StoreError when there is a file that is no list of keys; none at all are no keys."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise StoreError(f"cannot read the keys in {self.path}: {error.strerror}") from None
        try:
            return tuple(msgspec.json.decode(data, type=_Document).keys)
        except msgspec.DecodeError as error:
            raise StoreError(f"{self.path} does not hold a list of keys: {error}") from None

    def create(
        self,
        tenant: str,
        *,
        note: str = "",
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        concurrent_requests: int | None = None,
        admin: bool = False,
    ) -> tuple[StoredKey, str]:
        """A new key, and the text to send: nobody can show it again. ConfigError names what does not fit."""
        if not TENANT.fullmatch(tenant):
            raise ConfigError(
                f"a tenant is up to 64 letters, digits, dots, dashes and underscores, got {tenant[:80]!r}",
                param="tenant",
            )
        bounds = {
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "concurrent_requests": concurrent_requests,
        }
        for name, bound in bounds.items():
            if bound is not None and not 0 <= bound < 2**31:
                raise ConfigError(f"{name} must be between 0 and {2**31 - 1}, got {bound}", param=name)
        with locked(self._lock):
            keys = self.read()
            taken = {key.id for key in keys}
            while (identity := f"tq-{secrets.token_hex(4)}") in taken:
                pass
            text = f"{identity}-{secrets.token_urlsafe(32)}"
            key = StoredKey(
                id=identity,
                tenant=tenant,
                digest=digest(text).hex(),
                created=int(time.time()),
                note=note,
                admin=admin,
                **bounds,
            )
            self._write((*keys, key))
        return key, text

    def revoke(self, identity: str) -> StoredKey:
        """Remove the key of this id. NotFoundError when there is none."""
        with locked(self._lock):
            keys = self.read()
            gone = [key for key in keys if key.id == identity]
            if not gone:
                raise NotFoundError(f"there is no key {identity[:40]!r}; `toque keys list` shows them")
            # The file stays, also empty: a server whose last key is revoked lets nobody in, not everybody.
            self._write(tuple(key for key in keys if key.id != identity))
        return gone[0]

    @property
    def _lock(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    def _write(self, keys: tuple[StoredKey, ...]) -> None:
        data = msgspec.json.format(msgspec.json.encode(_Document(keys=list(keys))), indent=2)
        try:
            descriptor, name = tempfile.mkstemp(prefix=".keys-", dir=self.path.parent)  # mode 0600
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, self.path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {error.strerror}") from None
