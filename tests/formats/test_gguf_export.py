"""Folders of every family as GGUF files: read back, they are the same model; what a file cannot state is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from safetensors.numpy import load_file, save_file

from fixtures.checkpoints import prefill_logits
from fixtures.hf import hf_logits, tiny
from formats import quantized as q
from toque.backends.base import BackendOptions
from toque.backends.reference import ReferenceBackend
from toque.errors import FormatError, UnsupportedModelError
from toque.formats import dequantize, load_checkpoint
from toque.formats.checkpoint import Checkpoint
from toque.formats.convert import quantize_model
from toque.formats.gguf import ValueType
from toque.formats.gguf_export import export_metadata, export_tensors
from toque.formats.gguf_writer import write_gguf
from toque.formats.schemes.integers import unpack_words
from toque.graph.fuse import fuse
from toque.models import build_graph

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 96, 60)]
MOE = {"num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
    "attention_factor": 1.3,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], "short_factor": [1.0] * 8,
}  # fmt: skip

# name: Hugging Face's family and the settings of a tiny model
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama with yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral whose window is its context": ("Mistral", {"sliding_window": 512}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None, **MOE}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, **MOE}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"tie_word_embeddings": True, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3",
        {
            "tie_word_embeddings": True,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
        },
    ),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": None}),
    "phi3 with a long context": (
        "Phi3",
        {"pad_token_id": 0, "sliding_window": None, "rope_parameters": LONG},
    ),
}


def model_of(name: str, **more: Any) -> Any:
    family, settings = FAMILIES[name]
    config = getattr(hf, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    return tiny(getattr(hf, f"{family}ForCausalLM"), config, **(settings | more))


def logits(checkpoint: Checkpoint) -> np.ndarray:
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    executable = ReferenceBackend().lower(graph, checkpoint, BackendOptions(threads=1))
    executable.allocate_kv(4)
    return prefill_logits(executable, TOKENS)


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_written_file_is_the_same_model(name: str, tmp_path: Path) -> None:
    """In float it is the same bit for bit; in Q8_0 it differs by what Q8_0 loses."""
    model = model_of(name)
    model.save_pretrained(tmp_path / "plain")
    plain = load_checkpoint(tmp_path / "plain")
    write_gguf(tmp_path / "float.gguf", export_metadata(plain), list(export_tensors(plain)))
    whole = load_checkpoint(tmp_path / "float.gguf")
    for tensor_name, tensor in plain.tensors.items():
        np.testing.assert_array_equal(dequantize(whole.tensors[tensor_name]), dequantize(tensor))
    expected = logits(plain)
    assert error(logits(whole), expected) < 1e-5
    assert error(expected, hf_logits(model, TOKENS)) < 1e-3
    quantize_model(tmp_path / "plain", tmp_path / "small.gguf", "q8_0")
    assert error(logits(load_checkpoint(tmp_path / "small.gguf")), expected) < 0.07


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "window": ("mistral whose window is its context", {"sliding_window": 24}, "sliding_window"),
    "pattern": ("gemma3", {"layer_types": ["full_attention"] * 7}, "sliding_window_pattern"),
    "pattern of rotations": (
        "gemma3",
        {"layer_types": ["full_attention"] * 7, "sliding_window": 64, "max_position_embeddings": 64},
        "sliding_window_pattern",
    ),
    "scale": ("gemma2", {"query_pre_attn_scalar": 20}, "attention_scale"),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    "experts' weights": ("qwen3moe", {"norm_topk_prob": False}, "norm_expert_weights"),
    "scaling": ("qwen2", {"rope_parameters": LLAMA3}, "rope_scaling llama3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_cannot_state_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, settings, message = REFUSED[name]
    model_of(family, **settings).save_pretrained(tmp_path / "plain")
    with pytest.raises(UnsupportedModelError, match=f"cannot state its {message}"):
        quantize_model(tmp_path / "plain", tmp_path / "small.gguf", "q8_0")
    assert not (tmp_path / "small.gguf").exists()


def test_a_window_that_hides_nothing_is_stated_where_readers_have_one_of_their_own(tmp_path: Path) -> None:
    model_of("gemma2", sliding_window=64, max_position_embeddings=64).save_pretrained(tmp_path / "plain")
    quantize_model(tmp_path / "plain", tmp_path / "small.gguf", "q8_0")
    assert load_checkpoint(tmp_path / "small.gguf").config.sliding_window == 64


def test_an_act_order_checkpoint_whose_shapes_do_not_fit_is_refused(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path / "plain")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
    q.quantize_folder(tmp_path / "plain", tmp_path / "gptq", config, lambda w: q.gptq(w, act_order=True))
    file = tmp_path / "gptq" / "model.safetensors"
    tensors = load_file(file)
    gate = "model.layers.0.mlp.gate_proj."
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(gate)}
    save_file(tensors | {gate + "weight": np.zeros(4, np.float32)}, file)
    with pytest.raises(FormatError, match="shape"):
        load_checkpoint(tmp_path / "gptq")


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3moe"])
def test_a_checkpoint_in_act_order_is_written_in_its_own_order(family: str, tmp_path: Path) -> None:
    # Every token takes all experts: nothing hangs on a choice between near equals.
    experts = {"moe_intermediate_size": 64, "num_experts_per_tok": 4} if family == "qwen3moe" else {}
    model_of(family, **experts).save_pretrained(tmp_path / "plain")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
    q.quantize_folder(tmp_path / "plain", tmp_path / "gptq", config, lambda w: q.gptq(w, act_order=True))
    quantize_model(tmp_path / "gptq", tmp_path / "small.gguf", "q8_0", requantize=True)
    source, written = load_checkpoint(tmp_path / "gptq"), load_checkpoint(tmp_path / "small.gguf")
    assert source.tensors["blk.0.attn_output.weight"].column_order is not None
    if experts:
        assert source.tensors["blk.0.ffn_up_exps.weight"].parts[1].row_order is not None
    assert error(logits(written), logits(source)) < 0.05


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_matrix_in_act_order_is_converted_once(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are asked for in another order, a few at a time, from everywhere in it."""
    model_of(family).save_pretrained(tmp_path / "plain")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
    q.quantize_folder(tmp_path / "plain", tmp_path / "gptq", config, lambda w: q.gptq(w, act_order=True))
    quantize_model(tmp_path / "gptq", tmp_path / "at-once.gguf", "q4_0", requantize=True)
    converted: list[int] = []

    def counted(words: np.ndarray, bits: int) -> np.ndarray:
        converted.append(words.shape[1])
        return unpack_words(words, bits)

    monkeypatch.setattr("toque.formats.schemes.gptq.unpack_words", counted)
    monkeypatch.setattr("toque.formats.checkpoint._CHUNK_BYTES", 1)  # 32 rows at a time
    quantize_model(tmp_path / "gptq", tmp_path / "small.gguf", "q4_0", requantize=True)
    stored = load_file(tmp_path / "gptq" / "model.safetensors")
    assert sum(converted) == sum(array.shape[1] for name, array in stored.items() if "qweight" in name)
    assert len(converted) > 14
    assert (tmp_path / "small.gguf").read_bytes() == (tmp_path / "at-once.gguf").read_bytes()


