"""Qwen and Gemma on the reference backend against Hugging Face transformers, in float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import transformers

from fixtures.checkpoints import prefill_logits
from fixtures.hf import hf_checkpoint, hf_logits, tiny
from toque.backends.base import BackendOptions
from toque.backends.reference import ReferenceBackend
from toque.backends.reference.sampler import log_softmax
from toque.graph.fuse import fuse
from toque.models import build_graph

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 96, 80)]
GEMMA = {"hidden_act": "gelu_tanh", "embedding_scale": 8.0}  # sqrt(64)


def run(checkpoint, *, chunk=0):
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    executable = ReferenceBackend().lower(graph, checkpoint, BackendOptions())
    executable.allocate_kv(8)
    return prefill_logits(executable, TOKENS, chunk=chunk)


def build(name, **settings):
    return tiny(
        getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, f"{name}Config"), **settings
    )


def gemma2():
    windows = {"sliding_window": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0}
    return build(
        "Gemma2", final_logit_softcapping=5.0, tie_word_embeddings=True, num_hidden_layers=4, **windows
    )


def gemma3():
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    settings = {
        "layer_types": layers,
        "rope_parameters": rope,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
    }
    model, config = transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig
    return tiny(model, config, num_hidden_layers=4, tie_word_embeddings=True, **settings)


CASES = {
    "qwen2": (lambda: build("Qwen2"), {}),
    "qwen2-tied": (lambda: build("Qwen2", tie_word_embeddings=True), {}),
    "qwen3": (lambda: build("Qwen3", head_dim=32), {}),
    "gemma": (lambda: build("Gemma", tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"), GEMMA),
    "gemma2": (
        gemma2,
        GEMMA
        | {
            "sliding_window_pattern": 2,
            "attention_softcap": 3.0,
            "final_softcap": 5.0,
            "attention_scale": 24**-0.5,
        },
    ),
    "gemma3": (gemma3, GEMMA | {"sliding_window_pattern": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_at_every_position(name):
    make, overrides = CASES[name]
    model = make()
    checkpoint = hf_checkpoint(model, **overrides)
    assert checkpoint.config.architecture == name.split("-")[0]
    whole = run(checkpoint)
    np.testing.assert_allclose(whole, hf_logits(model, TOKENS), atol=1e-3, rtol=0)
    np.testing.assert_array_equal(run(checkpoint, chunk=13), whole)


def test_gemma_scales_its_inputs_and_not_its_output_matrix():
    """Field case BR-057: a scaled output matrix leaves the best token alone and ruins the logprobs."""
    model = gemma3()
    logits = run(hf_checkpoint(model, **CASES["gemma3"][1]))
    ours, theirs = (log_softmax(rows[-1]) for rows in (logits, hf_logits(model, TOKENS)))
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    assert math.isclose(np.exp(ours.astype(np.float64)).sum(), 1.0, abs_tol=1e-5)
