"""Plans against what loading really takes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from fixtures.tiny import tiny_llama
from toque import _native
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.cli.plan import command
from toque.engine.options import EngineOptions
from toque.engine.plan import MachineRates, plan_memory
from toque.errors import UnsupportedModelError
from toque.formats import load_checkpoint
from toque.formats.quantize import quantize_checkpoint
from toque.graph.fuse import fuse
from toque.models import build_graph


def plan(checkpoint, available=1 << 30, **options):  # type: ignore[no-untyped-def]
    return plan_memory(checkpoint, EngineOptions(**options), _native.packed_size, _native.kv_bytes, available)


@pytest.mark.parametrize("quantize", ["", "int8", "int4"])
def test_weights_and_cache_take_what_the_backend_takes(quantize: str) -> None:
    checkpoint = quantize_checkpoint(tiny_llama(), quantize) if quantize else tiny_llama()
    planned = plan(checkpoint)
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    executable = CpuBackend().lower(graph, checkpoint, BackendOptions(threads=1))
    assert planned.kv_per_token * 32 == executable.kv_bytes_per_block
    vectors = sum(4 * math.prod(t.shape) for t in checkpoint.tensors.values() if len(t.shape) == 1)
    assert executable._weights is not None
    packed = planned.weight_bytes - vectors
    assert packed <= executable._weights.arena.capacity <= packed + 64 * len(checkpoint.tensors) + (4 << 20)


def test_multiplications_are_those_of_the_linear_layers() -> None:
    planned = plan(tiny_llama())
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 96 * 64
    # Behind the last attention there is one row of a prompt, as for the logits.
    assert planned.multiplications == layer + 64 * 64 + 2 * 32 * 64
    assert planned.kernels == "F32"
    # A table that is the output matrix as well is looked up for every token, and multiplied with for the last.
    tied = tiny_llama()
    tensors = {name: tensor for name, tensor in tied.tensors.items() if name != "output.weight"}
    tied = dataclasses.replace(
        tied, tensors=tensors, config=dataclasses.replace(tied.config, tied_embeddings=True)
    )
    assert plan(tied).multiplications == planned.multiplications
    assert plan(quantize_checkpoint(tiny_llama(), "int4")).kernels == "Q4_0"
    rates = MachineRates(bandwidth=1e9, multiplications=1e9)
    assert planned.prefill_rate(rates) == pytest.approx(0.7e9 / planned.multiplications)
    assert planned.decode_rate(rates, 0) > planned.decode_rate(rates, 500) > 0


def test_what_fits_shrinks_with_the_memory() -> None:
    checkpoint = tiny_llama()
    assert plan(checkpoint, kv_memory_mb=1).fits[-1].sequences == (1 << 20) // (
        512 * plan(checkpoint).kv_per_token
    )
    assert plan(checkpoint, available=None).enough is None
    assert plan(checkpoint, available=1000).enough is False
    assert plan(checkpoint).enough is True
    assert [fit.context for fit in plan(checkpoint).fits] == [512]
    assert plan(checkpoint, max_sequences=3).fits[0].sequences == 3


def test_a_type_without_a_packed_form_is_refused_by_the_tensors_name() -> None:
    checkpoint = tiny_llama()
    tensor = dataclasses.replace(checkpoint.tensors["blk.0.ffn_up.weight"], dtype="IQ2_S")
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight"):
        plan(dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, tensor.name: tensor}))


@pytest.mark.model
def test_the_command_says_what_a_model_needs(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toque.cli.plan.measure", lambda threads, kind: MachineRates(30e9, 200e9))
    # Where there is no memory to try a step, its speed follows from the bandwidth.
    monkeypatch.setattr("toque.cli.plan.decode_seconds", lambda *_: None)
    done = CliRunner().invoke(command, [str(smollm2), "--json"], catch_exceptions=False)
    found = json.loads(done.output)
    assert found["kv_per_token"] == 30 * 3 * _native.kv_bytes(64)
    assert found["weight_bytes"] == pytest.approx(load_checkpoint(smollm2).path.stat().st_size, rel=0.02)
    assert 150 < found["decode_tokens_per_second"]["128"] < 300
    monkeypatch.setattr("toque.cli.plan.decode_seconds", lambda *_: {128: 0.008, 2048: 0.016})
    done = CliRunner().invoke(command, [str(smollm2), "--json"], catch_exceptions=False)
    assert json.loads(done.output)["decode_tokens_per_second"] == {"128": 125.0, "2048": 62.5}
    text = CliRunner().invoke(command, [str(smollm2)], catch_exceptions=False).output
    assert "fits:" in text
    assert "tokens/s" in text
