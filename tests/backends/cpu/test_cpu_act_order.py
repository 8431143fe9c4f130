"""Matrices whose columns are sorted by their groups (GPTQ's act-order): the activations follow, bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from fixtures.checkpoints import batch_of, memory_checkpoint, prefill_logits, random_weights
from fixtures.graphs import CONFIG, AnyName
from fixtures.hf import tiny
from formats import quantized as q
from toque import _native
from toque.backends.base import BackendOptions, Executable
from toque.backends.cpu import CpuBackend
from toque.backends.cpu.weights import PackedWeights
from toque.backends.reference import ReferenceBackend
from toque.formats import dequantize, load_checkpoint
from toque.formats.checkpoint import Checkpoint
from toque.formats.quantize import as_type
from toque.graph.fuse import fuse
from toque.graph.recorder import Recorder
from toque.graph.shapes import weight_shapes
from toque.models import build_graph

TOKENS = np.random.default_rng(2).integers(0, 96, 75).tolist()


@pytest.mark.parametrize("dtype", ["Q4_0", "Q8_0", "F16"])
@pytest.mark.parametrize("columns", [96, 320])
def test_a_linear_gets_its_values_in_the_order_of_its_columns(dtype: str, columns: int) -> None:
    """Two orders and none over one input, each equal to the product with values gathered beforehand."""
    random = np.random.default_rng(columns)
    names = ("a", "b", "c")
    orders = {"a": random.permutation(columns), "b": random.permutation(columns), "c": None}
    isa = _native.resolve_isa("")
    for wanted in names:
        rec = Recorder(())
        rec._names = AnyName()
        x = rec.embed("table", columns)
        outputs = {name: rec.linear(x, name, 40) for name in names}
        graph = fuse(rec.finish(outputs[wanted]))
        checkpoint = memory_checkpoint(CONFIG, random_weights(weight_shapes(graph), 1, rows=48))
        tensors = dict(checkpoint.tensors)
        for name, order in orders.items():
            tensors[name] = replace(as_type(tensors[name], dtype), column_order=order)
        checkpoint = replace(checkpoint, tensors=tensors)
        cpu, reference = (
            backend.lower(graph, checkpoint, BackendOptions(2, isa, 64, 64))
            for backend in (CpuBackend(), ReferenceBackend())
        )
        tokens = [int(token) for token in random.integers(0, 48, 30)]
        for executable in (cpu, reference):
            executable.allocate_kv(2)
        rows = dequantize(tensors["table"])[tokens]
        order = orders[wanted]
        gathered = np.ascontiguousarray(rows if order is None else rows[:, order])
        matrix = PackedWeights(tensors, [wanted], 1).matrix(wanted)
        got = prefill_logits(cpu, tokens)
        np.testing.assert_array_equal(got, _native.linear(isa, matrix, gathered))
        expected = prefill_logits(reference, tokens)
        assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(expected)
        np.testing.assert_array_equal(prefill_logits(cpu, tokens, chunk=1), got)


def test_an_order_that_names_no_column_is_refused() -> None:
    model = _native.Model(
        threads=1, isa=_native.resolve_isa(""), max_tokens=4, max_rows=4, max_sequences=4, vocab_limit=9
    )
    tensors = memory_checkpoint(CONFIG, {"w": np.zeros((16, 32), np.float32)}).tensors
    matrix = PackedWeights(tensors, ["w"], 1).matrix("w")
    rows, act = model.rows(32, False), model.act(matrix, False, False)
    for order in (np.arange(31), np.arange(32) + 1, np.arange(32) - 1):
        with pytest.raises(ValueError, match="must name 32 columns"):
            model.pack_gathered(rows, act, order)


def lowered(checkpoint: Checkpoint, backend: Any, threads: int = 2) -> Executable:
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    executable: Executable = backend.lower(graph, checkpoint, BackendOptions(threads, "", 512, 320))
    executable.allocate_kv(16)
    return executable


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_hidden_layers": 1}
    tiny(hf.Qwen2ForCausalLM, hf.Qwen2Config, **sizes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_an_act_order_checkpoint_answers_as_its_float_weights_do(
    group_size: int, plain: Path, tmp_path: Path
) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": True, "sym": True}
    meanings = q.quantize_folder(
        plain, tmp_path / "model", config, lambda w: q.gptq(w, group_size=group_size, act_order=True)
    )
    ours = load_checkpoint(tmp_path / "model")
    attention = [ours.tensors[f"blk.0.attn_{part}.weight"] for part in ("q", "k", "v", "output")]
    # With one group there is nothing to sort; otherwise q has another order than k and v.
    assert all((tensor.column_order is None) == (group_size == 128) for tensor in attention)
    assert all(tensor.dtype == "Q4_0" for tensor in attention)
    assert ours.tensors["blk.0.ffn_down.weight"].column_order is None
    assert ours.tensors["blk.0.ffn_up.weight"].row_order is not None

    folder = shutil.copytree(plain, tmp_path / "float")
    save_file({key: torch.from_numpy(value) for key, value in meanings.items()}, folder / "model.safetensors")
    wanted = prefill_logits(lowered(load_checkpoint(folder), ReferenceBackend()), TOKENS)
    for backend, share in ((ReferenceBackend(), 3e-3), (CpuBackend(), 0.03)):
        error = prefill_logits(lowered(ours, backend), TOKENS) - wanted
        assert np.linalg.norm(error) < share * np.linalg.norm(wanted)

    # Whatever a token shares its step with, its bits are the same.
    cpu = lowered(ours, CpuBackend())
    alone = prefill_logits(cpu, TOKENS)
    for chunk in (1, 13):
        np.testing.assert_array_equal(prefill_logits(lowered(ours, CpuBackend()), TOKENS, chunk=chunk), alone)
    both = cpu.logits(batch_of([(TOKENS[:9], 0, [5]), (TOKENS, 0, [6, 7, 8])]))
    np.testing.assert_array_equal(both[9:], alone)


@pytest.fixture(scope="module")
def plain_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token takes every expert, so that nothing hangs on which of them it takes."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {"hidden_size": 96, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    used = {"num_experts": 3, "num_experts_per_tok": 3, "norm_topk_prob": True}
    tiny(hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, **sizes, **used).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_experts_in_act_order_answer_as_their_float_weights_do(
    bits: int, shared: bool, plain_experts: Path, tmp_path: Path
) -> None:
    """Each expert has an order of its own, which its gate and up share as all quantizers write them, or do not."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": True, "sym": bits == 4}
    written: list[int] = []

    def quantize(weight: np.ndarray) -> q.Layer:  # in the order of names: each expert's down, gate, up
        written.append(len(written))
        order = 1 + (written[-1] // 3 if shared else written[-1])
        return q.gptq(weight, bits=bits, symmetric=bits == 4, act_order=True, order=order)

    meanings = q.quantize_folder(plain_experts, tmp_path / "model", config, quantize)
    ours = load_checkpoint(tmp_path / "model")
    gate, up, down = (ours.tensors[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    kind = "Q4_0" if bits == 4 else "Q8_Z"
    assert (gate.dtype, up.dtype, down.dtype) == ((kind,) * 3 if shared else ("F16", "F16", kind))
    assert all(part.dtype == up.dtype for part in up.parts)
    assert all((part.column_order is not None) == shared for part in up.parts + gate.parts)
    orders = {part.column_order.tobytes() for part in up.parts if part.column_order is not None}
    assert len(orders) == (3 if shared else 0)
    assert all(part.row_order is not None for part in up.parts)

    folder = shutil.copytree(plain_experts, tmp_path / "float")
    save_file({key: torch.from_numpy(value) for key, value in meanings.items()}, folder / "model.safetensors")
    wanted = prefill_logits(lowered(load_checkpoint(folder), ReferenceBackend()), TOKENS)
    for backend, share in ((ReferenceBackend(), 3e-3), (CpuBackend(), 0.04)):
        error = prefill_logits(lowered(ours, backend), TOKENS) - wanted
        assert np.linalg.norm(error) < share * np.linalg.norm(wanted)

    alone = prefill_logits(lowered(ours, CpuBackend()), TOKENS)
    for threads, chunk in ((2, 1), (3, 13), (1, 0)):
        got = prefill_logits(lowered(ours, CpuBackend(), threads), TOKENS, chunk=chunk)
        np.testing.assert_array_equal(got, alone)


def test_an_order_of_an_expert_that_names_no_column_is_refused() -> None:
    model = _native.Model(
        threads=1, isa=_native.resolve_isa(""), max_tokens=4, max_rows=4, max_sequences=4, vocab_limit=9
    )
    tensors = memory_checkpoint(CONFIG, {"w": np.zeros((32, 32), np.float32)}).tensors
    experts = [PackedWeights(tensors, ["w"], 1).matrix("w")] * 2
    scores, x, out = (model.rows(width, False) for width in (2, 32, 32))

    def add(*orders: np.ndarray) -> None:
        model.moe("moe", scores, x, experts, experts, experts, list(orders), 1, True, "silu", out)

    good = np.arange(32)
    for order in (np.arange(31), good + 1, good - 1):
        with pytest.raises(ValueError, match="must name 32 columns"):
            add(order, good)
    with pytest.raises(ValueError, match="experts need as many"):
        add(good)
    add(good, np.empty(0, np.int64))
    add()
