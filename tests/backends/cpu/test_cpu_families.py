"""Every family on the cpu backend against transformers, from both kinds of files.

The bounds are those of the cache's 16-bit numbers and, where weights are quantized, of int8 activations: the tiny
models attend sharply, which makes them ten times as sensitive as real ones.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fixtures.checkpoints import batch_of, prefill_logits
from fixtures.families import FAMILIES, GGUF_FAMILIES, make
from fixtures.gguf_files import write_gguf
from fixtures.hf import hf_logits
from toque import _native
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.backends.reference import ReferenceBackend
from toque.formats import load_checkpoint
from toque.graph.fuse import fuse
from toque.models import build_graph

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 96, 200)]
OPTIONS = BackendOptions(threads=2, max_batch_tokens=256, max_sequences=256)


def lower(path, backend=None):
    checkpoint = load_checkpoint(path)
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    executable = (backend or CpuBackend()).lower(graph, checkpoint, OPTIONS)
    executable.allocate_kv(32)
    return executable


# AVX-512's cache, queries and probabilities are bfloat16 with three bits less. They decide otherwise where a router is
# all but undecided, so it is the usual token that counts there.
BFLOAT16 = _native.resolve_isa("").startswith("avx512")


def assert_agree(actual, expected):
    """Root mean square of a token's errors, in units of the logits' own spread."""
    errors = np.square(actual - expected).mean(axis=1) / np.var(expected)
    if BFLOAT16:
        assert np.sqrt(np.median(errors)) < 8 * 3e-3
    else:
        assert np.sqrt(errors.mean()) < 3e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_agrees_with_transformers_from_safetensors(name, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path)
    executable = lower(tmp_path)
    whole, *chunked = (prefill_logits(executable, TOKENS, chunk=chunk) for chunk in (0, 70, 1))
    assert_agree(whole, hf_logits(model, TOKENS))
    for logits in chunked:
        np.testing.assert_array_equal(logits, whole)


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_a_family_agrees_with_transformers_from_gguf(name, tmp_path):
    model = make(name)
    write_gguf(model, tmp_path / "model.gguf")
    logits = prefill_logits(lower(tmp_path / "model.gguf"), TOKENS)
    assert_agree(logits, hf_logits(model, TOKENS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_activations_beyond_float16_are_no_infinities(name, dtype, tmp_path):
    """Field case BR-057: gemmas of 16 bits, whose residuals grow beyond 65504, are computed with in float32."""
    model = make(name)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_feedforward_layernorm.weight += 3e4
    model.to(dtype).save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    assert states[-2].abs().max() > 2 * 65504
    assert_agree(prefill_logits(lower(tmp_path), TOKENS), hf_logits(model, TOKENS))


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("llama", 64), ("llama", 80), ("phi3", 96), ("qwen3", 128), ("qwen3moe", 128), ("gemma3", 256)],
)
def test_head_sizes_of_real_models(name, head_dim, tmp_path):
    hidden = {"hidden_size": 4 * head_dim} if name in ("llama", "phi3") else {}
    model = make(
        name,
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        num_hidden_layers=2,
        initializer_range=0.05,
        **hidden,
    )
    write_gguf(model, tmp_path / "model.gguf")
    logits = prefill_logits(lower(tmp_path / "model.gguf"), TOKENS)
    assert_agree(logits, hf_logits(model, TOKENS))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3moe", "gemma3"])
def test_quantized_weights_agree_with_the_reference_in_any_company(name, kind, tmp_path):
    """Where a router is all but undecided, int8 activations decide otherwise: such a token's logits are off."""
    write_gguf(make(name), tmp_path / "model.gguf", kind)
    reference, cpu = (
        lower(tmp_path / "model.gguf", backend) for backend in (ReferenceBackend(), CpuBackend())
    )
    expected, actual = prefill_logits(reference, TOKENS), prefill_logits(cpu, TOKENS)
    errors = np.abs(actual - expected).mean(axis=1) / expected.std()
    assert np.median(errors) < 0.05
    three = [(TOKENS[:50], 0, [8, 9]), (TOKENS[100:103], 0, [20]), (TOKENS[50:130], 0, [12, 11, 10])]
    logits = cpu.logits(batch_of(three))
    np.testing.assert_array_equal(logits[:50], actual[:50])
