"""An engine's settings: frozen, and checked when made."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields

from toque.engine.speculate.settings import Speculation, parse_speculation
from toque.errors import ConfigError

_TENANT = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``0`` means "decide from the machine and the model" wherever a size is meant.

    ``kv_memory_mb`` is a bound: pages are committed as they are used. ``step_target_ms`` bounds a step while any
    stream is decoding, so that a long prompt never freezes the others.
    """

    backend: str = "cpu"  # or "reference"
    threads: int = 0
    isa: str = ""
    context_length: int = 0
    kv_memory_mb: int = 0
    kv_blocks: int = 0  # overrides kv_memory_mb; tests use it
    kv_dtype: str = (
        "auto"  # of the KV cache: auto or bf16 (16 bits a number), or int8 (about half the memory)
    )
    max_batch_tokens: int = 2048
    max_sequences: int = 64
    step_target_ms: float = 50.0
    prefix_cache: bool = True
    quantize: str = ""  # int8, int4 or fp8: quantize a float model as it is loaded
    speculate: str = (
        "off"  # "ngram", "ngram:K" or "draft=PATH:K": guess up to K tokens ahead; the text stays the same
    )
    tenant_weights: str = ""  # "a=2,b=0.5": shares of the engine when tenants compete; 1 for all others

    @property
    def weights(self) -> dict[str, float]:
        """``tenant_weights`` by tenant. ConfigError for what is no list of them."""
        weights: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in self.tenant_weights.split(","))):
            tenant, _, text = part.rpartition("=")
            try:
                weight = float(text)
            except ValueError:
                weight = 0.0
            if not _TENANT.fullmatch(tenant.strip()) or not 0.001 <= weight <= 1000:
                raise ConfigError(
                    f"tenant_weights is a list like 'a=2,b=0.5' with weights from 0.001 to 1000, got {part[:60]!r}",
                    param="tenant_weights",
                )
            weights[tenant.strip()] = weight
        return weights

    @property
    def speculation(self) -> Speculation | None:
        """``speculate`` as a value; None for off. ConfigError for what it cannot be."""
        return parse_speculation(self.speculate)

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(field.default, float):
                fits = isinstance(given, int | float) and not isinstance(given, bool)
            else:
                fits = type(given) is type(field.default)
            if not fits:
                raise ConfigError(
                    f"{field.name} must be a {type(field.default).__name__}, got {str(given)[:40]!r}",
                    param=field.name,
                )
        if self.quantize not in ("", "int8", "int4", "fp8"):
            raise ConfigError(
                f"quantize must be int8, int4, fp8 or empty, got {self.quantize[:40]!r}", param="quantize"
            )
        if self.kv_dtype not in ("auto", "bf16", "int8"):
            raise ConfigError(
                f"kv_dtype must be auto, bf16 or int8, got {self.kv_dtype[:40]!r}", param="kv_dtype"
            )
        for name in ("threads", "context_length", "kv_memory_mb", "kv_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}", param=name)
        most = max(64, 4 * (os.cpu_count() or 1))  # many more than cores only wait for each other
        if self.threads > most:
            raise ConfigError(
                f"threads must be at most {most} on this machine, got {self.threads}", param="threads"
            )
        for name, high in (("max_batch_tokens", 65536), ("max_sequences", 1024)):
            if not 1 <= getattr(self, name) <= high:
                raise ConfigError(
                    f"{name} must be between 1 and {high}, got {getattr(self, name)}", param=name
                )
        _ = self.weights, self.speculation
        if not 1.0 <= self.step_target_ms <= 60_000:
            raise ConfigError(
                f"step_target_ms must be between 1 and 60000, got {self.step_target_ms}",
                param="step_target_ms",
            )
