"""`toque quantize`: a model file or folder in, a smaller one that other engines load as well out.

A GGUF file becomes a GGUF file with Q8_0 or Q4_0 weights; a safetensors folder becomes such a file, or a folder in
compressed-tensors layout (int8: W8A8 by channel, int4: W4A16 in groups of 32, fp8: e4m3 by channel), with its
tokenizer beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toque.errors import ConfigError
from toque.formats.checkpoint import Bytes, Checkpoint, TensorData
from toque.formats.dequant import dequantize
from toque.formats.folder import inside, read_json
from toque.formats.gguf import ValueType
from toque.formats.gguf_export import export_metadata, export_tensors
from toque.formats.gguf_model import merge_parts, read_parts
from toque.formats.gguf_writer import Metadata, write_gguf
from toque.formats.load import load_checkpoint
from toque.formats.quantize import (
    BLOCK,
    FLOATS,
    Float32,
    Recipe,
    channel_fp8,
    eight_bits,
    four_bits,
    quantized,
)
from toque.formats.safetensors import StoredTensor, read_folder
from toque.formats.safetensors_writer import NewTensor, write_folder

GGUF_RECIPES: Mapping[str, tuple[Recipe, int]] = {  # and general.file_type
    "int8": (Recipe("Q8_0", "Q8_0"), 7),
    "q8_0": (Recipe("Q8_0", "Q8_0"), 7),
    "int4": (Recipe("Q4_0", "Q8_0"), 2),
    "q4_0": (Recipe("Q4_0", "Q8_0"), 2),
}
FOLDER_SCHEMES = ("int8", "int4", "fp8")

_LINEAR = re.compile(r"(?:model\.)?layers\.\d+\..+(?:_proj|\.w[123])\.weight")
_COPIED = (".json", ".txt", ".jinja", ".model", ".md")
_STEP_BYTES = 4 << 20  # of float32 rows quantized at a time


def quantize_model(
    source: Path,
    target: Path,
    scheme: str,
    *,
    requantize: bool = False,
    tokenizer: Callable[[Checkpoint], Metadata] | None = None,
) -> None:
    """Write ``target``; nothing of that name may exist. A failure leaves nothing behind.

    ``tokenizer`` gives the tokenizer's metadata when a folder becomes a GGUF file.

    Raises ConfigError for a scheme that the format does not have, and for a model that is quantized already unless
    ``requantize``; ModelError for a model that Toque cannot run.
    """
    checkpoint = load_checkpoint(source)
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already", param="out")
    if checkpoint.quantization not in FLOATS and not requantize:
        raise ConfigError(
            f"{source.name} is {checkpoint.quantization} already; quantizing it again loses more", param="in"
        )
    to_gguf = target.suffix.lower() == ".gguf"
    if not to_gguf and checkpoint.format == "gguf":
        raise ConfigError(
            f"a folder is written from a folder only, and {source.name} is a GGUF file: name OUT something.gguf",
            param="out",
        )
    known = tuple(GGUF_RECIPES) if to_gguf else FOLDER_SCHEMES
    if scheme not in known:
        raise ConfigError(f"scheme must be one of {', '.join(known)}, got {scheme[:40]!r}", param="scheme")
    if to_gguf and checkpoint.format == "gguf":
        _quantize_gguf(checkpoint.path, target, scheme)
    elif to_gguf:
        metadata = {**export_metadata(checkpoint), **(tokenizer(checkpoint) if tokenizer else {})}
        _write_quantized(target, metadata, list(export_tensors(checkpoint)), scheme)
    else:
        _quantize_folder(checkpoint.path, target, scheme)


def _quantize_gguf(source: Path, target: Path, scheme: str) -> None:
    files = read_parts(source)
    first = files[0]
    metadata: dict[str, tuple[ValueType, Any]] = {
        key: (first.types[key], value)
        for key, value in first.metadata.items()
        if not key.startswith("split.")
    }
    tensors = [
        TensorData(name, entry.type.name, tuple(reversed(entry.dims)), file.bytes_of(entry))
        for name, (file, entry) in merge_parts(files).items()
    ]
    _write_quantized(target, metadata, tensors, scheme)


def _write_quantized(
    target: Path, metadata: dict[str, tuple[ValueType, Any]], tensors: list[TensorData], scheme: str
) -> None:
    recipe, file_type = GGUF_RECIPES[scheme]
    metadata["general.file_type"] = (ValueType.UINT32, file_type)
    metadata["general.quantization_version"] = (ValueType.UINT32, 2)
    write_gguf(target, metadata, [quantized(t, recipe) if t.name.endswith(".weight") else t for t in tensors])


def _quantize_folder(source: Path, target: Path, scheme: str) -> None:
    working = target.with_name(f".{target.name}.{os.getpid()}.part")
    working.mkdir(parents=True)
    try:
        stored = read_folder(source)
        new: list[NewTensor] = []
        ignored = ["lm_head"]
        for tensor in stored.values():
            if not _LINEAR.fullmatch(tensor.name):
                new.append(_copied(tensor))
            elif tensor.shape[1] % BLOCK:
                new.append(_copied(tensor))
                ignored.append(tensor.name.removesuffix(".weight"))
            else:
                new += _PARTS[scheme](tensor)
        write_folder(working, new)
        for file in sorted(source.iterdir()):
            if file.suffix in _COPIED and not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(inside(source, file.name, file.name), working / file.name)
        config = read_json(source, "config.json") | {
            "quantization_config": quantization_config(scheme, ignored)
        }
        (working / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        working.rename(target)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def quantization_config(scheme: str, ignored: list[str]) -> dict[str, Any]:
    """What compressed-tensors' readers expect in config.json."""
    kind, bits = ("float", 8) if scheme == "fp8" else ("int", 4 if scheme == "int4" else 8)
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": "group" if scheme == "int4" else "channel",
        "group_size": BLOCK if scheme == "int4" else None,
        "dynamic": False,
    }
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    layout = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}[scheme]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None if scheme == "int4" else activations,
                "output_activations": None,
            }
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _copied(tensor: StoredTensor) -> NewTensor:
    return NewTensor(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, lambda: iter([tensor.raw()]))


