"""Hugging Face folders: what transformers saves is what we load; hostile and incomplete folders are refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from fixtures.folders import LLAMA, refused
from fixtures.hf import hf_checkpoint, tiny
from toque.errors import FormatError, UnsupportedModelError
from toque.formats import dequantize, load_checkpoint
from toque.formats.hf_config import model_config

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {}),
    "llama-biased": (hf.LlamaForCausalLM, hf.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": (hf.LlamaForCausalLM, hf.LlamaConfig, {"head_dim": 32}),
    "llama-tied": (hf.LlamaForCausalLM, hf.LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": 48}),
    "mistral-no-window": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": None}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {}),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, {"tie_word_embeddings": True}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {"tie_word_embeddings": True, "sliding_window": 32}),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        {"tie_word_embeddings": True, "sliding_window": 32, "num_hidden_layers": 7},
    ),
}


def saved(folder: Path, family: str = "llama", **settings: Any) -> tuple[Any, Path]:
    model_class, config_class, extra = FAMILIES[family]
    model = tiny(model_class, config_class, **(extra | settings))
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_with_the_same_weights_and_sizes(tmp_path: Path, family: str) -> None:
    model, folder = saved(tmp_path, family)
    ours = load_checkpoint(folder)
    # `hf_checkpoint` has its own map of names and of config keys, made for the model tests.
    theirs = hf_checkpoint(model)
    if family == "gemma":  # that map is for gemma 2 and 3, which have a norm more on each side
        renamed = {name.replace("post_attention_norm", "ffn_norm"): t for name, t in theirs.tensors.items()}
        theirs = dataclasses.replace(theirs, tensors=renamed)
    assert set(ours.tensors) == set(theirs.tensors)
    for name, tensor in theirs.tensors.items():
        np.testing.assert_array_equal(dequantize(ours.tensors[name]), dequantize(tensor), err_msg=name)
    for key in (
        "n_layers", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "ffn_size", "vocab_size", "context_length",
        "norm_eps", "rope_theta", "rope_scaling", "rope_local_theta", "tied_embeddings",
    ):  # fmt: skip
        assert getattr(ours.config, key) == getattr(theirs.config, key), key


def test_what_sets_gemma3_apart(tmp_path: Path) -> None:
    config = load_checkpoint(saved(tmp_path, "gemma3")[1]).config
    assert (config.sliding_window, config.sliding_window_pattern) == (32, 6)
    assert config.embedding_scale == 8.0
    assert config.attention_scale == 1 / 16
    assert config.hidden_act == "gelu_tanh"
    assert (config.attention_softcap, config.final_softcap) == (0.0, 0.0)


@pytest.mark.parametrize(("hidden", "scale"), [(640, 25.2982), (1152, 33.9411)])
def test_gemmas_embedding_scale_is_not_rounded(hidden: int, scale: float) -> None:
    """Field case BR-057: bfloat16 would make these 25.25 and 34."""
    values = hf.Gemma3TextConfig(hidden_size=hidden).to_dict()
    assert model_config(values).embedding_scale == pytest.approx(scale, abs=1e-4)


def test_what_sets_gemma2_apart(tmp_path: Path) -> None:
    config = load_checkpoint(saved(tmp_path, "gemma2")[1]).config
    assert (config.sliding_window, config.sliding_window_pattern) == (32, 2)
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)


@pytest.mark.parametrize(("family", "window"), [("mistral", 48), ("mistral-no-window", 0), ("qwen2", 0)])
def test_windows(tmp_path: Path, family: str, window: int) -> None:
    assert load_checkpoint(saved(tmp_path, family)[1]).config.sliding_window == window


def test_phi3_fused_matrices_are_cut_by_rows(tmp_path: Path) -> None:
    model = tiny(hf.Phi3ForCausalLM, hf.Phi3Config, pad_token_id=0)
    model.save_pretrained(tmp_path)
    tensors = load_checkpoint(tmp_path).tensors
    layer = model.model.layers[1]
    qkv = np.concatenate([dequantize(tensors[f"blk.1.attn_{part}.weight"]) for part in "qkv"])
    np.testing.assert_array_equal(qkv, layer.self_attn.qkv_proj.weight.detach().numpy())
    gate_up = np.concatenate([dequantize(tensors[f"blk.1.ffn_{part}.weight"]) for part in ("gate", "up")])
    np.testing.assert_array_equal(gate_up, layer.mlp.gate_up_proj.weight.detach().numpy())


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_half_precision_is_kept(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    model = tiny(hf.LlamaForCausalLM, hf.LlamaConfig).to(dtype)
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.quantization == name
    tensor = checkpoint.tensors["blk.0.ffn_up.weight"]
    assert tensor.dtype == name
    expected = model.model.layers[0].mlp.up_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(dequantize(tensor), expected)


def test_head_dim_in_the_config_wins(tmp_path: Path) -> None:
    """Field case BR-059: hidden 64 and four heads would give 16, the config says 32."""
    checkpoint = load_checkpoint(saved(tmp_path, "llama-wide-heads")[1])
    assert checkpoint.config.head_dim == 32
    assert checkpoint.tensors["blk.0.attn_q.weight"].shape == (128, 64)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def test_a_tied_model_ignores_a_head_in_the_file(tmp_path: Path) -> None:
    """Field case BR-059: transformers ties, whatever the file holds."""
    _, folder = saved(tmp_path)
    edit_config(folder, tie_word_embeddings=True)
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config.tied_embeddings
    assert "output.weight" not in checkpoint.tensors


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    """Field case BR-059: never a random head."""
    _, folder = saved(tmp_path, "llama-tied")
    edit_config(folder, tie_word_embeddings=False)
    refused(folder, field="lm_head.weight")


# --- config.json -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "factor"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear", 2.0),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, "linear", 4.0),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 99}},
            "yarn",
            4.0,
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "yarn", 4.0),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            "llama3",
            8.0,
        ),
    ],
)
def test_rope_scaling_in_both_spellings(changes: dict[str, Any], kind: str, factor: float) -> None:
    scaling = model_config(LLAMA | changes).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == (kind, factor)


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "default", "rope_theta": 5e5}])
def test_no_rope_scaling(scaling: object) -> None:
    assert model_config(LLAMA | {"rope_scaling": scaling}).rope_scaling is None


@pytest.mark.parametrize(
    "scaling", [{"type": "dynamic", "factor": 2.0}, {"rope_type": "spiral"}, {"type": "mrope"}]
)
def test_an_unknown_rope_scaling_is_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_scaling\.(rope_)?type"):
        model_config(LLAMA | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("hidden_size", -64),
        ("hidden_size", None),
        ("hidden_size", [64]),
        ("num_attention_heads", 0),
        ("num_hidden_layers", 10**18),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("vocab_size", 2**40),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", 1e300 * 10),
        ("rope_theta", 0),
        ("rope_theta", 10**400),
        ("tie_word_embeddings", 1),
        ("hidden_act", 3),
        ("rope_scaling", [1]),
        ("model_type", {"a": 1}),
    ],
)
def test_a_bad_value_names_its_key(key: str, value: object) -> None:
    with pytest.raises(FormatError) as caught:
        model_config(LLAMA | {key: value})
    assert caught.value.field == f"config.json.{key}"
    assert len(caught.value.message) < 300


def test_an_unsupported_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported; Toque reads .*llama"):
        model_config(LLAMA | {"model_type": "mamba"})


def test_windows_that_are_no_pattern_are_refused() -> None:
    gemma = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 3}
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        model_config(gemma | {"layer_types": types})


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "\x00", '{"a":' * 100_000, '{"model_type": "llama", "model_type": "x"}']
)
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, field="config.json")


# --- shards and the index (field case BR-063) --------------------------------------------------------------------

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def three_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    model = tiny(hf.LlamaForCausalLM, hf.LlamaConfig)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=size * 2 // 5)
    assert len(list(folder.glob("model-*.safetensors"))) == 3
    return folder


@pytest.fixture
def shards(three_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three_shards, tmp_path / "model"))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05}-of-00003.safetensors"


def test_all_shards_load(shards: Path) -> None:
    assert len(load_checkpoint(shards).tensors) == 21


def test_a_missing_shard_is_named(shards: Path) -> None:
    shard(shards, 2).unlink()
    refused(shards, field="model-00002-of-00003.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 100, 10_000])
def test_a_truncated_shard_is_named(shards: Path, keep: int) -> None:
    os.truncate(shard(shards, 3), keep)
    assert "model-00003-of-00003.safetensors" in refused(shards).message


def test_a_tensor_that_is_in_no_file_is_named(shards: Path) -> None:
    edit_index(shards, lambda weights: weights.update({"model.extra": shard(shards, 1).name}))
    refused(shards, field="model.extra")


def test_a_tensor_that_no_file_lists_is_named(shards: Path) -> None:
    edit_index(shards, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    refused(shards, field="model.layers.1.mlp.up_proj.weight")


def test_a_stray_file_beside_the_shards_is_ignored(shards: Path) -> None:
    (shards / "model.safetensors").write_bytes(b"not even a header")
    (shards / "adapter.safetensors").write_bytes(b"")
    load_checkpoint(shards)


def test_shards_without_their_index_are_refused(shards: Path) -> None:
    (shards / INDEX).unlink()
    refused(shards, field=INDEX)


def test_a_directory_in_place_of_a_shard_is_refused(shards: Path) -> None:
    shard(shards, 1).unlink()
    shard(shards, 1).mkdir()
    refused(shards, field=shard(shards, 1).name)


def test_a_dangling_link_is_refused(shards: Path) -> None:
    shard(shards, 1).unlink()
    shard(shards, 1).symlink_to("gone.safetensors")
    refused(shards, field=shard(shards, 1).name)


def test_links_into_a_blob_store_load(three_shards: Path, tmp_path: Path) -> None:
    """The layout of Hugging Face's cache: models--x/snapshots/<revision>/name -> ../../blobs/<digest>."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, source in enumerate(sorted(three_shards.iterdir())):
        shutil.copy(source, blobs / f"{number}")
        (snapshot / source.name).symlink_to(f"../../blobs/{number}")
    assert len(load_checkpoint(snapshot).tensors) == 21


