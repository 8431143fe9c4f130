"""API keys: who is calling. Keys are held as digests only."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from toque.errors import AuthenticationError

# Everything else needs a key when there are keys; these answer orchestrators that have none.
OPEN_PATHS = frozenset({"/live", "/ready", "/health"})


class KeyRing:
    """The keys that are let in. Without any key, everybody is the tenant ``""``."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys if key)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: str | None) -> str:
        """The tenant that an ``Authorization`` header stands for; AuthenticationError when it is nobody's.

        Every key is compared, in constant time, so that timing tells nothing about how many or which.
        """
        if not self._digests:
            return ""
        if not authorization:
            raise AuthenticationError(
                "this server needs an API key: send it as 'Authorization: Bearer YOUR_KEY'",
                code="missing_api_key",
            )
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError("the Authorization header must be 'Bearer YOUR_KEY'")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        if not found:
            raise AuthenticationError("that API key is not known here")
        return digest.hex()[:12]