def _rows(tensor: StoredTensor) -> Iterator[Float32]:
    rows, columns = tensor.shape
    raw = tensor.raw()
    step = max(1, _STEP_BYTES // (4 * columns))
    for start in range(0, rows, step):
        piece = raw[start : start + step]
        yield dequantize(TensorData(tensor.name, tensor.dtype, (len(piece), columns), piece))


def _rounding(dtype: str) -> Callable[[Float32], Float32]:
    """What storing a scale in ``dtype`` makes of it."""
    if dtype == "F16":
        return lambda scale: scale.astype("<f2").astype(np.float32)
    if dtype == "BF16":
        return lambda scale: (_bf16(scale).astype(np.uint32) << 16).view(np.float32)
    return lambda scale: scale


def _bf16(values: Float32) -> npt.NDArray[np.uint16]:
    """Upper halves of float32, rounded to nearest even. Scales are finite, so nothing carries into the sign."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _scale_bytes(scales: Float32, dtype: str) -> Bytes:
    stored = _bf16(scales) if dtype == "BF16" else scales.astype("<f2" if dtype == "F16" else "<f4")
    return np.ascontiguousarray(stored).view(np.uint8)


def _by_channel(
    tensor: StoredTensor, dtype: str, quantize: Callable[..., tuple[Any, Float32]]
) -> list[NewTensor]:
    """A byte per weight and a scale per row. The rows are quantized twice, once for each of the two."""
    rounded = _rounding(tensor.dtype)
    module = tensor.name.removesuffix(".weight")
    rows = tensor.shape[0]
    width = 4 if tensor.dtype == "F32" else 2

    def codes() -> Iterator[Bytes]:
        for values in _rows(tensor):
            yield quantize(values, rounded)[0].view(np.uint8)

    def scales() -> Iterator[Bytes]:
        for values in _rows(tensor):
            yield _scale_bytes(quantize(values, rounded)[1], tensor.dtype)

    return [
        NewTensor(tensor.name, dtype, tensor.shape, rows * tensor.shape[1], codes),
        NewTensor(f"{module}.weight_scale", tensor.dtype, (rows, 1), rows * width, scales),
    ]


def _packed(tensor: StoredTensor) -> list[NewTensor]:
    rounded = _rounding(tensor.dtype)
    module = tensor.name.removesuffix(".weight")
    rows, columns = tensor.shape
    width = 4 if tensor.dtype == "F32" else 2

    def words() -> Iterator[Bytes]:
        for values in _rows(tensor):
            codes = (four_bits(values.reshape(-1, BLOCK), rounded)[0] + 8).astype(np.uint8).reshape(-1, 2)
            words_of: Bytes = codes[:, 0] | (codes[:, 1] << np.uint8(4))
            yield words_of.reshape(len(values), -1)

    def scales() -> Iterator[Bytes]:
        for values in _rows(tensor):
            found = four_bits(values.reshape(-1, BLOCK), rounded)[1]
            yield _scale_bytes(found.reshape(len(values), -1), tensor.dtype)

    shape = np.array([rows, columns], "<i8").view(np.uint8)
    groups = columns // BLOCK
    return [
        NewTensor(f"{module}.weight_packed", "I32", (rows, columns // 8), rows * columns // 2, words),
        NewTensor(f"{module}.weight_scale", tensor.dtype, (rows, groups), rows * groups * width, scales),
        NewTensor(f"{module}.weight_shape", "I64", (2,), 16, lambda: iter([shape])),
    ]


_PARTS: Mapping[str, Callable[[StoredTensor], list[NewTensor]]] = {
    "int8": lambda tensor: _by_channel(tensor, "I8", eight_bits),
    "int4": _packed,
    "fp8": lambda tensor: _by_channel(tensor, "F8_E4M3", channel_fp8),
}
