"""Pre-quantized checkpoints, written by the tests in each published layout: weights, logits, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from fixtures.checkpoints import prefill_logits
from fixtures.hf import tiny
from formats import quantized as q
from toque import _native
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.backends.reference import ReferenceBackend
from toque.errors import FormatError, ModelError, UnsupportedModelError
from toque.formats import dequantize, load_checkpoint
from toque.formats.checkpoint import Checkpoint, TensorData
from toque.formats.schemes.integers import IntegerWeight
from toque.graph.fuse import fuse
from toque.models import build_graph

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 96, 60)]


def ct(num_bits: int, kind: str = "int", strategy: str = "group", **more: Any) -> dict[str, Any]:
    activations = more.pop("activations", None)
    layout = {"float": "float-quantized"}.get(
        kind, "pack-quantized" if strategy == "group" else "int-quantized"
    )
    weights = {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights | more,
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def gptq(bits: int = 4, group_size: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "sym": True,
    } | more


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}

# name: quantization_config, the test's quantizer, its settings, the type that it becomes
CASES: dict[str, tuple[dict[str, Any], Callable[..., q.Layer], dict[str, Any], str]] = {
    "gptq-4": (gptq(), q.gptq, {}, "Q4_0"),
    "gptq-4-v2": (gptq(checkpoint_format="gptq_v2"), q.gptq, {"v2": True}, "Q4_0"),
    "gptq-4-asymmetric": (gptq(sym=False), q.gptq, {"symmetric": False}, "Q4_1"),
    "gptq-4-act-order": (gptq(desc_act=True), q.gptq, {"act_order": True}, "Q4_0"),
    "gptq-4-act-order-asymmetric": (
        gptq(desc_act=True, sym=False), q.gptq, {"act_order": True, "symmetric": False}, "Q4_1",
    ),
    "gptq-8-act-order": (gptq(8, desc_act=True), q.gptq, {"bits": 8, "act_order": True}, "Q8_0"),
    "gptq-4-act-order-small-groups": (
        gptq(group_size=16, desc_act=True), q.gptq, {"group_size": 16, "act_order": True}, "F16",
    ),
    "gptq-4-whole-columns": (gptq(group_size=-1), q.gptq, {"group_size": 1 << 20}, "Q4_0"),
    "gptq-4-small-groups": (gptq(group_size=16), q.gptq, {"group_size": 16}, "F16"),
    "gptq-8": (gptq(8), q.gptq, {"bits": 8}, "Q8_0"),
    "gptq-8-asymmetric": (gptq(8, sym=False), q.gptq, {"bits": 8, "symmetric": False}, "Q8_Z"),
    "gptq-8-act-order-asymmetric": (
        gptq(8, desc_act=True, sym=False), q.gptq, {"bits": 8, "act_order": True, "symmetric": False}, "Q8_Z",
    ),
    "awq": (AWQ, q.awq, {}, "Q4_1"),
    "w4a16": (ct(4, group_size=32), q.packed, {}, "Q4_0"),
    "w4a16-asymmetric": (ct(4, symmetric=False), q.packed, {"symmetric": False}, "Q4_1"),
    "w4a16-act-order": (ct(4, actorder="group"), q.packed, {"act_order": True}, "Q4_0"),
    "w8a16-asymmetric": (ct(8, symmetric=False), q.packed, {"bits": 8, "group_size": 32, "symmetric": False}, "Q8_Z"),
    "w8a16": (ct(8), q.packed, {"bits": 8, "group_size": 0}, "Q8_0"),
    "w8a8": (ct(8, strategy="channel", activations={"num_bits": 8}), q.int8, {}, "Q8_0"),
    "w8a8-asymmetric": (ct(8, strategy="channel", symmetric=False), q.int8, {"symmetric": False}, "Q8_Z"),
    "w8a8-tensor": (ct(8, strategy="tensor"), q.int8, {"whole": True}, "Q8_0"),
    "ct-fp8-tensor": (ct(8, "float", "tensor"), q.fp8, {"block": None}, "F8_E4M3"),
    "ct-fp8-channel": (ct(8, "float", "channel"), q.fp8, {"block": (1, 0)}, "F8_E4M3"),
    "ct-fp8-block": (ct(8, "float", "block", block_structure=[16, 32]), q.fp8, {"block": (16, 32)}, "F8_E4M3_32"),
    "ct-fp8-group": (ct(8, "float", "group", group_size=32), q.fp8, {"block": (1, 32)}, "F8_E4M3_32"),
    "ct-fp8-uneven-blocks": (
        ct(8, "float", "block", block_structure=[16, 40]), q.fp8, {"block": (16, 40)}, "F16",
    ),
    "fp8-block": (FP8, q.fp8, {"block": (16, 32), "name": "weight_scale_inv"}, "F8_E4M3_32"),
    "fp8-block-128": (
        FP8 | {"weight_block_size": [16, 128]}, q.fp8, {"block": (16, 128), "name": "weight_scale_inv"}, "F8_E4M3",
    ),
    "fp8-uneven-blocks": (
        FP8 | {"weight_block_size": [48, 40]}, q.fp8, {"block": (48, 40), "name": "weight_scale_inv"}, "F16",
    ),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, q.fp8, {"block": None}, "F8_E4M3"),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    tiny(hf.LlamaForCausalLM, hf.LlamaConfig).save_pretrained(folder)
    return folder


def quantized(name: str, plain: Path, folder: Path, **more: Any) -> dict[str, np.ndarray]:
    config, quantize, settings, _ = CASES[name]
    return q.quantize_folder(plain, folder, config, lambda weight: quantize(weight, **settings), **more)


def logits(checkpoint: Checkpoint, backend: Any) -> np.ndarray:
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    executable = backend.lower(graph, checkpoint, BackendOptions(threads=1))
    executable.allocate_kv(4)
    return prefill_logits(executable, TOKENS)


def hidden_units(checkpoint: Checkpoint, layer: int) -> Any:
    """The order that a feed-forward's hidden units were given: act-order sorts them by the groups of down's columns."""
    up = checkpoint.tensors[f"blk.{layer}.ffn_up.weight"]
    assert checkpoint.tensors[f"blk.{layer}.ffn_down.weight"].column_order is None
    return slice(None) if up.row_order is None else up.row_order


@pytest.mark.parametrize("name", CASES)
def test_weights_and_logits_equal_those_of_the_same_model_in_float(
    name: str, plain: Path, tmp_path: Path
) -> None:
    meanings = quantized(name, plain, tmp_path / "quantized")
    ours = load_checkpoint(tmp_path / "quantized")
    assert ours.quantization.endswith(", held as F16") == (CASES[name][3] == "F16")
    for part, theirs in (("attn_output", "self_attn.o_proj"), ("ffn_down", "mlp.down_proj")):
        tensor, expected = ours.tensors[f"blk.1.{part}.weight"], meanings[f"model.layers.1.{theirs}.weight"]
        assert tensor.dtype == CASES[name][3]
        units = hidden_units(ours, layer=1) if part == "ffn_down" else slice(None)
        # What float16 rounds away: of the scale, of the whole weight, or of scale * zero point (at most 15 scales).
        step = np.abs(expected).max() / 2**10
        np.testing.assert_allclose(
            dequantize(tensor), expected[:, units], rtol=2**-11, atol=step if tensor.dtype == "Q4_1" else 1e-7
        )

    folder = shutil.copytree(plain, tmp_path / "float")
    save_file({key: torch.from_numpy(value) for key, value in meanings.items()}, folder / "model.safetensors")
    wanted = logits(load_checkpoint(folder), ReferenceBackend())
    # The reference differs by float16's rounding, the cpu backend rounds activations to 8 bits as well.
    for backend, share in ((ReferenceBackend(), 3e-3), (CpuBackend(), 0.04)):
        error = logits(ours, backend) - wanted
        assert np.linalg.norm(error) < share * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3] == "Q8_Z"])
def test_codes_of_8_bits_with_zero_points_lose_nothing(name: str, plain: Path, tmp_path: Path) -> None:
    """Scale and zero point are kept apart: their product in float16, as in Q4_1, would be off by up to 1/16 step."""
    meanings = quantized(name, plain, tmp_path / "model")
    ours = load_checkpoint(tmp_path / "model")
    for layer in range(2):
        for part, theirs in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
            expected = meanings[f"model.layers.{layer}.{theirs}.weight"]
            units = hidden_units(ours, layer) if part == "ffn_down" else slice(None)
            np.testing.assert_array_equal(
                dequantize(ours.tensors[f"blk.{layer}.{part}.weight"]), expected[:, units]
            )


def test_zero_points_of_8_bits_reach_from_0_to_256() -> None:
    """256 is what GPTQ means by a stored 255; no byte holds it, and 0 has a sign of its own in float16."""
    codes = np.arange(3 * 64, dtype=np.uint8).reshape(3, 64) + np.uint8(64)
    zeros = np.array([[0, 256], [255, 1], [128, 127]], np.int16)
    scales = np.array([[0.5, 0.25], [2.0**-14, -0.5], [1.0, 3.0]], np.float32)
    weight = IntegerWeight(
        "w", 8, (3, 64), 32, lambda a, b: codes[a:b], lambda a, b: scales[a:b], lambda a, b: zeros[a:b]
    )
    matrix = weight.matrix()
    assert matrix.dtype == "Q8_Z"
    tensor = TensorData("w", matrix.dtype, matrix.shape, matrix.rows)
    meaning = (codes.astype(np.float32) - np.repeat(zeros, 32, axis=1)) * np.repeat(scales, 32, axis=1)
    np.testing.assert_array_equal(dequantize(tensor), meaning)
    arena = _native.Arena(1 << 16)
    packed = _native.pack(arena, "Q8_Z", np.ascontiguousarray(matrix.rows), 64)
    for isa in _native.isas():
        np.testing.assert_array_equal(_native.embed(isa, packed, np.arange(3, dtype=np.int32)), meaning)


@pytest.mark.parametrize("name", ["gptq-4", "awq", "w4a16", "w8a8", "ct-fp8-channel", "fp8-block"])
def test_layers_left_in_float_are_read_as_they_are(name: str, plain: Path, tmp_path: Path) -> None:
    meanings = quantized(name, plain, tmp_path / "model", skip=("q_proj", "down_proj"))
    ours = load_checkpoint(tmp_path / "model").tensors
    for layer in range(2):
        for part, theirs in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
            tensor = ours[f"blk.{layer}.{part}.weight"]
            assert tensor.dtype == "F32"
            expected = meanings[f"model.layers.{layer}.{theirs}.weight"]
            np.testing.assert_array_equal(dequantize(tensor), expected)
    assert ours["output.weight"].dtype == "F32"
    assert ours["blk.0.attn_v.weight"].dtype == CASES[name][3]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_without_one_of_its_tensors_is_refused(name: str, plain: Path, tmp_path: Path) -> None:
    """Field case BR-063, for the parts of a quantized weight."""
    quantized(name, plain, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    module = "model.layers.1.mlp.up_proj."
    for part in sorted(key for key in tensors if key.startswith(module)):
        if part.endswith("g_idx") or part.endswith("weight_zero_point"):
            continue  # without these the weight is another one, and as well formed
        save_file({key: value for key, value in tensors.items() if key != part}, file)
        with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\."):
            load_checkpoint(tmp_path / "model")


def in_shards(folder: Path, count: int = 3) -> list[Path]:
    """Cut ``model.safetensors`` into shards, the parts of a layer apart from each other."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = [folder / f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::count]}, file)
    weight_map = {name: files[i % count].name for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


@pytest.mark.parametrize("name", ["gptq-4", "awq", "w4a16", "w8a8", "fp8-block"])
def test_shards_are_whole_or_refused(name: str, plain: Path, tmp_path: Path) -> None:
    """Field case BR-063: the parts of one weight may lie in several shards, and none of these may be missing."""
    folder = tmp_path / "model"
    quantized(name, plain, folder)
    whole = dequantize(load_checkpoint(folder).tensors["blk.0.ffn_up.weight"])
    second = in_shards(folder)[1]
    (folder / "stray.safetensors").write_bytes(b"no tensors at all")
    np.testing.assert_array_equal(dequantize(load_checkpoint(folder).tensors["blk.0.ffn_up.weight"]), whole)
    second.write_bytes(second.read_bytes()[:-40])
    with pytest.raises(FormatError, match="model-00002-of-00003"):
        load_checkpoint(folder)
    second.unlink()
    with pytest.raises(FormatError, match=r"model-00002-of-00003\.safetensors: the file is missing"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["gptq-4-asymmetric", "awq", "w4a16-asymmetric", "w8a8", "ct-fp8-block", "fp8-block"]
)
def test_a_tensor_of_another_shape_is_refused_by_name(name: str, plain: Path, tmp_path: Path) -> None:
    quantized(name, plain, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    module = "model.layers.0.self_attn.o_proj."
    for part in sorted(key for key in tensors if key.startswith(module)):
        whole = tensors[part]
        save_file({**tensors, part: whole[: len(whole) - 1].contiguous()}, file)
        with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.o_proj\."):
            load_checkpoint(tmp_path / "model")


def test_nothing_is_converted_before_it_is_asked_for(plain: Path, tmp_path: Path, monkeypatch: Any) -> None:
    quantized("gptq-4", plain, tmp_path / "model")
    calls: list[int] = []
    monkeypatch.setattr("toque.formats.schemes.gptq.unpack_words", lambda words, bits: calls.append(bits))
    checkpoint = load_checkpoint(tmp_path / "model")
    assert checkpoint.parameters > 0
    assert checkpoint.tensors["blk.0.ffn_up.weight"].nbytes == 96 * 64 // 32 * 18
    assert calls == []


def test_large_matrices_are_converted_in_pieces(plain: Path, tmp_path: Path, monkeypatch: Any) -> None:
    quantized("awq", plain, tmp_path / "model")
    tensor = load_checkpoint(tmp_path / "model").tensors["blk.0.ffn_up.weight"]
    whole = np.asarray(tensor.raw)
    monkeypatch.setattr("toque.formats.checkpoint._CHUNK_BYTES", 1)
    np.testing.assert_array_equal(np.asarray(tensor.raw), whole)
    np.testing.assert_array_equal(np.asarray(tensor.raw[5:42]), whole[5:42])


def test_fused_matrices_are_cut_where_they_are_quantized(tmp_path: Path) -> None:
    tiny(hf.Phi3ForCausalLM, hf.Phi3Config, pad_token_id=0).save_pretrained(tmp_path / "plain")
    meanings = quantized("gptq-4", tmp_path / "plain", tmp_path / "model")
    ours = load_checkpoint(tmp_path / "model").tensors
    qkv = np.concatenate([dequantize(ours[f"blk.1.attn_{part}.weight"]) for part in "qkv"])
    np.testing.assert_allclose(qkv, meanings["model.layers.1.self_attn.qkv_proj.weight"], rtol=2**-11)


REFUSED = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'.*gptq"),
    "no method": ({"bits": 4}, "quant_method: is missing"),
    "gptq bits": (gptq(3), r"quantization_config\.bits: .*3 bits"),
    "gptq without bits": ({"quant_method": "gptq", "group_size": 32}, r"bits: is missing"),
    "gptq group": (gptq(group_size=0), "group_size: must be -1 or between 1"),
    "gptq text": (gptq(group_size="big"), "group_size: must be an integer, got 'big'"),
    "gptq marlin": (gptq(checkpoint_format="marlin"), "'marlin' is not one of gptq"),
    "gptq dynamic": (gptq(dynamic={"+:.*up.*": {"bits": 8}}), "differ by module"),
    "awq gemv": (AWQ | {"version": "gemv"}, "version: 'gemv'"),
    "awq bits": (AWQ | {"bits": 3}, "AWQ with 3 bits"),
    "awq without zeros": (AWQ | {"zero_point": False}, "without zero points"),
    "fp8 e5m2": (FP8 | {"fmt": "e5m2"}, "'e5m2'; Toque reads e4m3"),
    "fp8 block": (FP8 | {"weight_block_size": [128]}, "weight_block_size: must be two sizes"),
    "ct nvfp4": (ct(4) | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' is not supported"),
    "ct bits": (ct(2), "int weights of 2 bits"),
    "ct float 4": (ct(4, "float"), "float weights of 4 bits"),
    "ct sparse": (ct(4) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    "ct transforms": (ct(4) | {"transform_config": {"config_groups": {}}}, "transforms are not supported"),
    "ct without groups": ({"quant_method": "compressed-tensors"}, "config_groups: is missing"),
    "ct strategy": (ct(8, strategy="tensor_group"), "strategy: 'tensor_group' is not one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_schemes_are_refused_by_name_before_any_weight(name: str, plain: Path, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    values = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises((UnsupportedModelError, FormatError), match=message):
        load_checkpoint(tmp_path)


def test_a_quantized_checkpoint_without_its_configuration_is_refused(plain: Path, tmp_path: Path) -> None:
    quantized("gptq-4", plain, tmp_path / "model")
    shutil.copy(plain / "config.json", tmp_path / "model" / "config.json")
    with pytest.raises(FormatError, match=r"quantization_config: is missing, but model\.layers"):
        load_checkpoint(tmp_path / "model")


def test_zero_points_that_contradict_the_configuration_are_refused(plain: Path, tmp_path: Path) -> None:
    quantized("gptq-4-asymmetric", plain, tmp_path / "model")
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    values["quantization_config"]["sym"] = True
    (tmp_path / "model" / "config.json").write_text(json.dumps(values))
    with pytest.raises(FormatError, match=r"qzeros: the configuration says sym"):
        dequantize(load_checkpoint(tmp_path / "model").tensors["blk.0.ffn_up.weight"])


def test_every_e4m3_byte_means_what_torch_says() -> None:
    from toque.formats.e4m3 import E4M3

    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, expected)


@pytest.mark.parametrize("name", ["gptq-4", "gptq-4-act-order", "awq", "fp8-block"])
def test_experts_are_read_where_they_are_quantized(name: str, tmp_path: Path) -> None:
    model = tiny(
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    model.save_pretrained(tmp_path / "plain")
    meanings = quantized(name, tmp_path / "plain", tmp_path / "model")
    ours = load_checkpoint(tmp_path / "model")
    down = ours.tensors["blk.1.ffn_down_exps.weight"]
    assert down.shape == (4, 64, 32)
    # One block of FP8 scales is as wide as these matrices, and so is one group.
    assert down.dtype == ("F8_E4M3" if name == "fp8-block" else CASES[name][3])
    up = ours.tensors["blk.1.ffn_up_exps.weight"]
    assert up.dtype == CASES[name][3]
    for tensor, theirs in ((down, "down_proj"), (up, "up_proj")):
        expected = np.stack([meanings[f"model.layers.1.mlp.experts.{i}.{theirs}.weight"] for i in range(4)])
        step = np.abs(expected).max() / 2**10
        np.testing.assert_allclose(dequantize(tensor), expected, rtol=2**-11, atol=step)
    assert np.isfinite(logits(ours, ReferenceBackend())).all()


def variants(value: Any) -> Any:
    """The configuration with one value at a time replaced by an odd one, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            for odd in (None, "odd", -1, 0, 3.5, True, [], {}, [0, 0], 1 << 70):
                yield value | {key: odd}
            for changed in variants(inner):
                yield value | {key: changed}


@pytest.mark.parametrize("name", ["gptq-4", "awq", "w4a16", "w8a8", "ct-fp8-block", "fp8-block"])
def test_odd_configurations_load_or_are_refused(name: str, plain: Path, tmp_path: Path) -> None:
    """Never another error than a ModelError, whatever a value of the configuration is."""
    quantized(name, plain, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    values = json.loads(file.read_text())
    refused = 0
    for config in variants(values["quantization_config"]):
        file.write_text(json.dumps(values | {"quantization_config": config}))
        try:
            tensors = load_checkpoint(tmp_path / "model").tensors
            dequantize(tensors["blk.0.attn_k.weight"])
        except ModelError:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize("name", ["gptq-4", "gptq-4-act-order", "w8a8", "fp8-block"])
def test_an_output_matrix_may_be_quantized_too(name: str, plain: Path, tmp_path: Path) -> None:
    meanings = quantized(name, plain, tmp_path / "model", suffix=("proj.weight", "lm_head.weight"))
    tensor = load_checkpoint(tmp_path / "model").tensors["output.weight"]
    assert tensor.dtype == CASES[name][3]
    np.testing.assert_allclose(dequantize(tensor), meanings["lm_head.weight"], rtol=2**-11, atol=1e-7)


def test_the_older_key_of_compressed_tensors_is_read(plain: Path, tmp_path: Path) -> None:
    meanings = quantized("w8a8", plain, tmp_path / "model", key="compression_config")
    tensor = load_checkpoint(tmp_path / "model").tensors["blk.0.ffn_up.weight"]
    np.testing.assert_allclose(dequantize(tensor), meanings["model.layers.0.mlp.up_proj.weight"], rtol=2**-11)
