"""GGUF metadata and tensors as a Checkpoint: rope layout, tied heads, fused matrices, scaling, split files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from formats import gguf_builder as build
from formats.gguf_builder import GGUF, Tensor, tiny_llama
from toque.errors import FormatError, UnsupportedModelError
from toque.formats import dequantize, load_checkpoint


def interleave(matrix: np.ndarray, n_heads: int) -> np.ndarray:
    """Halves layout to GGUF's: row by row, as one would by hand."""
    head_dim = matrix.shape[0] // n_heads
    out = np.empty_like(matrix)
    for head in range(n_heads):
        for pair in range(head_dim // 2):
            base = head * head_dim
            out[base + 2 * pair] = matrix[base + pair]
            out[base + 2 * pair + 1] = matrix[base + head_dim // 2 + pair]
    return out


def test_llama_rotary_rows_are_put_back_in_halves(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(64, 64)).astype(np.float32)
    k = rng.normal(size=(32, 64)).astype(np.float32)
    file = tiny_llama(
        weights={"blk.0.attn_q.weight": interleave(q, 4), "blk.0.attn_k.weight": interleave(k, 2)}
    )
    file.tensors.append(Tensor("blk.0.attn_q.bias", (64,), interleave(q[:, :1], 4).tobytes()))
    tensors = load_checkpoint(file.write(tmp_path / "m.gguf")).tensors
    np.testing.assert_array_equal(dequantize(tensors["blk.0.attn_q.weight"]), q)
    np.testing.assert_array_equal(dequantize(tensors["blk.0.attn_k.weight"]), k)
    np.testing.assert_array_equal(dequantize(tensors["blk.0.attn_q.bias"]), q[:, 0])
    assert tensors["blk.0.attn_v.weight"].row_order is None


def test_weights_equal_those_that_transformers_reads_from_the_same_file(tmp_path: Path) -> None:
    path = tiny_llama(seed=3, head_dim=16).write(tmp_path / "m.gguf")
    ours = load_checkpoint(path).tensors
    from transformers import LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=LlamaForCausalLM(config))[
        "tensors"
    ]
    for ours_name, hf_name in {
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
        "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }.items():
        np.testing.assert_array_equal(dequantize(ours[ours_name]), theirs[hf_name].float().numpy())


def test_only_llama_is_interleaved(tmp_path: Path) -> None:
    file = tiny_llama(architecture="qwen2")
    for layer in range(2):
        for part, rows in (("q", 64), ("k", 32), ("v", 32)):
            file.tensors.append(Tensor(f"blk.{layer}.attn_{part}.bias", (rows,), bytes(4 * rows)))
    tensors = load_checkpoint(file.write(tmp_path / "m.gguf")).tensors
    assert all(tensor.row_order is None for tensor in tensors.values())


def test_qwen2_needs_its_biases(tmp_path: Path) -> None:
    path = tiny_llama(architecture="qwen2").write(tmp_path / "m.gguf")
    with pytest.raises(FormatError, match=r"blk\.0\.attn_q\.bias: the tensor is missing"):
        load_checkpoint(path)


def test_no_output_matrix_means_tied(tmp_path: Path) -> None:
    """Field case BR-059."""
    assert load_checkpoint(tiny_llama(tied=True).write(tmp_path / "a.gguf")).config.tied_embeddings
    assert not load_checkpoint(tiny_llama(tied=False).write(tmp_path / "b.gguf")).config.tied_embeddings


def test_vocabulary_size_is_the_embeddings(tmp_path: Path) -> None:
    file = tiny_llama(vocab=64)
    file["llama.vocab_size"].value = 60
    assert load_checkpoint(file.write(tmp_path / "m.gguf")).config.vocab_size == 64


def test_head_size_defaults_to_an_even_share(tmp_path: Path) -> None:
    file = tiny_llama().drop(
        "llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count"
    )
    config = load_checkpoint(file.write(tmp_path / "m.gguf")).config
    assert (config.head_dim, config.rope_dim) == (16, 0)


def test_rope_freqs_are_kept(tmp_path: Path) -> None:
    file = tiny_llama()
    factors = np.linspace(1, 8, 8, dtype="<f4")
    file.tensors.append(Tensor("rope_freqs.weight", (8,), factors.tobytes()))
    tensors = load_checkpoint(file.write(tmp_path / "m.gguf")).tensors
    np.testing.assert_array_equal(dequantize(tensors["rope_freqs.weight"]), factors)


def test_rope_scaling(tmp_path: Path) -> None:
    file = tiny_llama().set("llama.rope.scaling.type", build.STRING, "linear")
    file.set("llama.rope.scaling.factor", build.F32, 4.0)
    scaling = load_checkpoint(file.write(tmp_path / "linear.gguf")).config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)

    file.set("llama.rope.scaling.type", build.STRING, "yarn")
    file.set("llama.rope.scaling.original_context_length", build.U32, 64)
    scaling = load_checkpoint(file.write(tmp_path / "yarn.gguf")).config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("yarn", 4.0, 64)

    old = tiny_llama().set("llama.rope.scale_linear", build.F32, 2.0)
    scaling = load_checkpoint(old.write(tmp_path / "old.gguf")).config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("linear", 2.0)


def test_an_unknown_rope_scaling_is_refused(tmp_path: Path) -> None:
    file = tiny_llama().set("llama.rope.scaling.type", build.STRING, "longrope")
    with pytest.raises(UnsupportedModelError, match=r"llama\.rope\.scaling\.type.*longrope"):
        load_checkpoint(file.write(tmp_path / "m.gguf"))


def test_experts_of_a_family_that_has_none_are_refused(tmp_path: Path) -> None:
    file = tiny_llama(architecture="qwen2").set("qwen2.expert_count", build.U32, 8)
    with pytest.raises(UnsupportedModelError, match="expert_count"):
        load_checkpoint(file.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("used", [0, 9])
def test_an_impossible_number_of_experts_in_use_names_its_key(used: int, tmp_path: Path) -> None:
    file = (
        tiny_llama().set("llama.expert_count", build.U32, 8).set("llama.expert_used_count", build.U32, used)
    )
    with pytest.raises(FormatError, match=r"llama\.expert_used_count"):
        load_checkpoint(file.write(tmp_path / "m.gguf"))


def test_an_expert_per_tensor_is_stacked_without_a_copy(tmp_path: Path) -> None:
    """The first Mixtral files, before experts were stacked in the file."""
    rng = np.random.default_rng(0)
    file = tiny_llama(n_layers=1).set("llama.expert_count", build.U32, 3)
    file.set("llama.expert_used_count", build.U32, 2)
    file.tensors = [tensor for tensor in file.tensors if ".ffn_" not in tensor.name or "norm" in tensor.name]
    file.tensors.append(
        Tensor("blk.0.ffn_gate_inp.weight", (64, 3), rng.normal(size=(3, 64)).astype("<f4").tobytes())
    )
    downs = rng.normal(size=(3, 64, 96)).astype("<f4")
    for expert in range(3):
        file.tensors.append(Tensor(f"blk.0.ffn_down.{expert}.weight", (96, 64), downs[expert].tobytes()))
        for part in ("gate", "up"):
            values = rng.normal(size=(96, 64)).astype("<f4")
            file.tensors.append(Tensor(f"blk.0.ffn_{part}.{expert}.weight", (64, 96), values.tobytes()))
    stacked = load_checkpoint(file.write(tmp_path / "m.gguf")).tensors["blk.0.ffn_down_exps.weight"]
    assert stacked.shape == (3, 64, 96)
    assert stacked.raw.nbytes == 0
    assert stacked.nbytes == downs.nbytes
    np.testing.assert_array_equal(dequantize(stacked), downs)
    np.testing.assert_array_equal(dequantize(stacked.experts()[1]), downs[1])
    del file.tensors[-1]
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_up\.2\.weight: the tensor is missing"):
        load_checkpoint(file.write(tmp_path / "n.gguf"))


def test_fused_phi3_matrices_are_cut_by_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    qkv = rng.normal(size=(128, 64)).astype("<f4")
    gate_up = rng.normal(size=(192, 64)).astype("<f4")
    file = tiny_llama(architecture="phi3", n_layers=1)
    for part in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
        file.drop_tensor(f"blk.0.{part}.weight")
    file.tensors.append(Tensor("blk.0.attn_qkv.weight", (64, 128), qkv.tobytes()))
    file.tensors.append(Tensor("blk.0.ffn_up.weight", (64, 192), gate_up.tobytes()))
    tensors = load_checkpoint(file.write(tmp_path / "m.gguf")).tensors
    np.testing.assert_array_equal(dequantize(tensors["blk.0.attn_q.weight"]), qkv[:64])
    np.testing.assert_array_equal(dequantize(tensors["blk.0.attn_k.weight"]), qkv[64:96])
    np.testing.assert_array_equal(dequantize(tensors["blk.0.attn_v.weight"]), qkv[96:])
    np.testing.assert_array_equal(dequantize(tensors["blk.0.ffn_gate.weight"]), gate_up[:96])
    np.testing.assert_array_equal(dequantize(tensors["blk.0.ffn_up.weight"]), gate_up[96:])


def test_the_recipe_names_the_quantization(tmp_path: Path) -> None:
    assert load_checkpoint(tiny_llama().write(tmp_path / "a.gguf")).quantization == "F32"
    file = tiny_llama().set("general.file_type", build.U32, 15)
    assert load_checkpoint(file.write(tmp_path / "b.gguf")).quantization == "Q4_K_M"


def test_a_folder_with_one_gguf_file_is_that_model(tmp_path: Path) -> None:
    tiny_llama().write(tmp_path / "m.gguf")
    assert load_checkpoint(tmp_path).path == tmp_path / "m.gguf"
    tiny_llama().write(tmp_path / "n.gguf")
    with pytest.raises(FormatError, match="holds 2 GGUF models"):
        load_checkpoint(tmp_path)


# --- files in several parts (field case BR-063) ------------------------------------------------------------------


def split(folder: Path, parts: int = 3) -> list[Path]:
    whole = tiny_llama()
    each = -(-len(whole.tensors) // parts)
    paths = []
    for number in range(parts):
        part = GGUF(
            list(whole.metadata) if number == 0 else [], whole.tensors[number * each : (number + 1) * each]
        )
        part.set("split.no", build.U16, number)
        part.set("split.count", build.U16, parts)
        part.set("split.tensors.count", build.I32, len(whole.tensors))
        paths.append(part.write(folder / f"m-{number + 1:05}-of-{parts:05}.gguf"))
    return paths


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_part_loads_the_whole(tmp_path: Path, which: int) -> None:
    paths = split(tmp_path)
    checkpoint = load_checkpoint(paths[which])
    whole = load_checkpoint(tiny_llama().write(tmp_path / "whole.gguf"))
    assert set(checkpoint.tensors) == set(whole.tensors)
    for name, tensor in whole.tensors.items():
        np.testing.assert_array_equal(dequantize(checkpoint.tensors[name]), dequantize(tensor))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_missing_part_is_named(tmp_path: Path, which: int) -> None:
    paths = split(tmp_path)
    paths[which].unlink()
    with pytest.raises(FormatError) as caught:
        load_checkpoint(paths[(which + 1) % 3])
    assert caught.value.field == paths[which].name


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    os.rename(paths[0], tmp_path / "m.gguf")
    with pytest.raises(FormatError, match="one of 3 parts"):
        load_checkpoint(tmp_path / "m.gguf")


def test_parts_in_each_others_place_are_refused(tmp_path: Path) -> None:
    first, second, _ = split(tmp_path)
    data = first.read_bytes()
    os.rename(second, first)
    second.write_bytes(data)
    with pytest.raises(FormatError, match=r"metadata\[split\.no\]"):
        load_checkpoint(first)


def test_the_same_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    part = GGUF([], [tiny_llama().tensors[0]])
    part.set("split.no", build.U16, 1).set("split.count", build.U16, 3).write(paths[1])
    with pytest.raises(FormatError, match=r"token_embd\.weight: is in"):
        load_checkpoint(paths[0])


def test_too_few_tensors_in_the_parts_are_noticed(tmp_path: Path) -> None:
    paths = split(tmp_path)
    part = GGUF([], [])
    part.set("split.no", build.U16, 2).set("split.count", build.U16, 3).write(paths[2])
    with pytest.raises(FormatError, match=r"split\.tensors\.count"):
        load_checkpoint(paths[0])
