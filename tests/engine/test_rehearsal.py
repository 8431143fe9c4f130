"""Rehearsals: a model's graph over zeros, smaller where a part tells of the whole, and what is expected from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.checkpoints import prefill_logits
from fixtures.families import make
from fixtures.tiny import tiny_llama
from toque import _native
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.engine import rehearsal as module
from toque.engine.options import EngineOptions
from toque.engine.plan import MemoryPlan, plan_memory
from toque.engine.rehearsal import expected_seconds, rehearsal, step_seconds
from toque.formats import load_checkpoint
from toque.formats.checkpoint import Checkpoint
from toque.formats.quantize import quantize_checkpoint
from toque.graph.fuse import fuse
from toque.models import build_graph

OPTIONS = BackendOptions(threads=1, max_batch_tokens=1, max_sequences=1)


def plan_of(checkpoint: Checkpoint, available: int | None = None) -> MemoryPlan:
    return plan_memory(checkpoint, EngineOptions(), _native.packed_size, _native.kv_bytes, available)


@pytest.fixture
def experts(tmp_path: Path) -> Checkpoint:
    make("qwen3moe", num_hidden_layers=3).save_pretrained(tmp_path)
    return load_checkpoint(tmp_path)


def test_it_is_the_same_model_of_zeros() -> None:
    source = quantize_checkpoint(tiny_llama(), "int4")
    model = rehearsal(source, source.config.n_layers)
    assert model.config == source.config
    assert model.tensors.keys() == source.tensors.keys()
    for name, tensor in model.tensors.items():
        assert (tensor.dtype, tensor.shape) == (source.tensors[name].dtype, source.tensors[name].shape)
        assert tensor.nbytes == source.tensors[name].nbytes
    graph = fuse(build_graph(model.config, model.tensors.keys()))
    executable = CpuBackend().lower(graph, model, BackendOptions(threads=1))
    executable.allocate_kv(1)
    np.testing.assert_array_equal(prefill_logits(executable, [1, 2, 3]), 0)


def test_a_part_has_the_first_layers_and_reads_the_experts_that_a_token_uses(experts: Checkpoint) -> None:
    part = rehearsal(experts, 2)
    assert (part.config.n_layers, part.config.n_experts, part.config.n_experts_used) == (2, 3, 3)
    assert {name.split(".")[1] for name in part.tensors if name.startswith("blk.")} == {"0", "1"}
    # Its vocabulary is as large a share, so that it has the whole's proportions.
    assert part.config.vocab_size == 64 == part.tensors["token_embd.weight"].shape[0]
    assert experts.config.vocab_size == 96
    # All that differs in what a token reads of all layers is the router, which has fewer rows.
    routers = 3 * (_native.packed_size("F32", 8, 64) - _native.packed_size("F32", 3, 64))
    whole = plan_of(rehearsal(experts, 3))
    assert whole.read_per_token == plan_of(experts).read_per_token - routers
    assert whole.weight_bytes < plan_of(experts).weight_bytes
    assert step_seconds(part, CpuBackend(), OPTIONS, (0, 40)).keys() == {0, 40}


@pytest.mark.parametrize("enough", [1, 40_000, 1 << 30])
def test_what_was_not_tried_takes_time_by_its_bytes(
    enough: int, experts: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Checkpoint] = []

    def steps(model: Checkpoint, *_: Any) -> dict[int, float]:
        tried.append(model)
        return {0: 0.5, 100: 0.75}

    monkeypatch.setattr(module, "step_seconds", steps)
    monkeypatch.setattr(module, "ENOUGH", enough)
    seconds = expected_seconds(experts, plan_of, CpuBackend(), OPTIONS, (0, 100))
    assert seconds is not None
    whole, part = plan_of(experts), plan_of(tried[0])
    layers = tried[0].config.n_layers
    share = enough / whole.read_per_token
    assert layers == 3 or share <= layers / 3
    assert layers == 1 or share > (layers - 1) / 3
    for context, took in ((0, 0.5), (100, 0.75)):
        more = (whole.read_per_token + context * whole.kv_per_token) / (
            part.read_per_token + context * part.kv_per_token
        )
        assert seconds[context] == pytest.approx(took / module.ZEROS_SHARE * more)
    if layers < 3:
        assert seconds[100] > 0.75 * 1.2


def test_nothing_is_tried_without_memory_for_it() -> None:
    def small(checkpoint: Checkpoint) -> MemoryPlan:
        return plan_of(checkpoint, available=1000)

    assert expected_seconds(tiny_llama(), small, CpuBackend(), OPTIONS, (0,)) is None


def test_slow_steps_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a model is, a plan is soon made."""
    steps: list[int] = []
    lower = CpuBackend.lower

    def counted(*args: Any) -> Any:
        executable = lower(*args)
        step = executable.step

        def count(batch: Any) -> Any:
            steps.append(int(batch.context[0]))
            return step(batch)

        monkeypatch.setattr(executable, "step", count)
        return executable

    monkeypatch.setattr(CpuBackend, "lower", counted)
    monkeypatch.setattr(module, "SECONDS", 0.0)
    monkeypatch.setattr(module, "MOST_SECONDS", 3600.0)
    step_seconds(tiny_llama(), CpuBackend(), OPTIONS, (3, 40))
    assert steps == [4, 41] * module.REPEATS
    steps.clear()
    monkeypatch.setattr(module, "MOST_SECONDS", 0.0)
    step_seconds(tiny_llama(), CpuBackend(), OPTIONS, (3, 40))
    assert steps == [4, 41] * module.FEWEST


def test_the_part_of_a_large_model_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither memory nor time grows with how many layers and how large a vocabulary the model has."""
    source = tiny_llama()
    layer = {name.split(".", 2)[2]: t for name, t in source.tensors.items() if name.startswith("blk.0.")}
    tensors = {
        f"blk.{i}.{name}": replace(t, name=f"blk.{i}.{name}") for i in range(80) for name, t in layer.items()
    }
    vocab, hidden = 128_000, source.config.hidden_size
    for name, tensor in source.tensors.items():
        if not name.startswith("blk."):
            shape = (vocab, hidden) if tensor.shape == (source.config.vocab_size, hidden) else tensor.shape
            tensors[name] = replace(tensor, shape=shape)
    config = replace(source.config, n_layers=80, vocab_size=vocab)
    large = replace(source, config=config, tensors=tensors)
    tried: list[Checkpoint] = []

    def steps(model: Checkpoint, *_: Any) -> dict[int, float]:
        tried.append(model)
        return {0: 0.25}

    monkeypatch.setattr(module, "step_seconds", steps)
    monkeypatch.setattr(module, "ENOUGH", plan_of(large).read_per_token // 40)
    seconds = expected_seconds(large, plan_of, CpuBackend(), OPTIONS, (0,))
    assert plan_of(tried[0]).weight_bytes < plan_of(large).weight_bytes / 35
    assert seconds is not None
    assert seconds[0] == pytest.approx(40 * 0.25 / module.ZEROS_SHARE, rel=0.03)
    assert tried[0].config.vocab_size == 3200


def test_real_steps_are_timed_in_every_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.0)
    seconds = expected_seconds(tiny_llama(), plan_of, CpuBackend(), OPTIONS, (0, 31, 500))
    assert seconds is not None
    assert all(0 < took < 60 for took in seconds.values())
