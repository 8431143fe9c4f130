"""What `toque serve` makes of its arguments before anything starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toque.file_state import file_state
from toque.fleet.resolve import file_label
from toque.gateway.serve import ServedModel, resolve


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, Any]]:
    """What the store was asked for; it knows everything."""
    found: list[tuple[str, Any]] = []
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path / "home"))

    def resolve_version(reference: str, *, store: Any, report: Any) -> Any:
        found.append((reference, report))
        return SimpleNamespace(path=Path("/store/model.gguf"), digest="sha256:1", reference="stored")

    monkeypatch.setattr("toque.registry.versions.resolve_version", resolve_version)
    return found


@pytest.mark.parametrize(
    ("reference", "name", "target"),
    [
        ("smollm2", "smollm2", "smollm2"),
        ("small=smollm2", "small", "smollm2"),
        ("small=pypi:package==1.0#x", "small", "pypi:package==1.0#x"),
        ("pypi:package==1.0#x", "pypi:package==1.0#x", "pypi:package==1.0#x"),
        ("hf:org/repo@rev=1", "hf:org/repo@rev=1", "hf:org/repo@rev=1"),
        ("https://host/a?b=c", "https://host/a?b=c", "https://host/a?b=c"),
        ("=smollm2", "=smollm2", "=smollm2"),
    ],
)
def test_only_a_plain_name_stands_before_the_equals_sign(
    asked: list[tuple[str, Any]], reference: str, name: str, target: str
) -> None:
    def report(progress: object) -> None: ...

    assert resolve(reference, report) == ServedModel(
        name, Path("/store/model.gguf"), "sha256:1", "stored", target
    )
    assert asked == [(target, report)]


def test_a_path_may_hold_an_equals_sign(tmp_path: Path, asked: list[tuple[str, Any]]) -> None:
    file = tmp_path / "a=b.gguf"
    file.touch()
    state = file_state(file)
    label = file_label(file, state)
    assert resolve(str(file)) == ServedModel("a=b", file, label=label, state=state)
    assert resolve(f"named={file}") == ServedModel("named", file, label=label, state=state)
    assert resolve(f"file:{file}") == ServedModel("a=b", file, label=label, state=state)
    assert not asked
