"""API keys: who is calling, and what they may use. Keys are held as digests only."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from toque.errors import AuthenticationError, StoreError
from toque.gateway.key_file import KeyFile, StoredKey, digest
from toque.gateway.quota import Allowance, Quota

log = logging.getLogger("toque.gateway")

RELOAD_S = 1.0  # a key that was created or revoked counts after so long at most


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a key stands for. ``tenant`` is whose turn and whose cache it is; ``key_id`` what the books say; ``admin``:
    may change what the server runs. Without any keys everybody may, and keys of the settings always may."""

    tenant: str
    key_id: str
    quota: Quota
    admin: bool = False


class KeyRing:
    """The keys that are let in: those of the settings, and those of a file, which is read again when it changes.

    Without any key, and without a file, everybody is the tenant ``""`` and shares one allowance. A file that cannot
    be read any more leaves the keys as they were.
    """

    def __init__(
        self,
        keys: Iterable[str],
        file: Path | None = None,
        default: Allowance | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._default = default or Allowance()
        self._clock = clock
        self._fixed: dict[bytes, Caller] = {}
        for key in keys:
            if key:
                known = digest(key)
                self._fixed[known] = self._caller(known.hex()[:12], known.hex()[:12], self._default, True)
        self._anybody = Caller("", "", Quota(self._default, clock), admin=True)
        self._file = None if file is None else KeyFile(file)
        self._stored: dict[bytes, Caller] = {}
        self._has_file = False
        self._seen: tuple[int, int, int] | None = None
        self._looked = -RELOAD_S
        if self._file is not None:
            self._read(self._file)

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._fixed) or self._has_file

    def caller(self, authorization: str | None) -> Caller:
        """Whom an ``Authorization`` header stands for; AuthenticationError when it is nobody.

        Keys are found by their digest: how long that takes tells nothing about them, as nobody can choose a digest.
        """
        if self._file is not None:
            self._look(self._file)
        if not self:
            return self._anybody
        if not authorization:
            raise AuthenticationError(
                "this server needs an API key: send it as 'Authorization: Bearer YOUR_KEY'",
                code="missing_api_key",
            )
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError("the Authorization header must be 'Bearer YOUR_KEY'")
        known = digest(key.strip())
        found = self._fixed.get(known) or self._stored.get(known)
        if found is None:
            raise AuthenticationError("that API key is not known here")
        return found

    def _look(self, file: KeyFile) -> None:
        now = self._clock()
        if now - self._looked < RELOAD_S:
            return
        self._looked = now
        try:
            if _stamp(file.path) != self._seen:
                self._read(file)
        except (StoreError, OSError) as error:
            log.error("keys were not read again, so the known ones stay: %s", error)

    def _read(self, file: KeyFile) -> None:
        seen = _stamp(file.path)
        if seen == self._seen:
            return
        self._seen = seen  # also of a file that is broken: it is told of once
        if seen is None:
            raise StoreError(f"{file.path} is gone")
        before = {caller.key_id: caller for caller in self._stored.values()}
        stored = {
            bytes.fromhex(key.digest): self._stored_caller(key, before.get(key.id)) for key in file.read()
        }
        self._stored = stored
        self._has_file = True

    def _stored_caller(self, key: StoredKey, before: Caller | None) -> Caller:
        d = self._default
        allowance = Allowance(
            d.requests_per_minute if key.requests_per_minute is None else key.requests_per_minute,
            d.tokens_per_minute if key.tokens_per_minute is None else key.tokens_per_minute,
            d.concurrent_requests if key.concurrent_requests is None else key.concurrent_requests,
        )
        same = before is not None and (before.tenant, before.admin) == (key.tenant, key.admin)
        if before is not None and same and before.quota.allowance == allowance:
            return before  # with what it has used already
        return self._caller(key.tenant, key.id, allowance, key.admin)

    def _caller(self, tenant: str, key_id: str, allowance: Allowance, admin: bool) -> Caller:
        return Caller(tenant, key_id, Quota(allowance, self._clock), admin)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
