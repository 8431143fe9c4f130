"""Names for the content of full KV blocks: a keyed hash chained over everything that precedes the block.

Two blocks have the same name exactly when they were computed from the same tokens at the same positions by the same
model for the same tenant and cache salt. The key is random and never leaves the process, so nobody outside can make a
prompt whose name collides with another tenant's.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b

NAME_BYTES = 16


class PrefixNames:
    """Computes block names under one random key."""

    __slots__ = ("_identity", "_key", "block_size")

    def __init__(self, block_size: int, identity: str) -> None:
        self.block_size = block_size
        self._key = os.urandom(32)
        self._identity = identity.encode()

    def root(self, tenant: str, salt: str) -> bytes:
        """The name of the empty prefix: model identity, tenant and salt, each prefixed by its length."""
        digest = blake2b(key=self._key, digest_size=NAME_BYTES)
        for part in (
            self._identity,
            tenant.encode("utf-8", "surrogatepass"),
            salt.encode("utf-8", "surrogatepass"),
        ):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    def extend(self, names: list[bytes], root: bytes, tokens: Sequence[int], n_blocks: int) -> None:
        """Append the names of blocks ``len(names)`` to ``n_blocks - 1`` of a sequence; all of them must be full."""
        size, key = self.block_size, self._key
        parent = names[-1] if names else root
        for block in range(len(names), n_blocks):
            content = array("i", tokens[block * size : (block + 1) * size]).tobytes()
            parent = blake2b(parent + content, key=key, digest_size=NAME_BYTES).digest()
            names.append(parent)
