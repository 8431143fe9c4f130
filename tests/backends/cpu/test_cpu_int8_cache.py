"""The int8 KV cache of the cpu backend against the reference backend's, which rounds the same numbers in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.checkpoints import memory_checkpoint, prefill_logits, random_weights
from fixtures.graphs import CONFIG, AnyName
from toque import _native
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.backends.reference import ReferenceBackend
from toque.backends.reference.executable import int8_cache
from toque.errors import ConfigError
from toque.graph.fuse import fuse
from toque.graph.recorder import Recorder
from toque.graph.rope import rope_spec
from toque.graph.shapes import weight_shapes


def attention_graph(*, heads=3, kv_heads=1, head_dim=64, window=0, softcap=0.0):
    rec = Recorder(())
    rec._names = AnyName()
    x = rec.embed("table", 24)
    q = rec.linear(x, "q", heads * head_dim)
    k, v = (rec.linear(x, name, kv_heads * head_dim) for name in "kv")
    rope = rope_spec(1e4, head_dim)
    q, k = (rec.rope(value, head_dim=head_dim, rope=rope) for value in (q, k))
    o = rec.attention(
        q, k, v, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, window=window, softcap=softcap
    )
    return fuse(rec.finish(rec.linear(rec.select_rows(o), "out", 40)))


def logits(backend, graph, tokens, kv_dtype="int8", isa=""):
    checkpoint = memory_checkpoint(CONFIG, random_weights(weight_shapes(graph), 4, rows=40))
    executable = backend.lower(graph, checkpoint, BackendOptions(2, isa, 512, 512, kv_dtype))
    executable.allocate_kv(16)
    return prefill_logits(executable, tokens)


def tokens_of(n):
    return np.random.default_rng(1).integers(0, 40, n).tolist()


def distance(a, b):
    return float(np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2)))


def agree(graph, tokens, isa=""):
    rounded = logits(ReferenceBackend(), graph, tokens)
    exact = logits(ReferenceBackend(), graph, tokens, "auto")
    actual = logits(CpuBackend(), graph, tokens, isa=isa)
    # What is left are codes that fall to the other side of a tie: a small part of what rounding costs at all.
    assert distance(actual, rounded) < 2e-3
    assert distance(actual, rounded) < 0.5 * distance(rounded, exact) < 0.05


@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 96, 128, 256])
def test_every_head_size(head_dim):
    agree(attention_graph(head_dim=head_dim), tokens_of(45))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (7, 1)])
def test_every_group(heads, kv_heads):
    agree(attention_graph(heads=heads, kv_heads=kv_heads), tokens_of(45))


@pytest.mark.parametrize(("window", "softcap"), [(0, 2.0), (16, 0.0), (100, 2.0)])
def test_several_chunks_with_windows_and_softcap(window, softcap):
    agree(attention_graph(window=window, softcap=softcap), tokens_of(300))


@pytest.mark.parametrize("isa", _native.isas())
def test_every_instruction_set(isa):
    agree(attention_graph(), tokens_of(19), isa=isa)


def test_it_takes_about_half_the_memory():
    graph = attention_graph()
    checkpoint = memory_checkpoint(CONFIG, random_weights(weight_shapes(graph), 4, rows=40))
    sizes = {
        kind: CpuBackend().lower(graph, checkpoint, BackendOptions(1, kv_dtype=kind)).kv_bytes_per_block
        for kind in ("auto", "int8")
    }
    assert 0.5 < sizes["int8"] / sizes["auto"] < 0.55


def test_the_reference_rounds_each_group_by_its_largest_number():
    x = np.zeros((1, 1, 64), np.float32)
    x[0, 0, :3] = [127.0, -1.0, 0.4]
    x[0, 0, 32:34] = [0.5, 0.25]
    back = int8_cache(x)
    np.testing.assert_array_equal(back[0, 0, :3], [127.0, -1.0, 0.0])
    np.testing.assert_allclose(back[0, 0, 32:34], [0.5, 0.25], rtol=1e-2)
    assert not back[0, 0, 34:].any()


def test_another_cache_type_is_refused():
    graph = attention_graph()
    checkpoint = memory_checkpoint(CONFIG, random_weights(weight_shapes(graph), 4, rows=40))
    with pytest.raises(ConfigError, match="fp8"):
        CpuBackend().lower(graph, checkpoint, BackendOptions(1, kv_dtype="fp8"))