@pytest.mark.skipif("TOQUE_PEER_LLAMA_CPP" not in os.environ, reason="needs llama-cpp-python")
@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    # llama.cpp wants head sizes and rows that its blocks divide.
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "head_dim": 32,
    }
    sizes |= {"query_pre_attn_scalar": 32} if name.startswith("gemma") else {}
    if "long" in name:
        factors = {"long_factor": LONG["long_factor"] * 2, "short_factor": LONG["short_factor"] * 2}
        sizes["rope_parameters"] = LONG | factors
    model = model_of(name, **sizes)
    model.save_pretrained(tmp_path / "plain")
    plain = load_checkpoint(tmp_path / "plain")
    vocabulary = {
        "tokenizer.ggml.model": (ValueType.STRING, "gpt2"),
        "tokenizer.ggml.pre": (ValueType.STRING, "gpt-2"),
        "tokenizer.ggml.tokens": (ValueType.STRING, [f"t{i}" for i in range(96)]),
        "tokenizer.ggml.token_type": (ValueType.INT32, np.ones(96, np.int32)),
        "tokenizer.ggml.merges": (ValueType.STRING, ["t 1"]),
        "tokenizer.ggml.bos_token_id": (ValueType.UINT32, 0),
        "tokenizer.ggml.eos_token_id": (ValueType.UINT32, 1),
    }
    file = tmp_path / "float.gguf"
    write_gguf(file, {**export_metadata(plain), **vocabulary}, list(export_tensors(plain)))
    code = (
        "import sys, numpy as np, llama_cpp\n"
        "model = llama_cpp.Llama(sys.argv[1], n_ctx=64, n_threads=1, logits_all=True, verbose=False)\n"
        f"model.eval({TOKENS!r})\n"
        "np.save(sys.argv[2], np.array(model.scores[:60]))\n"
    )
    peer, answer = os.environ["TOQUE_PEER_LLAMA_CPP"], tmp_path / "logits.npy"
    subprocess.run([peer, "-c", code, str(file), str(answer)], check=True, capture_output=True, timeout=60)
    assert error(np.load(answer), hf_logits(model, TOKENS)) < 0.02
