"""The faces of one deployment's versions: read in a thread when they are needed, released when nobody needs them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, Protocol

from toque.errors import ToqueError
from toque.gateway.face import Face, Profile
from toque.routing.base import EngineClient, ServedVersion

log = logging.getLogger("toque.gateway")

_RETRY_S = 5.0  # what could be read once may be read again


class FaceLoader(Protocol):
    """Called in a thread. Raises ModelError."""

    def __call__(self, name: str, version: ServedVersion, client: EngineClient) -> Face: ...


class Faces:
    """A tokenizer takes tens of MiB, so that a gateway with many sleeping models holds only those in use: `release`
    drops all of them, and what is told of a version without its tokenizer, its profile, stays until the version goes.

    ``failed`` says by version why it cannot be read. A version that could be read before is tried again.
    """

    def __init__(
        self,
        name: str,
        load: FaceLoader,
        loading: Executor,
        client_of: Callable[[str], EngineClient],
        on_change: Callable[[], None],
    ) -> None:
        """``loading`` runs ``load``; ``client_of`` gives a version's engines; ``on_change`` hears of each face that
        was read, or could not be."""
        self._name = name
        self._load = load
        self._loading = loading
        self._client_of = client_of
        self._on_change = on_change
        self._versions: Mapping[str, ServedVersion] = {}
        self._loaded: dict[str, Face] = {}
        self._profiles: dict[str, Profile] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failed_at: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.used_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._loaded)

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __contains__(self, key: str) -> bool:
        return key in self._loaded

    def __getitem__(self, key: str) -> Face:
        return self._loaded[key]

    def keep(self, versions: Mapping[str, ServedVersion], *, needed: bool) -> None:
        """These are all that there are. Those that nothing is known of are read, and where they are ``needed`` those
        that were released, too."""
        self._versions = versions
        known: dict[str, Any]
        for known in (self._loaded, self._profiles, self.failed, self._failed_at):
            for key in [key for key in known if key not in versions]:
                del known[key]
        self._read(key for key in versions if needed or key not in self._profiles)

    def recall(self) -> None:
        """They are needed now."""
        self.used_at = time.monotonic()
        self._read(self._versions)

    def release(self) -> None:
        self._loaded.clear()

    def profile(self, shares: Mapping[str, float]) -> Profile | None:
        """Of the version that has most of the requests."""
        return max(self._profiles.values(), key=lambda profile: shares.get(profile.key, 0.0), default=None)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @property
    def reading(self) -> bool:
        return bool(self._tasks)

    def _read(self, keys: Iterable[str]) -> None:
        now = time.monotonic()
        for key in keys:
            if key in self._loaded or key in self._tasks:
                continue
            if key in self.failed and (key not in self._profiles or now - self._failed_at[key] < _RETRY_S):
                continue
            self.failed.pop(key, None)
            self._tasks[key] = asyncio.get_running_loop().create_task(self._learn(self._versions[key]))

    async def _learn(self, version: ServedVersion) -> None:
        """Load a version's face, beside the loop."""
        key = version.key
        client = self._client_of(key)
        try:
            face = await asyncio.get_running_loop().run_in_executor(
                self._loading, self._load, self._name, version, client
            )
        except ToqueError as error:
            log.error("model %s: %s", self._name, error.message)
            self._fail(key, error.message)
        except Exception as error:
            log.exception("model %s cannot be read", self._name)
            self._fail(key, f"{type(error).__name__}: {error}")
        else:
            if key in self._versions:
                self._loaded[key], self._profiles[key] = face, face.profile
        finally:
            del self._tasks[key]
            self._on_change()

    def _fail(self, key: str, why: str) -> None:
        self.failed[key], self._failed_at[key] = why, time.monotonic()
