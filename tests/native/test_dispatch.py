"""Which instruction set runs, and how to force one."""

from __future__ import annotations

import pytest

from toque import _native


def test_the_best_supported_set_is_the_default(monkeypatch):
    monkeypatch.delenv("TOQUE_ISA", raising=False)
    best = next(isa for isa in _native.isas() if not isa.endswith("_emulated"))
    assert _native.resolve_isa() == best


@pytest.mark.parametrize("isa", _native.isas())
def test_environment_and_argument_force_a_set(isa, monkeypatch):
    monkeypatch.setenv("TOQUE_ISA", isa)
    assert _native.resolve_isa() == isa
    assert _native.resolve_isa("scalar") == "scalar"


def test_a_set_that_cannot_run_is_an_error_that_lists_those_that_can(monkeypatch):
    with pytest.raises(ValueError, match=r'isa: this machine cannot run "amx"; it can run: .*scalar'):
        _native.resolve_isa("amx")
    monkeypatch.setenv("TOQUE_ISA", "avx1024")
    with pytest.raises(
        ValueError, match=r'TOQUE_ISA: this machine cannot run "avx1024"; it can run: .*scalar'
    ):
        _native.resolve_isa()
