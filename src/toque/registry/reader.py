"""Questions to the registry from an event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.asking import Asker
from toque.errors import ModelNotFoundError, QueueFullError, StoreError, UnavailableError
from toque.registry.settings import RegistrySettings

if TYPE_CHECKING:
    from toque.registry.registry import Registration, Registry


class RegistryReader(Asker["Registry"]):
    """Opens the registry with the first question, and keeps it open; one registration at a time besides.

    A registry that nobody ever wrote to is not made by asking: it knows no model.
    """

    def __init__(self, settings: RegistrySettings, home: Path | None = None) -> None:
        """``home``: the local store, by default that of this user."""
        self._settings = settings
        self._home = home
        self._registering = False
        super().__init__("registry", self._existing)

    async def register(self, source: str, model: str, **more: Any) -> Registration:
        """As `Registry.register`, in a thread of its own: a long download keeps no question waiting."""
        if self._registering:
            raise QueueFullError("another registration is under way; try again later", retry_after_s=10.0)

        def register() -> Registration:
            with self._make() as registry:
                return registry.register(source, model, **more)

        self._registering = True
        try:
            return await asyncio.to_thread(register)
        except StoreError as error:
            raise UnavailableError(error.message, retry_after_s=5.0) from error
        finally:
            self._registering = False

    def _existing(self) -> Registry:
        registry = self._make()
        if not self._settings.exists(registry.store.home):
            raise ModelNotFoundError("no model is registered here", param="model")
        return registry

    def _make(self) -> Registry:
        from toque.registry.registry import Registry
        from toque.registry.store import Store

        return Registry(Store(self._home, registry=self._settings))
