"""The three real files: everything our reader says equals what the `gguf` package says, weights bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from toque.formats import dequantize, load_checkpoint
from toque.formats.gguf import read_gguf
from toque.formats.strings import StringArray

pytestmark = pytest.mark.model


@pytest.fixture(
    scope="module",
    params=[
        "smollm2",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("qwen", marks=pytest.mark.slow),
    ],
)
def path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def theirs(path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)


def test_metadata_equals_the_gguf_package(path: Path, theirs: gguf.GGUFReader) -> None:
    ours = read_gguf(path).metadata
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours) == list(fields)
    for key, field in fields.items():
        value = ours[key]
        if isinstance(value, StringArray):
            assert list(value) == [bytes(field.parts[i]).decode() for i in field.data]
        elif isinstance(value, np.ndarray):
            assert value.tolist() == field.contents()
        else:
            assert value == field.contents()
            assert type(value) is type(field.contents())


def test_tensor_table_equals_the_gguf_package(path: Path, theirs: gguf.GGUFReader) -> None:
    ours = read_gguf(path)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.type.name == tensor.tensor_type.name
        assert entry.dims == tuple(tensor.shape.tolist())
        assert (entry.start, entry.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert np.array_equal(ours.bytes_of(entry).reshape(-1), tensor.data.reshape(-1).view(np.uint8))


def test_weights_equal_the_gguf_package_bit_for_bit(path: Path, theirs: gguf.GGUFReader) -> None:
    checkpoint = load_checkpoint(path)
    seen: dict[str, int] = {}
    for tensor in theirs.tensors:
        kind = tensor.tensor_type.name
        # A few of each type; big ones by their first rows only.
        if seen.get(kind, 0) >= 3:
            continue
        seen[kind] = seen.get(kind, 0) + 1
        data = checkpoint.tensors[tensor.name]
        rows = min(256, data.raw.shape[0])
        expected = gguf.quants.dequantize(tensor.data[:rows], tensor.tensor_type)
        if data.row_order is not None:
            assert np.array_equal(np.sort(data.row_order), np.arange(data.shape[0]))
        piece = type(data)(data.name, data.dtype, (rows, *data.shape[1:]), data.raw[:rows])
        if len(data.shape) == 1:
            piece, expected = data, np.asarray(tensor.data)
        assert np.array_equal(dequantize(piece).view(np.uint32), expected.astype(np.float32).view(np.uint32))
    assert set(seen) == {t.tensor_type.name for t in theirs.tensors}


def test_config_of_smollm2(smollm2: Path) -> None:
    checkpoint = load_checkpoint(smollm2)
    config = checkpoint.config
    assert (config.architecture, config.n_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.ffn_size) == (9, 3, 64, 1536)
    assert (config.vocab_size, config.context_length, config.rope_theta) == (49152, 8192, 100_000.0)
    assert config.tied_embeddings
    assert checkpoint.quantization == "Q4_1"
    assert checkpoint.parameters == 134_515_008


def test_config_of_gemma3(gemma3: Path) -> None:
    config = load_checkpoint(gemma3).config
    assert (config.architecture, config.n_layers, config.head_dim) == ("gemma3", 18, 256)
    assert (config.sliding_window, config.sliding_window_pattern) == (512, 6)
    assert (config.rope_theta, config.rope_local_theta) == (1_000_000.0, 10_000.0)
    assert config.embedding_scale == pytest.approx(25.2982, abs=1e-4)
    assert config.attention_scale == 1 / 16
    assert config.hidden_act == "gelu_tanh"
    assert config.tied_embeddings


def test_config_of_qwen(qwen: Path) -> None:
    checkpoint = load_checkpoint(qwen)
    assert (checkpoint.config.architecture, checkpoint.config.head_dim) == ("qwen2", 64)
    assert not checkpoint.config.tied_embeddings
    assert checkpoint.tensors["blk.0.attn_q.bias"].shape == (896,)
    assert checkpoint.tensors["blk.0.attn_q.weight"].row_order is None
