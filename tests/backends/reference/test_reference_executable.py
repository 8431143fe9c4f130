"""The reference backend keeps the promises of `toque.backends.base.Executable`."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from fixtures.checkpoints import batch_of, memory_checkpoint, prefill_logits, random_weights
from toque.backends import load_backend
from toque.backends.base import BLOCK_SIZE, BackendOptions
from toque.backends.reference import ReferenceBackend
from toque.backends.reference.sampler import log_softmax
from toque.errors import ConfigError, EngineError, FormatError
from toque.graph.fuse import fuse
from toque.graph.recorder import Recorder
from toque.graph.shapes import weight_shapes
from toque.models import build_graph
from toque.types import ModelConfig, SamplingParams

CONFIG = ModelConfig("llama", 2, 64, 4, 2, 16, 96, 50, 256, tied_embeddings=True, sliding_window=0)
NAMES = {
    "token_embd.weight",
    "output_norm.weight",
    *(
        f"blk.{layer}.{name}.weight"
        for layer in range(2)
        for name in (
            "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
        )
    ),
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.fixture(scope="module")
def graph():
    return fuse(build_graph(CONFIG, NAMES))


@pytest.fixture
def executable(graph):
    checkpoint = memory_checkpoint(CONFIG, random_weights(weight_shapes(graph)))
    made = ReferenceBackend().lower(graph, checkpoint, BackendOptions(max_sequences=8))
    made.allocate_kv(12)
    return made


def random_tokens(length, seed=0):
    return [int(token) for token in np.random.default_rng(seed).integers(0, 50, length)]


def test_a_row_has_the_same_bits_alone_and_in_any_ragged_batch(executable):
    tokens = [random_tokens(length, seed) for seed, length in enumerate((40, 3, 65))]
    blocks = [[7, 1], [4], [0, 11, 2]]
    alone = [prefill_logits(executable, t, blocks=b) for t, b in zip(tokens, blocks, strict=True)]
    together = executable.logits(batch_of([(t, 0, b) for t, b in zip(tokens, blocks, strict=True)]))
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_decodes_beside_a_prefill_chunk_have_the_same_bits(executable):
    long, short = random_tokens(50, 1), random_tokens(20, 2)
    whole_long = prefill_logits(executable, long, blocks=[0, 1])
    whole_short = prefill_logits(executable, short, blocks=[2])
    executable.logits(batch_of([(long[:30], 0, [5, 6])]))
    executable.logits(batch_of([(short[:19], 0, [8])]))
    mixed = executable.logits(batch_of([(short[19:], 19, [8]), (long[30:], 30, [5, 6])]))
    np.testing.assert_array_equal(mixed, np.concatenate([whole_short[19:], whole_long[30:]]))


def test_rows_select_and_order_the_logits(executable):
    tokens = random_tokens(10)
    everything = prefill_logits(executable, tokens)
    chosen = executable.logits(batch_of([(tokens, 0, [0])], rows=[2, 9]))
    np.testing.assert_array_equal(chosen, everything[[2, 9]])
    assert executable.logits(batch_of([(tokens, 0, [0])], rows=[])).shape == (0, 50)


def test_step_samples_targets_and_reports_logprobs_per_row(executable):
    tokens = random_tokens(6)
    logits = prefill_logits(executable, tokens)
    executable.open_slot(3, GREEDY, tokens, (), (), 0)
    batch = batch_of(
        [(tokens, 0, [0])],
        rows=[1, 4, 5],
        targets=[tokens[2], tokens[5], -1],
        top=[0, -1, 2],
        slots=[3, 3, 3],
    )
    result = executable.step(batch)
    best = int(np.argmax(logits[5]))
    assert result.tokens.tolist() == [tokens[2], tokens[5], best]
    assert result.tokens.dtype == np.int32
    expected = log_softmax(logits[5])
    order = np.argsort(-logits[5], kind="stable")[:2]
    assert result.logprobs[0] == log_softmax(logits[1])[tokens[2]]
    assert result.logprobs[2] == expected[best]
    assert result.top_ids.tolist() == [[-1, -1], [-1, -1], order.tolist()]
    np.testing.assert_array_equal(result.top_logprobs[2], expected[order])
    assert batch.targets.tolist() == [tokens[2], tokens[5], -1]


def test_step_without_logprobs_returns_none_of_them(executable):
    executable.open_slot(0, GREEDY, (), (), (), 0)
    result = executable.step(batch_of([([1, 2], 0, [0])], rows=[1]))
    assert result.logprobs is result.top_ids is result.top_logprobs is None
    assert executable.step(batch_of([([1, 2], 0, [0])], rows=[])).tokens.shape == (0,)


def test_masks_apply_to_their_row_only(executable):
    tokens = random_tokens(4)
    for slot in range(2):
        executable.open_slot(slot, GREEDY, tokens, (), (), 0)
    masks = np.full((2, 2), 0xFFFFFFFF, np.uint32)
    masks[0] = [0, 1 << 5]
    batch = batch_of([(tokens, 0, [0]), (tokens, 0, [1])], rows=[3, 7], masks=masks)
    free = int(np.argmax(prefill_logits(executable, tokens)[-1]))
    assert executable.step(batch).tokens.tolist() == [37, free]


def test_slots_keep_their_counts_apart_and_forget_them_when_closed(executable):
    tokens = random_tokens(5)
    penalised = SamplingParams(temperature=0.0, seed=0, presence_penalty=2.0, frequency_penalty=2.0)
    executable.open_slot(0, penalised, tokens, (), (), 0)
    executable.open_slot(1, GREEDY, tokens, (), (), 0)
    batch = batch_of([(tokens, 0, [0]), (tokens, 0, [1])], rows=[4, 9])
    first = executable.step(batch).tokens.tolist()
    assert first[0] == first[1]
    later = [executable.step(batch).tokens.tolist() for _ in range(3)]
    assert all(row[1] == first[1] for row in later)
    assert any(row[0] != first[0] for row in later)
    executable.close_slot(0)
    with pytest.raises(EngineError, match="slot 0"):
        executable.step(batch)


def test_ids_outside_the_embedding_table_are_refused(executable):
    for token in (-1, 50):
        with pytest.raises(EngineError, match=r"0\.\.49"):
            executable.logits(batch_of([([token], 0, [0])]))


def test_kv_bytes_cover_both_caches_of_all_layers(executable):
    assert executable.kv_bytes_per_block == 2 * 2 * BLOCK_SIZE * 2 * 16 * 4
    assert executable.vocab_size == 50


def test_a_tensor_of_the_wrong_shape_is_refused_by_name(graph):
    weights = random_weights(weight_shapes(graph))
    weights["blk.1.attn_k.weight"] = np.zeros((64, 32), np.float32)
    with pytest.raises(FormatError, match=r"blk\.1\.attn_k\.weight.*32x64.*64x32"):
        ReferenceBackend().lower(graph, memory_checkpoint(CONFIG, weights), BackendOptions())


def test_pooling_gives_one_row_per_sequence():
    for kind in ("mean", "cls", "last"):
        rec = Recorder(["table"])
        x = rec.embed("table", 8)
        graph = rec.finish(rec.pool(x, kind=kind))
        table = random_weights({"table": (50, 8)})
        executable = ReferenceBackend().lower(graph, memory_checkpoint(CONFIG, table), BackendOptions())
        pooled = executable.logits(batch_of([([1, 2, 3], 0, [0]), ([4, 5], 0, [1])]))
        rows = [table["table"][[1, 2, 3]], table["table"][[4, 5]]]
        pick = {
            "mean": lambda part: part.mean(axis=0),
            "cls": lambda part: part[0],
            "last": lambda part: part[-1],
        }
        expected = [pick[kind](part) for part in rows]
        np.testing.assert_allclose(pooled, expected, rtol=1e-6)


@pytest.mark.parametrize("norm", [True, False])
def test_moe_weights_the_best_experts_by_the_softmax_of_all_scores(norm):
    rec = Recorder(["table", "router", "gate", "up", "down"])
    x = rec.embed("table", 8)
    names = {"router": "router", "gate": "gate", "up": "up", "down": "down"}
    out = rec.moe(x, **names, n_experts=3, n_used=2, ffn_size=6, act="silu", norm=norm)
    random = np.random.default_rng(0)
    shapes = {"table": (5, 8), "router": (3, 8), "gate": (3, 6, 8), "up": (3, 6, 8), "down": (3, 8, 6)}
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    executable = ReferenceBackend().lower(
        rec.finish(out), memory_checkpoint(CONFIG, weights), BackendOptions()
    )
    result = executable.logits(batch_of([([3], 0, [0])]))[0]
    token = weights["table"][3].astype(np.float64)
    scores = weights["router"] @ token
    best = np.argsort(-scores)[:2]
    shares = np.exp(scores[best]) / np.exp(scores[best] if norm else scores).sum()
    expected = np.zeros(8)
    for expert, share in zip(best, shares, strict=True):
        gate = weights["gate"][expert] @ token
        hidden = gate / (1 + np.exp(-gate)) * (weights["up"][expert] @ token)
        expected += share * (weights["down"][expert] @ hidden)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_backends_are_loaded_by_name():
    assert load_backend("reference").name == "reference"
    with pytest.raises(ConfigError, match=r"cpu, reference.*'cuda'"):
        load_backend("cuda")


def test_the_reference_backend_and_the_models_import_no_torch():
    code = "import sys, toque.models, toque.backends.reference; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
