"""Every op of the cpu backend against the numpy reference, on graphs small enough to have awkward sizes everywhere.

With float weights the only differences are the order of sums and the cache's 16-bit numbers, so the bounds are tight.
"""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.checkpoints import batch_of, memory_checkpoint, prefill_logits, random_weights
from fixtures.graphs import CONFIG, AnyName, random_decoder
from fixtures.tiny import tiny_llama
from toque import _native
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.backends.reference import ReferenceBackend
from toque.errors import ConfigError, EngineError, UnsupportedModelError
from toque.graph.fuse import fuse
from toque.graph.recorder import Recorder
from toque.graph.rope import rope_spec
from toque.graph.shapes import weight_shapes
from toque.models import build_graph
from toque.types import SamplingParams

OPTIONS = BackendOptions(threads=2, max_batch_tokens=512, max_sequences=512)
ISAS = _native.isas()


def recorder():
    rec = Recorder(())
    rec._names = AnyName()
    return rec


def both(graph, *, seed=0, rows=40, isa="", config=CONFIG):
    checkpoint = memory_checkpoint(config, random_weights(weight_shapes(graph), seed, rows=rows))
    options = BackendOptions(2, isa, OPTIONS.max_batch_tokens, OPTIONS.max_sequences)
    executables = [
        backend.lower(graph, checkpoint, options) for backend in (ReferenceBackend(), CpuBackend())
    ]
    for executable in executables:
        executable.allocate_kv(32)
    return executables


def cache_bound(isa=""):
    """What the cache's 16-bit numbers cost: f16, or bf16 (and bf16 queries and probabilities) on AVX-512."""
    return 1.5e-2 if _native.resolve_isa(isa).startswith("avx512") else 3e-3


def assert_close(actual, expected, bound):
    np.testing.assert_allclose(actual, expected, atol=bound * np.abs(expected).max())


def assert_same(graph, tokens, *, bound=0.0, **options):
    reference, cpu = both(graph, **options)
    expected, actual = prefill_logits(reference, tokens), prefill_logits(cpu, tokens)
    assert_close(actual, expected, bound or cache_bound(options.get("isa", "")))


def tokens_of(n, vocab=40, seed=1):
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fused", [False, True], ids=["recorded", "fused"])
def test_random_decoders_agree_with_the_reference(seed, fused):
    graph = random_decoder(np.random.default_rng(seed))
    assert_same(fuse(graph) if fused else graph, tokens_of(37, seed=seed), seed=seed)


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_agrees_with_the_reference(isa):
    assert_same(fuse(random_decoder(np.random.default_rng(99))), tokens_of(19), isa=isa)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (4, 2), (7, 1), (32, 1)])
def test_attention_of_every_head_size_and_group(head_dim, heads, kv_heads):
    if head_dim > 96 and heads > 7:
        pytest.skip("large without being new")
    rec = recorder()
    x = rec.embed("table", 24)
    q = rec.linear(x, "q", heads * head_dim)
    k, v = (rec.linear(x, name, kv_heads * head_dim) for name in "kv")
    rope = rope_spec(1e4, head_dim)
    q, k = (rec.rope(value, head_dim=head_dim, rope=rope) for value in (q, k))
    o = rec.attention(q, k, v, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim)
    graph = rec.finish(rec.linear(rec.select_rows(o), "out", 40))
    assert_same(fuse(graph), tokens_of(45))


@pytest.mark.parametrize("window", [0, 1, 5, 16, 100, 300])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attention_over_several_chunks_with_windows_and_softcap(window, softcap):
    rec = recorder()
    x = rec.embed("table", 32, scale=3.0)
    q, k, v = (rec.linear(x, name, width) for name, width in (("q", 64), ("k", 32), ("v", 32)))
    o = rec.attention(q, k, v, n_heads=2, n_kv_heads=1, head_dim=32, window=window, softcap=softcap)
    graph = rec.finish(rec.linear(rec.select_rows(o), "out", 40))
    tokens = tokens_of(300)
    reference, cpu = both(graph)
    prefill_logits(reference, tokens), prefill_logits(cpu, tokens)
    # Two chunks of 256 tokens, a sequence that decodes and one that starts, in one batch.
    blocks = list(range(10))
    batch = batch_of([(tokens[290:], 290, blocks), ([3], 0, [20]), (tokens[:40], 0, [30, 25])])
    expected, actual = reference.logits(batch), cpu.logits(batch)
    assert_close(actual, expected, cache_bound())


def test_bidirectional_attention_sees_the_whole_sequence():
    rec = recorder()
    x = rec.embed("table", 32)
    q, k, v = (rec.linear(x, name, 32) for name in "qkv")
    o = rec.attention(q, k, v, n_heads=2, n_kv_heads=2, head_dim=16, causal=False)
    o = rec.layer_norm(o, "gain", "shift", eps=1e-5)
    graph = rec.finish(rec.linear(rec.select_rows(rec.gelu(o, tanh=False)), "out", 40))
    assert_same(graph, tokens_of(50))


