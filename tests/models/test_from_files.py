"""From files that transformers or llama.cpp's converter wrote to logits: every reader and family, in float32."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fixtures.checkpoints import prefill_logits
from fixtures.families import FAMILIES, GGUF_FAMILIES, make
from fixtures.gguf_files import write_gguf
from fixtures.hf import hf_logits
from toque.backends.base import BackendOptions
from toque.backends.reference import ReferenceBackend
from toque.errors import ModelError, UnsupportedModelError
from toque.formats import load_checkpoint
from toque.formats.layout import ARCHITECTURES
from toque.graph.fuse import fuse
from toque.models import build_graph, supported

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 96, 200)]


def run(path, *chunks):
    """Logits of all positions, the prompt cut into chunks of so many tokens; one array for each of ``chunks``."""
    checkpoint = load_checkpoint(path)
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    executable = ReferenceBackend().lower(graph, checkpoint, BackendOptions())
    executable.allocate_kv(8)
    results = [prefill_logits(executable, TOKENS, chunk=chunk) for chunk in chunks or (70,)]
    return results if chunks else results[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_saved_checkpoint_equal_transformers(name, tmp_path):
    """Field cases BR-055, BR-057 and BR-059, from the files to 200 positions of logits."""
    model = make(name)
    model.save_pretrained(tmp_path)
    whole, chunked, single = run(tmp_path, 0, 70, 1)
    np.testing.assert_allclose(whole, hf_logits(model, TOKENS), atol=1e-3, rtol=0)
    np.testing.assert_array_equal(chunked, whole)
    np.testing.assert_array_equal(single, whole)


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_logits_of_a_gguf_file_equal_transformers(name, tmp_path):
    """Field cases BR-055, BR-057 and BR-059: GGUF states llama3's scaling as a tensor of factors, for one."""
    model = make(name)
    write_gguf(model, tmp_path / "model.gguf")
    np.testing.assert_allclose(run(tmp_path / "model.gguf"), hf_logits(model, TOKENS), atol=1e-3, rtol=0)


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
def test_a_long_rope_serves_short_contexts_with_its_short_factors(source, tmp_path):
    model = make("phi3-longrope", max_position_embeddings=48)
    if source == "gguf":
        write_gguf(model, tmp_path / "model.gguf")
        path = tmp_path / "model.gguf"
    else:
        model.save_pretrained(tmp_path)
        path = tmp_path
    np.testing.assert_allclose(run(path)[:48], hf_logits(model, TOKENS[:48]), atol=1e-3, rtol=0)


def test_experts_in_some_layers_only_are_refused(tmp_path):
    make("qwen3moe", mlp_only_layers=[0]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="mlp_only_layers"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_older_spellings_of_the_rope_settings_mean_the_same(kind_key, tmp_path):
    """Field case BR-055: ``rope_theta`` and ``rope_scaling`` side by side, the kind under either of its two keys."""
    model = make("llama-llama3")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling[kind_key] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(run(tmp_path), hf_logits(model, TOKENS), atol=1e-3, rtol=0)


def test_an_unknown_rope_scaling_is_a_load_error(tmp_path):
    make("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "spiral", "factor": 2.0, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="spiral"):
        run(tmp_path)


def test_an_untied_checkpoint_without_its_output_matrix_is_a_load_error(tmp_path):
    """Field case BR-059: never a random output matrix."""
    model = make("llama-tied")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        run(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma3", "qwen3moe"])
def test_half_precision_weights_are_computed_with_in_float32(name, dtype, tmp_path):
    """Field case BR-057: the embeddings' scale and the norms' + 1 are not rounded to the weights' type."""
    model = make(name).to(dtype)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    kind = load_checkpoint(tmp_path).tensors["token_embd.weight"].dtype
    assert kind == {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    expected = hf_logits(model, TOKENS)
    logits = run(tmp_path)
    np.testing.assert_allclose(logits, expected, atol=1e-3, rtol=0)
    shares = np.exp(logits[-1].astype(np.float64) - logits[-1].max())
    theirs = torch.softmax(torch.from_numpy(expected[-1]).double(), dim=-1).numpy()
    np.testing.assert_allclose(shares / shares.sum(), theirs, atol=1e-4)


@pytest.mark.model
def test_the_scale_of_gemma3_270m_is_not_rounded(gemma3):
    """Field case BR-057: sqrt(640) is 25.2982, where bf16 would make it 25.25."""
    assert abs(load_checkpoint(gemma3).config.embedding_scale - 25.2982) < 1e-4


def test_what_can_be_read_can_be_run_and_the_other_way_round():
    """``mistral`` is only ever read as the llama that it is."""
    assert set(supported()) - {"mistral"} == set(ARCHITECTURES)
