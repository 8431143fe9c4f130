"""An engine's settings are checked when they are made, and the error names the field and the value."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from toque.engine.options import EngineOptions
from toque.errors import ConfigError

MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("threads", [0, 1, MOST_THREADS], [-1, MOST_THREADS + 1, 10**9]),
        ("context_length", [0, 1, 10**6], [-1]),
        ("kv_memory_mb", [0, 1], [-1]),
        ("kv_blocks", [0, 7], [-1]),
        ("max_batch_tokens", [1, 65536], [0, 65537]),
        ("max_sequences", [1, 1024], [0, 1025]),
        ("step_target_ms", [1.0, 60_000.0], [0.9, 60_001.0, float("nan"), float("inf")]),
        ("quantize", ["", "int8", "int4", "fp8"], ["int9", "INT8"]),
    ],
)
def test_values_within_the_bounds_only(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(EngineOptions(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ConfigError, match=name) as error:
            EngineOptions(**{name: value})
        assert error.value.param == name
        assert str(value) in error.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", "2"), ("threads", True), ("max_sequences", 1.5), ("isa", None), ("prefix_cache", 1),
     ("step_target_ms", "50"), ("step_target_ms", True)],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a .*, got {str(value)!r}"):
        EngineOptions(**{name: value})
    assert EngineOptions(step_target_ms=20).step_target_ms == 20


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineOptions().threads = 1  # type: ignore[misc]