def test_widths_that_are_no_multiple_of_anything():
    rec = recorder()
    x = rec.embed("table", 37)
    h = rec.layer_norm(x, "gain", "shift", eps=1e-6)
    h = rec.gelu(rec.linear(h, "up", 41, bias="up_bias"), tanh=True)
    x = rec.scale(rec.add(x, rec.linear(h, "down", 37)), by=0.5)
    graph = rec.finish(rec.linear(rec.select_rows(x), "out", 43))
    for tokens in (1, 2, 25):
        assert_same(graph, tokens_of(tokens), bound=1e-5)
        assert_same(fuse(graph), tokens_of(tokens), bound=1e-5)


def test_an_op_without_a_kernel_is_refused_by_name():
    rec = recorder()
    graph = rec.finish(rec._add("fold", (rec.embed("table", 32),), 32))
    checkpoint = memory_checkpoint(CONFIG, random_weights(weight_shapes(graph), rows=40))
    with pytest.raises(UnsupportedModelError, match="fold"):
        CpuBackend().lower(graph, checkpoint, OPTIONS)


def test_an_absent_instruction_set_is_refused():
    with pytest.raises(ConfigError, match="quantum"):
        both(random_decoder(np.random.default_rng(0)), isa="quantum")


@pytest.fixture(scope="module")
def tiny():
    checkpoint = tiny_llama()
    # Near ties must fall as in the reference: not with a cache in bf16.
    isa = next(isa for isa in ISAS if not isa.startswith("avx512"))
    options = BackendOptions(2, isa, OPTIONS.max_batch_tokens, OPTIONS.max_sequences)
    executable = CpuBackend().lower(
        fuse(build_graph(checkpoint.config, checkpoint.tensors)), checkpoint, options
    )
    executable.allocate_kv(16)
    return executable


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [160]}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"block_tables": [[16]]}, "block_tables"),
        ({"block_tables": [[-1]]}, "block_tables"),
        ({"context": [33]}, "context"),
        ({"positions": [1]}, "positions"),
        ({"starts": [0, 2]}, "starts"),
        ({"rows": [1]}, "rows"),
        ({"slots": [511]}, "slots"),
        ({"targets": [160]}, "targets"),
    ],
)
def test_an_index_out_of_range_is_an_error_and_no_wild_read(tiny, change, message):
    batch = batch_of([([5], 0, [1])])
    for name, value in change.items():
        setattr(batch, name, np.asarray(value, np.int32))
    with pytest.raises(EngineError, match=message):
        tiny.step(batch)


def test_steps_choose_what_the_reference_chooses(tiny):
    """Seeded sampling, penalties, logprobs and targets through the whole step, for eight steps."""
    checkpoint = tiny_llama()
    reference = ReferenceBackend().lower(
        build_graph(checkpoint.config, checkpoint.tensors), checkpoint, OPTIONS
    )
    reference.allocate_kv(16)
    params = [
        SamplingParams(temperature=0.0, presence_penalty=1.5),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=7),
        SamplingParams(temperature=1.3, min_p=0.02, repetition_penalty=1.4, seed=8, logit_bias=((3, 4.0),)),
    ]
    tokens = [[5, 6, 7], [9], [1, 2]]
    for executable in (tiny, reference):
        for slot, (param, prompt) in enumerate(zip(params, tokens, strict=True)):
            executable.open_slot(slot, param, prompt, [], [2], 3)
    firsts = [0, 0, 0]
    for _ in range(8):
        sequences = [
            (new, first, [slot]) for slot, (new, first) in enumerate(zip(tokens, firsts, strict=True))
        ]
        last = np.cumsum([len(new) for new in tokens]) - 1
        batch = batch_of(sequences, rows=last, slots=[0, 1, 2], top=[-1, 3, 0])
        ours, theirs = tiny.step(batch), reference.step(batch)
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(ours.logprobs[1:], theirs.logprobs[1:], atol=5e-3)
        assert ours.top_ids[1].tolist() == theirs.top_ids[1].tolist()
        firsts = [first + len(new) for new, first in zip(tokens, firsts, strict=True)]
        tokens = [[int(token)] for token in ours.tokens]


def test_a_step_may_want_no_rows(tiny):
    batch = batch_of([([5, 6], 0, [1])], rows=[])
    assert tiny.step(batch).tokens.shape == (0,)
    assert tiny.logits(batch).shape == (0, 160)


def test_a_closed_executable_says_so():
    checkpoint = tiny_llama()
    executable = CpuBackend().lower(build_graph(checkpoint.config, checkpoint.tensors), checkpoint, OPTIONS)
    executable.close()
    with pytest.raises(EngineError, match="closed"):
        executable.logits(batch_of([([5], 0, [1])]))
