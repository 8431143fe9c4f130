"""The three real files: everything our reader says equals what the `gguf` package says, weights bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from formats.make_golden_files import GOLDEN, digest
from toque.formats import dequantize, load_checkpoint
from toque.formats.gguf import GGUFFile, read_gguf
from toque.formats.strings import StringArray

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", params=["smollm2", "gemma3", "qwen"])
def path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def file(path: Path) -> GGUFFile:
    return read_gguf(path)


@pytest.fixture(scope="module")
def golden(path: Path) -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())[path.name]


def plain(value: Any) -> Any:
    if isinstance(value, StringArray):
        return list(value)
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_metadata_equals_the_gguf_package(file: GGUFFile, golden: dict[str, Any]) -> None:
    assert len(file.metadata) == golden["n_metadata"]
    assert digest([key, plain(value)] for key, value in file.metadata.items()) == golden["metadata"]


def test_tensor_table_equals_the_gguf_package(file: GGUFFile, golden: dict[str, Any]) -> None:
    assert len(file.tensors) == golden["n_tensors"]
    table = ([t.name, t.type.name, list(t.dims), t.start, t.nbytes] for t in file.tensors.values())
    assert digest(table) == golden["tensors"]


def test_weights_equal_the_gguf_package_bit_for_bit(
    path: Path, file: GGUFFile, golden: dict[str, Any]
) -> None:
    """Three tensors of each type, of large ones the first rows."""
    tensors = load_checkpoint(path).tensors
    seen: dict[str, int] = {}
    for name, entry in file.tensors.items():
        kind = entry.type.name
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] > 3:
            continue
        stored = file.bytes_of(entry)
        rows = min(256, stored.shape[0])
        data = tensors[name]
        shape = data.shape if len(data.shape) == 1 else (rows, data.shape[1])
        # In the file's order of rows: what `row_order` does has its own tests.
        piece = dataclasses.replace(data, shape=shape, raw=data.raw[:rows], row_order=None)
        expected = gguf.quants.dequantize(stored[:rows], gguf.GGMLQuantizationType[kind]).reshape(shape)
        assert np.array_equal(dequantize(piece).view(np.uint32), expected.view(np.uint32))
    assert sorted(seen) == golden["types"]


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
