"""Writes tiny GGUF files for tests, right or wrong in any field one likes.

::

    path = tiny_llama(tmp_path).write(tmp_path / "tiny.gguf")

    bad = tiny_llama(tmp_path)
    bad.tensors[1].offset = 7
    bad.write(...)

Everything is packed as given: nothing is checked, and ``version``, counts, lengths, types and offsets can all be
overridden, so a hostile file is one assignment away from a good one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    F64: "d",
}

TYPE_F32, TYPE_F16, TYPE_Q4_0, TYPE_Q4_1, TYPE_Q8_0, TYPE_BF16 = 0, 1, 2, 3, 8, 30


@dataclass
class Array:
    """An array value. ``length`` overrides the count that is written."""

    type: int
    values: Sequence[Any]
    length: int | None = None


@dataclass
class Raw:
    """Bytes written as they are in place of a value."""

    data: bytes


@dataclass
class Entry:
    key: str | bytes
    type: int
    value: Any


@dataclass
class Tensor:
    """``dims`` in GGUF's order, fastest first. ``offset`` None: the next aligned place. ``n_dims`` None: len(dims)."""

    name: str | bytes
    dims: tuple[int, ...]
    data: bytes
    type: int = TYPE_F32
    offset: int | None = None
    n_dims: int | None = None


def string(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


@dataclass
class GGUF:
    metadata: list[Entry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_metadata: int | None = None
    alignment: int = 32

    def __getitem__(self, key: str) -> Entry:
        return next(entry for entry in self.metadata if entry.key == key)

    def set(self, key: str, type: int, value: Any) -> GGUF:
        self.metadata = [entry for entry in self.metadata if entry.key != key] + [Entry(key, type, value)]
        return self

    def drop(self, *keys: str) -> GGUF:
        self.metadata = [entry for entry in self.metadata if entry.key not in keys]
        return self

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def drop_tensor(self, name: str) -> GGUF:
        self.tensors.remove(self.tensor(name))
        return self

    def header(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_metadata = len(self.metadata) if self.n_metadata is None else self.n_metadata
        out = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_metadata)
        for entry in self.metadata:
            out += string(entry.key) + struct.pack("<I", entry.type) + _value(entry.type, entry.value)
        place = 0
        for tensor in self.tensors:
            if tensor.offset is None:
                tensor = Tensor(tensor.name, tensor.dims, tensor.data, tensor.type, place, tensor.n_dims)
            n_dims = len(tensor.dims) if tensor.n_dims is None else tensor.n_dims
            out += string(tensor.name) + struct.pack("<I", n_dims)
            out += struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims)
            out += struct.pack("<IQ", tensor.type, tensor.offset)
            place = _aligned(place + len(tensor.data), self.alignment)
        return out

    def build(self) -> bytes:
        out = self.header()
        out += bytes(_aligned(len(out), self.alignment) - len(out))
        for tensor in self.tensors:
            out += tensor.data + bytes(_aligned(len(tensor.data), self.alignment) - len(tensor.data))
        return out

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


def _value(type: int, value: Any) -> bytes:
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, Array):
        length = len(value.values) if value.length is None else value.length
        out = [struct.pack("<IQ", value.type, length)]
        if value.type in _FORMATS:
            out.append(struct.pack(f"<{len(value.values)}{_FORMATS[value.type]}", *value.values))
        else:
            out += [_value(value.type, item) for item in value.values]
        return b"".join(out)
    if type == STRING:
        return string(value)
    return struct.pack("<" + _FORMATS[type], value)


def q4_1(rng: np.random.Generator, rows: int, columns: int) -> bytes:
    """Random Q4_1 blocks with small scales."""
    n = rows * columns // 32
    blocks = np.empty((n, 20), np.uint8)
    scales = np.stack([rng.uniform(0.01, 0.03, n), rng.uniform(-0.2, -0.1, n)], axis=1).astype("<f2")
    blocks[:, :4] = scales.view(np.uint8)
    blocks[:, 4:] = rng.integers(0, 256, (n, 16), dtype=np.uint8)
    return blocks.tobytes()


def tiny_llama(
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 96,
    vocab: int = 64,
    tied: bool = True,
    architecture: str = "llama",
    seed: int = 0,
    weights: Mapping[str, np.ndarray] | None = None,
) -> GGUF:
    """A complete random llama with a toy byte-level vocabulary; matrices are F32 unless ``weights`` replaces them."""
    rng = np.random.default_rng(seed)
    file = GGUF()
    prefix = f"{architecture}."
    file.set("general.architecture", STRING, architecture)
    for key, value in {
        "block_count": n_layers,
        "context_length": 256,
        "embedding_length": hidden,
        "feed_forward_length": ffn,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "vocab_size": vocab,
    }.items():
        file.set(prefix + key, U32, value)
    file.set(prefix + "rope.freq_base", F32, 10_000.0)
    file.set(prefix + "attention.layer_norm_rms_epsilon", F32, 1e-5)
    file.set("tokenizer.ggml.model", STRING, "gpt2")
    file.set("tokenizer.ggml.pre", STRING, "smollm")
    file.set("tokenizer.ggml.tokens", ARRAY, Array(STRING, [chr(33 + i) for i in range(vocab)]))
    file.set("tokenizer.ggml.token_type", ARRAY, Array(I32, [1] * vocab))
    file.set("tokenizer.ggml.merges", ARRAY, Array(STRING, []))
    file.set("tokenizer.ggml.eos_token_id", U32, 0)

    def add(name: str, *shape: int) -> None:
        value = None if weights is None else weights.get(name)
        if value is None:
            value = np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.2, shape)
        array = np.ascontiguousarray(value, "<f4")
        file.tensors.append(Tensor(name, tuple(reversed(array.shape)), array.tobytes()))

    add("token_embd.weight", vocab, hidden)
    add("output_norm.weight", hidden)
    if not tied:
        add("output.weight", vocab, hidden)
    for layer in range(n_layers):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", hidden)
        add(block + "attn_q.weight", n_heads * head_dim, hidden)
        add(block + "attn_k.weight", n_kv_heads * head_dim, hidden)
        add(block + "attn_v.weight", n_kv_heads * head_dim, hidden)
        add(block + "attn_output.weight", hidden, n_heads * head_dim)
        add(block + "ffn_norm.weight", hidden)
        add(block + "ffn_gate.weight", ffn, hidden)
        add(block + "ffn_up.weight", ffn, hidden)
        add(block + "ffn_down.weight", hidden, ffn)
    return file
