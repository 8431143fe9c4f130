"""The promise of `Executable`, bit for bit: a row's logits depend on its own sequence only."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from fixtures.checkpoints import batch_of, prefill_logits
from fixtures.tiny import tiny_llama
from toque import _native
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.formats.checkpoint import Checkpoint, TensorData
from toque.formats.dequant import dequantize
from toque.graph.fuse import fuse
from toque.models import build_graph

LENGTH = 290  # more than one chunk of attention
BLOCKS = [11, 3, 7, 20, 1, 15, 9, 2, 30, 12]


def quantized(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """The same checkpoint with its matrices in a GGML type."""
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) == 2:
            raw = gguf.quantize(dequantize(tensor), gguf.GGMLQuantizationType[dtype])
            tensor = TensorData(name, dtype, tensor.shape, raw.view(np.uint8).reshape(tensor.shape[0], -1))
        tensors[name] = tensor
    return Checkpoint(checkpoint.path, checkpoint.format, checkpoint.config, tensors, dtype)


def executable(dtype="Q8_0", *, threads=2, isa="", checkpoint=None):
    """``dtype`` is a GGML type of the weights; "/int8" after it asks for that KV cache."""
    dtype, _, kv_dtype = dtype.partition("/")
    checkpoint = checkpoint or quantized(tiny_llama(), dtype)
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors))
    lowered = CpuBackend().lower(
        graph, checkpoint, BackendOptions(threads, isa, 512, 320, kv_dtype or "auto")
    )
    lowered.allocate_kv(64)
    return lowered


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(3).integers(0, 160, LENGTH).tolist()


@pytest.fixture(scope="module", params=["Q8_0", "Q4_1", "F16", "Q4_1/int8"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def alone(dtype, text):
    return prefill_logits(executable(dtype), text, blocks=BLOCKS)


@pytest.mark.parametrize("chunk", [1, 7, 32, 255])
def test_cutting_the_prompt_changes_no_bit(dtype, text, alone, chunk):
    np.testing.assert_array_equal(prefill_logits(executable(dtype), text, chunk=chunk, blocks=BLOCKS), alone)


def test_where_blocks_lie_changes_no_bit(dtype, text, alone):
    blocks = np.random.default_rng(0).permutation(64)[:10].tolist()
    np.testing.assert_array_equal(prefill_logits(executable(dtype), text, blocks=blocks), alone)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(dtype, text, alone, threads):
    lowered = executable(dtype, threads=threads)
    np.testing.assert_array_equal(prefill_logits(lowered, text, chunk=100, blocks=BLOCKS), alone)
    # The last token again as a step of its own: its chunks are shared out over the threads.
    last = lowered.logits(batch_of([(text[-1:], LENGTH - 1, BLOCKS)]))
    np.testing.assert_array_equal(last[0], alone[-1])


def test_neighbours_change_no_bit(dtype, text, alone):
    """The sequence decodes and prefills amid seven ragged others, whose leftovers lie in the blocks it gets."""
    random = np.random.default_rng(5)
    lowered = executable(dtype)
    done = 0
    rows = []
    while done < LENGTH:
        step = min(int(random.choice([1, 1, 2, 30, 77])), LENGTH - done)
        neighbours = []
        for i in range(7):
            n, first = int(random.integers(1, 9)), int(random.integers(0, 40))
            neighbours.append((random.integers(0, 160, n).tolist(), first, [40 + 2 * i, 41 + 2 * i]))
        place = int(random.integers(0, 8))
        batch = batch_of([*neighbours[:place], (text[done : done + step], done, BLOCKS), *neighbours[place:]])
        begin = batch.starts[place]
        rows.append(lowered.logits(batch)[begin : begin + step])
        done += step
    np.testing.assert_array_equal(np.concatenate(rows), alone)


@pytest.mark.parametrize("cache", ["", "/int8"])
def test_garbage_in_a_reused_block_never_shows(text, cache):
    """A request that went wrong leaves NaN in its blocks; whoever gets them next must not notice."""
    names = [token for token in text if token != 159]
    clean = executable("F16" + cache)
    expected = prefill_logits(clean, names, chunk=61, blocks=BLOCKS)
    checkpoint = quantized(tiny_llama(), "F16")
    table = checkpoint.tensors["token_embd.weight"]
    raw = table.raw.copy()
    raw[159] = np.full(raw.shape[1] // 2, np.nan, np.float16).view(np.uint8)
    tensors = {**checkpoint.tensors, table.name: TensorData(table.name, "F16", table.shape, raw)}
    poison = Checkpoint(checkpoint.path, "gguf", checkpoint.config, tensors, "F16")
    poisoned = executable("F16" + cache, checkpoint=poison)
    assert np.isnan(poisoned.logits(batch_of([([159] * 320, 0, BLOCKS)]))).all()
    np.testing.assert_array_equal(prefill_logits(poisoned, names, chunk=61, blocks=BLOCKS), expected)


@pytest.mark.parametrize("dtype", ["Q4_1", "Q4_1/int8"])
@pytest.mark.parametrize("isa", _native.isas())
def test_the_promise_holds_on_every_instruction_set(text, isa, dtype):
    short = text[:40]
    whole = prefill_logits(executable(dtype, isa=isa), short, blocks=BLOCKS)
    cut = prefill_logits(executable(dtype, isa=isa, threads=1), short, chunk=9, blocks=BLOCKS[::-1])
    np.testing.assert_array_equal(cut, whole)
