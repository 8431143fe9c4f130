"""The llama architecture on the reference backend against Hugging Face transformers, in float32."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from fixtures.checkpoints import memory_checkpoint, prefill_logits
from fixtures.hf import hf_checkpoint, hf_logits, tiny
from toque.backends.base import BackendOptions
from toque.backends.reference import ReferenceBackend
from toque.errors import FormatError, UnsupportedModelError
from toque.formats.dequant import dequantize
from toque.graph.fuse import fuse
from toque.models import build_graph, supported
from toque.types import ModelConfig

TOLERANCE = 1e-3


def run(checkpoint, tokens, *, chunk=0, blocks=None):
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    executable = ReferenceBackend().lower(graph, checkpoint, BackendOptions())
    executable.allocate_kv(16)
    return prefill_logits(executable, tokens, chunk=chunk, blocks=blocks)


def random_tokens(length, vocab=96, seed=0):
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, length)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rope_theta": 500000.0},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 32},  # four heads of 32 over a hidden size of 64 (field case BR-059)
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"rms_norm_eps": 1e-2},
    ],
    ids=lambda settings: ",".join(settings) or "plain",
)
def test_logits_equal_transformers_at_every_position(settings):
    model = tiny(LlamaForCausalLM, LlamaConfig, **settings)
    tokens = random_tokens(70)
    np.testing.assert_allclose(
        run(hf_checkpoint(model), tokens), hf_logits(model, tokens), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_scaled_rope_equals_transformers_far_past_the_original_context(scaling):
    """Field case BR-055: short prompts look right with the scaling ignored, long ones do not."""
    model = tiny(LlamaForCausalLM, LlamaConfig, rope_parameters={"rope_theta": 500000.0} | scaling)
    tokens = random_tokens(200)
    np.testing.assert_allclose(
        run(hf_checkpoint(model), tokens), hf_logits(model, tokens), atol=TOLERANCE, rtol=0
    )


def test_rope_factors_of_a_gguf_file_act_as_the_scaling_they_state():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = tiny(LlamaForCausalLM, LlamaConfig, rope_parameters={"rope_theta": 10000.0} | scaling)
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    checkpoint = hf_checkpoint(model, rope_scaling=None, extra={"rope_factors": factors})
    tokens = random_tokens(150)
    np.testing.assert_allclose(run(checkpoint, tokens), hf_logits(model, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 32, 33])
def test_chunked_prefill_gives_the_same_bits_as_one_prefill(chunk):
    model = tiny(LlamaForCausalLM, LlamaConfig)
    checkpoint, tokens = hf_checkpoint(model), random_tokens(70)
    whole = run(checkpoint, tokens)
    np.testing.assert_array_equal(run(checkpoint, tokens, chunk=chunk, blocks=[9, 2, 5]), whole)


def test_mistral_sees_its_sliding_window_only():
    model = tiny(MistralForCausalLM, MistralConfig, sliding_window=24)
    tokens = random_tokens(90)
    checkpoint = hf_checkpoint(model)
    assert checkpoint.config.sliding_window == 24
    np.testing.assert_allclose(run(checkpoint, tokens), hf_logits(model, tokens), atol=TOLERANCE, rtol=0)
    wide = hf_checkpoint(model, sliding_window=0)
    assert np.abs(run(wide, tokens) - hf_logits(model, tokens)).max() > 0.01


def test_tied_embeddings_win_over_an_output_matrix_in_the_file():
    """Field case BR-059: tie true and another lm_head.weight in the file follows transformers, which ties."""
    model = tiny(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=True)
    checkpoint, tokens = hf_checkpoint(model), random_tokens(20)
    weights = {name: dequantize(tensor) for name, tensor in checkpoint.tensors.items()}
    weights["output.weight"] = np.ones((96, 64), np.float32)
    stray = memory_checkpoint(checkpoint.config, weights)
    np.testing.assert_allclose(run(stray, tokens), hf_logits(model, tokens), atol=TOLERANCE, rtol=0)


def test_missing_output_matrix_is_an_error_that_names_it():
    checkpoint = hf_checkpoint(tiny(LlamaForCausalLM, LlamaConfig))
    names = checkpoint.tensors.keys() - {"output.weight"}
    with pytest.raises(FormatError, match=r"output\.weight.*lm_head\.weight"):
        build_graph(checkpoint.config, names)


def test_missing_layer_tensor_is_an_error_that_names_it():
    checkpoint = hf_checkpoint(tiny(LlamaForCausalLM, LlamaConfig))
    names = checkpoint.tensors.keys() - {"blk.1.ffn_down.weight"}
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_down\.weight"):
        build_graph(checkpoint.config, names)


def test_unknown_architecture_is_refused_by_name_with_the_list():
    config = ModelConfig("rwkv7", 1, 64, 1, 1, 64, 64, 64, 64)
    with pytest.raises(UnsupportedModelError, match=r"'rwkv7'.*llama") as caught:
        build_graph(config, ())
    assert all(name in str(caught.value) for name in supported())


def test_rotations_stated_by_tensors_that_were_not_read_are_refused():
    """Field case BR-055: never ignored."""
    checkpoint = hf_checkpoint(tiny(LlamaForCausalLM, LlamaConfig))
    for architecture, tensor in (("llama", "rope_freqs.weight"), ("phi3", "rope_factors_long.weight")):
        config = replace(checkpoint.config, architecture=architecture)
        with pytest.raises(UnsupportedModelError, match=re.escape(tensor)):
            build_graph(config, [*checkpoint.tensors, tensor])
