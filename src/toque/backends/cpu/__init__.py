"""The CPU backend: graphs lowered to the native module `toque._native`."""

from __future__ import annotations

from toque.backends.cpu.executable import CpuBackend, CpuExecutable

__all__ = ["CpuBackend", "CpuExecutable"]
