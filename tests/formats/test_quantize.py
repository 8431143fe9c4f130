"""Quantizing float models: at load, into GGUF, and into compressed-tensors folders that others read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from click.testing import CliRunner
from safetensors.torch import load_file

from fixtures.checkpoints import prefill_logits
from fixtures.hf import hf_logits, tiny
from fixtures.tiny import tiny_llama
from formats import gguf_builder
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.backends.reference import ReferenceBackend
from toque.cli.quantize import command
from toque.errors import ConfigError, UnsupportedModelError
from toque.formats import dequantize, load_checkpoint
from toque.formats.checkpoint import Checkpoint, TensorData
from toque.formats.convert import quantize_model
from toque.formats.gguf import read_gguf
from toque.formats.quantize import as_type, e4m3_codes, eight_bits, four_bits, quantize_checkpoint
from toque.formats.safetensors import read_folder
from toque.formats.safetensors_writer import NewTensor, write_folder
from toque.graph.fuse import fuse
from toque.models import build_graph
from toque.text.tokenizer import load_tokenizer

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 96, 60)]


def logits(checkpoint: Checkpoint, backend: object, tokens: list[int] = TOKENS) -> np.ndarray:
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    executable = backend.lower(graph, checkpoint, BackendOptions(threads=1))  # type: ignore[attr-defined]
    executable.allocate_kv(4)
    return prefill_logits(executable, tokens)


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


# --- numbers --------------------------------------------------------------------------------------------------------


def test_e4m3_rounding_is_torchs() -> None:
    random = np.random.default_rng(1)
    values = np.concatenate(
        [random.normal(0, scale, 4000) for scale in (1e-3, 0.02, 1, 100)]
        + [np.arange(-460, 461) / 7, [0.0, -0.0, 448.0, -448.0, 2.0**-10, 3 * 2.0**-10, 2.0**-9]]
    ).astype(np.float32)
    values = values[np.abs(values) <= 448]
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(e4m3_codes(values), expected)
    np.testing.assert_array_equal(e4m3_codes(np.array([1e9, -1e9], np.float32)), [0x7E, 0xFE])


@pytest.mark.parametrize("spread", ["normal", "outliers", "one-sided"])
def test_four_bit_scales_are_near_the_best_there_are(spread: str) -> None:
    """Against every scale of a fine grid, for each group, by the error that large weights count more in."""
    random = np.random.default_rng(2)
    values = random.normal(0, 0.05, (200, 32)).astype(np.float32)
    if spread == "outliers":
        values[:, 3] *= 8
    if spread == "one-sided":
        values = np.abs(values)
    codes, scales = four_bits(values)
    assert codes.min() >= -8
    assert codes.max() <= 7
    ours = (np.abs(values) * (scales * codes - values) ** 2).sum()
    best = np.full(len(values), np.inf)
    largest = np.abs(values).max(axis=1, keepdims=True)
    for share in np.linspace(-1 / 5, 1 / 5, 401):
        scale = largest * share
        tried = np.clip(np.rint(values / np.where(scale == 0, 1, scale)), -8, 7) * scale
        best = np.minimum(best, (np.abs(values) * (tried - values) ** 2).sum(axis=1))
    assert ours <= 1.05 * best.sum()


def test_q4_0_loses_less_than_the_published_rounding() -> None:
    """The `gguf` package takes the largest value of a block as code -8 and rounds the others."""
    values = np.random.default_rng(7).standard_t(6, (64, 256)).astype(np.float32)
    tensor = TensorData("blk.0.ffn_up.weight", "F32", values.shape, values.view(np.uint8))
    kind = gguf.GGMLQuantizationType.Q4_0
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    ours = gguf.quants.dequantize(np.asarray(as_type(tensor, "Q4_0").raw), kind)
    for weight, share in ((np.ones_like(values), 0.97), (np.abs(values), 0.9)):
        assert (weight * (ours - values) ** 2).sum() < share * (weight * (theirs - values) ** 2).sum()


def test_groups_of_zeros_and_rows_of_nothing_stay_zero() -> None:
    values = np.zeros((3, 32), np.float32)
    for quantize in (four_bits, eight_bits):
        codes, scales = quantize(values)
        assert not codes.any()
        assert np.isfinite(scales).all()


@pytest.mark.parametrize(("kind", "bound"), [("Q8_0", 0.006), ("Q4_0", 0.1), ("FP8", 0.03)])
@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
def test_matrices_keep_their_values(kind: str, bound: float, source: str) -> None:
    values = np.random.default_rng(3).normal(0, 0.1, (70, 96)).astype(np.float32)
    raw = {
        "F32": values.view(np.uint8),
        "F16": values.astype("<f2").view(np.uint8),
        "BF16": (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8),
    }[source]
    order = np.random.default_rng(4).permutation(70)
    tensor = TensorData("blk.0.ffn_up.weight", source, (70, 96), raw, row_order=order)
    assert error(dequantize(as_type(tensor, kind)), dequantize(tensor)) < bound


# --- at load --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "linear", "outer", "bound"),
    [("int8", "Q8_0", "Q8_0", 0.1), ("int4", "Q4_0", "Q8_0", 0.7), ("fp8", "F8_E4M3", "F32", 0.25)],
)
def test_a_model_quantized_as_it_is_loaded(scheme: str, linear: str, outer: str, bound: float) -> None:
    plain = tiny_llama()
    small = quantize_checkpoint(plain, scheme)
    kinds = {name: tensor.dtype for name, tensor in small.tensors.items()}
    assert kinds["blk.1.ffn_down.weight"] == kinds["blk.0.attn_q.weight"] == linear
    assert kinds["token_embd.weight"] == kinds["output.weight"] == outer
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == "F32"
    assert small.quantization == scheme
    wanted = logits(plain, ReferenceBackend())
    reference = logits(small, ReferenceBackend())
    assert error(reference, wanted) < bound
    assert error(logits(small, CpuBackend()), reference) < 0.15


def test_experts_are_quantized_and_their_router_is_not(tmp_path: Path) -> None:
    model = tiny(
        hf.MixtralForCausalLM,
        hf.MixtralConfig,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
    )
    model.save_pretrained(tmp_path)
    plain = load_checkpoint(tmp_path)
    small = quantize_checkpoint(plain, "int8")
    assert small.tensors["blk.0.ffn_up_exps.weight"].dtype == "Q8_0"
    assert small.tensors["blk.0.ffn_gate_inp.weight"].dtype == "F32"
    for name in ("ffn_up_exps", "ffn_down_exps"):
        got, wanted = (dequantize(c.tensors[f"blk.1.{name}.weight"]) for c in (small, plain))
        assert got.shape == wanted.shape
        assert error(got, wanted) < 0.006


def test_rows_that_are_no_whole_blocks_are_kept() -> None:
    tensor = TensorData("blk.0.ffn_up.weight", "F32", (4, 40), np.zeros((4, 160), np.uint8))
    checkpoint = dataclasses.replace(tiny_llama(), tensors={tensor.name: tensor})
    assert quantize_checkpoint(checkpoint, "int4").tensors[tensor.name] is tensor


def test_what_cannot_be_quantized_is_refused_by_name(smollm2: Path) -> None:
    with pytest.raises(ConfigError, match="one of int8, int4, fp8, got 'int3'"):
        quantize_checkpoint(tiny_llama(), "int3")
    with pytest.raises(ConfigError, match="this one is Q4_1"):
        quantize_checkpoint(load_checkpoint(smollm2), "int4")
    with pytest.raises(ConfigError, match="this one is int8"):
        quantize_checkpoint(quantize_checkpoint(tiny_llama(), "int8"), "int8")


# --- GGUF -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "kind"), [("q8_0", "Q8_0"), ("int8", "Q8_0"), ("int4", "Q4_0")])
def test_a_written_gguf_file_is_what_the_gguf_package_reads(scheme: str, kind: str, tmp_path: Path) -> None:
    source = gguf_builder.tiny_llama(tied=False).write(tmp_path / "plain.gguf")
    target = tmp_path / "small.gguf"
    quantize_model(source, target, scheme)
    theirs = gguf.GGUFReader(target)
    ours = read_gguf(target)
    plain = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    assert {tensor.name for tensor in theirs.tensors} == set(plain)
    for tensor in theirs.tensors:
        outer = tensor.name in ("token_embd.weight", "output.weight")
        wanted = "F32" if tensor.name.endswith("norm.weight") else "Q8_0" if outer else kind
        assert tensor.tensor_type.name == wanted
        assert list(tensor.shape) == list(plain[tensor.name].shape)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert error(values, plain[tensor.name].data) < 0.1
    for key, field in gguf.GGUFReader(source).fields.items():
        if key.startswith(("llama.", "tokenizer.", "general.architecture")):
            assert theirs.get_field(key).contents() == field.contents(), key
    assert ours.metadata["general.file_type"] == {"Q8_0": 7, "Q4_0": 2}[kind]
    checkpoint = load_checkpoint(target)
    assert checkpoint.quantization == kind
    small, whole = (
        logits(c, ReferenceBackend(), [1, 2, 3, 40]) for c in (checkpoint, load_checkpoint(source))
    )
    assert error(small, whole) < 0.3


def test_every_kind_of_metadata_survives(tmp_path: Path) -> None:
    source = gguf_builder.tiny_llama()
    kinds = {
        "t.u8": (gguf_builder.U8, 200), "t.i8": (gguf_builder.I8, -5), "t.u16": (gguf_builder.U16, 60000),
        "t.i16": (gguf_builder.I16, -300), "t.i32": (gguf_builder.I32, -70000), "t.bool": (gguf_builder.BOOL, True),
        "t.u64": (gguf_builder.U64, 1 << 40), "t.i64": (gguf_builder.I64, -(1 << 40)),
        "t.f64": (gguf_builder.F64, 0.1), "t.text": (gguf_builder.STRING, "naïve 😀"),
    }  # fmt: skip
    for key, (kind, value) in kinds.items():
        source.set(key, kind, value)
    quantize_model(source.write(tmp_path / "a.gguf"), tmp_path / "b.gguf", "q8_0")
    file = read_gguf(tmp_path / "b.gguf")
    assert {key: (int(file.types[key]), file.metadata[key]) for key in kinds} == kinds


# --- compressed-tensors ---------------------------------------------------------------------------------------------


def meaning(parts: dict[str, torch.Tensor], module: str) -> np.ndarray:
    """A layer's weight by the published layout, with plain torch."""
    scale = parts[f"{module}.weight_scale"].float()
    if f"{module}.weight_packed" not in parts:
        return (parts[f"{module}.weight"].float() * scale).numpy()
    words = parts[f"{module}.weight_packed"].numpy().view(np.uint32)
    rows, columns = parts[f"{module}.weight_shape"].tolist()
    codes = np.zeros((rows, columns), np.int64)
    for position in range(8):
        codes[:, position::8] = (words >> np.uint32(4 * position)) & 15
    return ((codes - 8) * np.repeat(scale.numpy(), columns // scale.shape[1], axis=1)).astype(np.float32)


@pytest.mark.parametrize(("scheme", "bound"), [("int8", 0.01), ("int4", 0.1), ("fp8", 0.03)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_written_folder_has_the_published_layout(
    scheme: str, bound: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny(hf.Qwen2ForCausalLM, hf.Qwen2Config).to(dtype)
    model.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    quantize_model(tmp_path / "plain", tmp_path / "small", scheme)
    config = hf.AutoConfig.from_pretrained(tmp_path / "small")
    assert config.quantization_config["quant_method"] == "compressed-tensors"
    assert (tmp_path / "small" / "tokenizer.json").read_text() == "{}"
    parts = load_file(tmp_path / "small" / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path / "small")
    for name, value in model.state_dict().items():
        if not name.endswith("proj.weight"):
            assert torch.equal(parts[name], value), name
            continue
        module = name.removesuffix(".weight")
        assert parts[f"{module}.weight_scale"].dtype == dtype
        values = meaning(parts, module)
        assert error(values, value.float().numpy()) < bound, name
        if module.endswith("1.mlp.down_proj"):
            ours = dequantize(checkpoint.tensors["blk.1.ffn_down.weight"])
            np.testing.assert_allclose(ours, values, rtol=2**-10, atol=1e-6)
    small = logits(checkpoint, ReferenceBackend())
    assert error(small, hf_logits(model.float(), TOKENS)) < {"int8": 0.05, "int4": 0.4, "fp8": 0.12}[scheme]


def test_shards_and_their_index_read_back(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.random.default_rng(i).integers(0, 256, (3, 40), np.uint8) for i in range(5)}
    tensors = [
        NewTensor(name, "U8", array.shape, array.nbytes, lambda a=array: iter([a[:1], a[1:]]))  # type: ignore[misc]
        for name, array in arrays.items()
    ]
    write_folder(tmp_path, tensors, shard_bytes=250)
    assert len(list(tmp_path.glob("*-of-00003.safetensors"))) == 3
    assert {name: tensor.raw().tolist() for name, tensor in read_folder(tmp_path).items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    source = gguf_builder.tiny_llama().write(tmp_path / "plain.gguf")
    done = CliRunner().invoke(
        command, [str(source), str(tmp_path / "small.gguf"), "--scheme", "int8"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "small.gguf: 0." in done.output
    assert load_checkpoint(tmp_path / "small.gguf").quantization == "Q8_0"


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path, smollm2: Path) -> None:
    source = gguf_builder.tiny_llama().write(tmp_path / "plain.gguf")
    for target, scheme, message in (
        ("small.gguf", "fp8", "one of int8, q8_0, int4, q4_0, got 'fp8'"),
        ("small", "int8", "a folder is written from a folder only"),
        ("plain.gguf", "int8", "exists already"),
    ):
        with pytest.raises(ConfigError, match=message):
            quantize_model(source, tmp_path / target, scheme)
    with pytest.raises(ConfigError, match="is Q4_1 already"):
        quantize_model(smollm2, tmp_path / "small.gguf", "q8_0")
    assert [file.name for file in tmp_path.iterdir()] == ["plain.gguf"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = gguf_builder.tiny_llama().write(tmp_path / "plain.gguf")
    tiny(hf.LlamaForCausalLM, hf.LlamaConfig).save_pretrained(tmp_path / "plain")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    for path, target in ((source, "small.gguf"), (tmp_path / "plain", "small")):
        with pytest.raises(OSError, match="No space"):
            quantize_model(path, tmp_path / target, "int8")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plain", "plain.gguf"]


def test_config_keys_of_the_source_are_kept(tmp_path: Path) -> None:
    tiny(hf.LlamaForCausalLM, hf.LlamaConfig).save_pretrained(tmp_path / "plain")
    quantize_model(tmp_path / "plain", tmp_path / "small", "int4")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "small"))
    quantization = after.pop("quantization_config")
    assert after == before
    assert quantization["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert quantization["ignore"] == ["lm_head"]


def test_the_engine_quantizes_as_it_loads(tmp_path: Path) -> None:
    from toque.engine.loader import load_engine
    from toque.engine.options import EngineOptions

    tiny(hf.LlamaForCausalLM, hf.LlamaConfig).save_pretrained(tmp_path)
    engine = load_engine(
        tmp_path, EngineOptions(quantize="int4", threads=1, kv_blocks=4, backend="reference")
    )
    engine.close()
    with pytest.raises(ConfigError, match="quantize must be int8, int4, fp8 or empty, got 'int5'"):
        EngineOptions(quantize="int5")


@pytest.mark.model
def test_an_encoder_quantized_as_it_is_loaded_embeds_nearly_the_same(minilm: Path) -> None:
    from toque.engine.embedding import load_embedding_engine
    from toque.engine.options import EngineOptions

    tokens = [[101, 1037, 4937, 4150, 102], [101, 2054, 2003, 1996, 3007, 102]]
    vectors = []
    for quantize in ("", "int8"):
        engine = load_embedding_engine(minilm, EngineOptions(quantize=quantize, threads=1))
        vectors.append(engine.embed(tokens))
    cosines = (vectors[0] * vectors[1]).sum(axis=1)
    assert (cosines > 0.99).all()
    assert (cosines < 1.0).any()


def byte_level_tokenizer(path: Path, size: int) -> None:
    """A tokenizer.json of single bytes and two merges, split as SmolLM does."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 4]
    vocab = {text: number for number, text in enumerate([*letters, "th", "the", "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": "{{ 1 }}"})
    )


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_folder_becomes_a_gguf_file(family: str, tmp_path: Path) -> None:
    model = tiny(getattr(hf, f"{family}ForCausalLM"), getattr(hf, f"{family}Config"))
    model.save_pretrained(tmp_path / "plain")
    byte_level_tokenizer(tmp_path / "plain", 96)
    target = tmp_path / "small.gguf"
    done = CliRunner().invoke(
        command, [str(tmp_path / "plain"), str(target), "--scheme", "q8_0"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    small, plain = load_checkpoint(target), load_checkpoint(tmp_path / "plain")
    assert set(small.tensors) == set(plain.tensors)
    for name, tensor in plain.tensors.items():
        assert error(dequantize(small.tensors[name]), dequantize(tensor)) < 0.006, name
    assert error(logits(small, ReferenceBackend()), hf_logits(model, TOKENS)) < 0.05
    ours, theirs = load_tokenizer(small), load_tokenizer(plain)
    for text in ("the other 12 thes", "<|end|>the"):
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special=False)
    assert ours.eos_ids == {94}
    assert small.metadata["tokenizer.chat_template"] == "{{ 1 }}"


def test_a_folder_that_gguf_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    tiny(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=24).save_pretrained(tmp_path / "plain")
    with pytest.raises(UnsupportedModelError, match="a llama model cannot state its sliding_window,"):
        quantize_model(tmp_path / "plain", tmp_path / "small.gguf", "q8_0")
    assert not (tmp_path / "small.gguf").exists()
