"""From a folder that transformers wrote to logits: every reader and architecture against transformers in float32."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import transformers

from fixtures.checkpoints import prefill_logits
from fixtures.hf import hf_checkpoint, hf_logits, tiny
from toque.backends.base import BackendOptions
from toque.backends.reference import ReferenceBackend
from toque.errors import ModelError
from toque.formats import dequantize, load_checkpoint
from toque.graph.fuse import fuse
from toque.models import build_graph

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 96, 200)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

CASES = {
    "llama": ("Llama", {}),
    "llama-head-dim": ("Llama", {"head_dim": 32, "num_hidden_layers": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama-llama3": ("Llama", {"rope_parameters": {"rope_theta": 5e5} | LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "phi3": ("Phi3", {"sliding_window": 24, "pad_token_id": 0}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"tie_word_embeddings": True, "num_hidden_layers": 4, "sliding_window": 16}),
    "gemma3": (
        "Gemma3",
        {
            "tie_word_embeddings": True,
            "num_hidden_layers": 7,
            "sliding_window": 16,
            "rope_parameters": GEMMA3_ROPE,
            "query_pre_attn_scalar": 24,
        },
    ),
}


def make(name, **settings):
    config = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    return tiny(getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, config), **settings)


def run(folder):
    checkpoint = load_checkpoint(folder)
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    executable = ReferenceBackend().lower(graph, checkpoint, BackendOptions())
    executable.allocate_kv(8)
    return prefill_logits(executable, TOKENS, chunk=70)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_saved_checkpoint_equal_transformers(name, tmp_path):
    """Field cases BR-055, BR-057 and BR-059, from the files to 200 positions of logits."""
    architecture, settings = CASES[name]
    model = make(architecture, **settings)
    model.save_pretrained(tmp_path)
    np.testing.assert_allclose(run(tmp_path), hf_logits(model, TOKENS), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_older_spellings_of_the_rope_settings_mean_the_same(kind_key, tmp_path):
    """Field case BR-055: ``rope_theta`` and ``rope_scaling`` side by side, the kind under either of its two keys."""
    model = make("Llama", rope_parameters={"rope_theta": 5e5} | LLAMA3)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling[kind_key] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(run(tmp_path), hf_logits(model, TOKENS), atol=1e-3, rtol=0)


def write_gguf(model, path, rope_factors=None):
    """A llama as llama.cpp writes it: the two halves of each head of q and k interleaved."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, tensor in hf_checkpoint(model).tensors.items():
        values = dequantize(tensor)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if heads:
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(name, np.ascontiguousarray(values))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("scaled", [False, True])
def test_logits_of_a_gguf_file_equal_transformers(scaled, tmp_path):
    """Field case BR-055: GGUF states llama3's scaling as a tensor of factors."""
    scaling = LLAMA3 if scaled else {"rope_type": "default"}
    model = make("Llama", rope_parameters={"rope_theta": 5e5} | scaling)
    factors = 5e5 ** (-np.arange(0, 16, 2) / 16) / model.model.rotary_emb.inv_freq.numpy() if scaled else None
    write_gguf(model, tmp_path / "model.gguf", factors)
    np.testing.assert_allclose(run(tmp_path / "model.gguf"), hf_logits(model, TOKENS), atol=1e-3, rtol=0)


def test_an_unknown_rope_scaling_is_a_load_error(tmp_path):
    make("Llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "spiral", "factor": 2.0, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="spiral"):
        run(tmp_path)


def test_an_untied_checkpoint_without_its_output_matrix_is_a_load_error(tmp_path):
    """Field case BR-059: never a random output matrix."""
    model = make("Llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        run(tmp_path)
