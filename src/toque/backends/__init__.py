"""What executes a graph. `load_backend` imports a backend only when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from toque.errors import ConfigError

if TYPE_CHECKING:
    from toque.backends.base import Backend

_BACKENDS = {
    "cpu": ("toque.backends.cpu", "CpuBackend"),
    "reference": ("toque.backends.reference", "ReferenceBackend"),
}


def load_backend(name: str) -> Backend:
    """The backend called ``name``. An unknown name is a `ConfigError` with the list of known ones."""
    if name not in _BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(_BACKENDS)}, got {name!r}", param="backend")
    module, attribute = _BACKENDS[name]
    return cast("Backend", getattr(importlib.import_module(module), attribute)())
