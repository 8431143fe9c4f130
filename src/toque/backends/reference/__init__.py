"""The oracle: the same graphs as every other backend, in plain numpy float32, slow and easy to check."""

from __future__ import annotations

from toque.backends.reference.executable import ReferenceBackend, ReferenceExecutable

__all__ = ["ReferenceBackend", "ReferenceExecutable"]