def test_nothing_but_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    os.mkfifo(tmp_path / "pytorch_model.bin")
    assert "pickle" in refused(tmp_path, error=UnsupportedModelError).message


def test_no_weights_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    refused(tmp_path, field="model.safetensors")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path)


# --- paths that leave the folder (field case BR-064) ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "/etc/passwd",
        "a\u0000b",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        "C:\\x.safetensors",
        "x" * 10_000 + ".safetensors",
        5,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_value_that_is_no_file_name_is_refused(shards: Path, name: object) -> None:
    edit_index(shards, lambda weights: weights.update({"model.norm.weight": name}))
    error = refused(shards, field=f"{INDEX}.weight_map[model.norm.weight]")
    assert len(error.message) < 300


def test_the_refusal_does_not_tell_whether_the_target_exists(shards: Path, tmp_path: Path) -> None:
    messages = set()
    for target in (tmp_path / "there.safetensors", tmp_path / "not-there.safetensors"):
        if target.name.startswith("there"):
            shutil.copy(shard(shards, 1), target)
        shard(shards, 1).unlink(missing_ok=True)
        shard(shards, 1).symlink_to(target)
        messages.add(refused(shards).message)
    assert len(messages) == 1


def test_a_link_to_outside_is_refused_without_opening_it(shards: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    shard(shards, 1).unlink()
    shard(shards, 1).symlink_to(tmp_path / "pipe")
    assert "leads out of the model folder" in refused(shards).message


@pytest.mark.parametrize("name", [INDEX, "config.json", "model-00001-of-00003.safetensors"])
def test_a_fifo_is_refused_without_waiting(shards: Path, name: str) -> None:
    (shards / name).unlink()
    os.mkfifo(shards / name)
    refused(shards, field=name)


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_a_link_of_a_json_file_to_outside_is_refused(shards: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret.json"
    shutil.move(shards / name, secret)
    (shards / name).symlink_to(secret)
    refused(shards, field=name)
