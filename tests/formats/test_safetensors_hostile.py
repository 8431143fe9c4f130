"""Safetensors headers that are damaged or lie: refused by name, before anything of the file is used."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import transformers as hf

from fixtures.folders import LLAMA, refused
from fixtures.hf import tiny
from toque.errors import ModelError, UnsupportedModelError
from toque.formats import load_checkpoint


def write_header(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype: object = "F32", shape: object = (2, 2), offsets: object = (0, 16)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "field"),
    [
        (b"[]", b"", "model.safetensors.header"),
        (b"\xff\xff", b"", "model.safetensors.header"),
        (b'{"a":' * 50_000, b"", "model.safetensors.header"),
        (b'{"a": 1, "a": 2}', b"", "model.safetensors.header"),
        ({"a": 5}, b"", "model.safetensors.header[a]"),
        ({"a": entry(shape=[2, -2])}, bytes(16), "model.safetensors.header[a].shape"),
        ({"a": entry(shape=[2, 2.0])}, bytes(16), "model.safetensors.header[a].shape"),
        ({"a": entry(shape=[1] * 9)}, bytes(16), "model.safetensors.header[a].shape"),
        ({"a": entry(shape=[2**33, 2**33])}, bytes(16), "model.safetensors.header[a].shape"),
        ({"a": entry(shape=[2, 3])}, bytes(16), "model.safetensors.header[a].shape"),
        ({"a": entry(offsets=[0, 17])}, bytes(16), "model.safetensors.header[a].data_offsets"),
        ({"a": entry(offsets=[16, 0])}, bytes(16), "model.safetensors.header[a].data_offsets"),
        ({"a": entry(offsets=[0, 2**60])}, bytes(16), "model.safetensors.header[a].data_offsets"),
        ({"a": entry(offsets=[-16, 0])}, bytes(16), "model.safetensors.header[a].data_offsets"),
        ({"a": entry(offsets=[0])}, bytes(16), "model.safetensors.header[a].data_offsets"),
        ({"a": entry(), "b": entry(offsets=[8, 24])}, bytes(24), "model.safetensors.header[b].data_offsets"),
        ({"a": entry(), "b": entry(offsets=[20, 36])}, bytes(36), "model.safetensors.header[b].data_offsets"),
        ({"a": entry()}, bytes(17), "model.safetensors.header"),
        ({}, bytes(1), "model.safetensors.header"),
    ],
)
def test_a_damaged_header_names_the_field(tmp_path: Path, header: object, data: bytes, field: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_header(tmp_path / "model.safetensors", header, data)
    refused(tmp_path, field=field)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 3])
def test_a_header_length_beyond_the_file(tmp_path: Path, length: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_header(tmp_path / "model.safetensors", {"a": entry()}, bytes(16), length)
    refused(tmp_path)


@pytest.mark.parametrize("dtype", ["F128", 3, None])
def test_an_unknown_dtype_is_refused(tmp_path: Path, dtype: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_header(tmp_path / "model.safetensors", {"a": entry(dtype=dtype)}, bytes(16))
    refused(tmp_path, error=UnsupportedModelError)


def test_a_weight_of_another_dtype_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_header(tmp_path / "model.safetensors", {"model.norm.weight": entry("I32", [4])}, bytes(16))
    assert "model.norm.weight" in refused(tmp_path, error=UnsupportedModelError).message


def test_random_damage_never_ends_in_another_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny(hf.LlamaForCausalLM, hf.LlamaConfig).save_pretrained(folder)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    rng = random.Random(3)
    loaded = 0
    for _ in range(300):
        mutated = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            mutated[rng.randrange(end)] = rng.choice(b'0159-.,:[]{}" \x00\xff')
        path.write_bytes(mutated)
        try:
            load_checkpoint(folder)
            loaded += 1
        except ModelError:
            pass
    assert loaded < 300
