"""Writes tiny checkpoints in the published pre-quantized layouts, loop by loop, sharing nothing with `toque.formats`.

Each ``<scheme>`` function takes a float32 weight [N, K] and returns the layer's tensors and the float32 weight that
they stand for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Layer = tuple[dict[str, torch.Tensor], np.ndarray]


def _word(codes: list[int], bits: int) -> int:
    value = 0
    for position, code in enumerate(codes):
        value |= int(code) << (bits * position)
    return value - (1 << 32) if value >= 1 << 31 else value


def _int32(words: list[list[int]]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int32)


def _grouped(
    weight: np.ndarray, groups: np.ndarray, bits: int, symmetric: bool, scale_dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K] unsigned, scales and zeros [N, G] such that weight is about scale * (code - zero)."""
    n_groups, top = int(groups.max()) + 1, (1 << bits) - 1
    rows, columns = weight.shape
    codes = np.zeros((rows, columns), np.int64)
    scales, zeros = np.zeros((rows, n_groups), np.float32), np.zeros((rows, n_groups), np.int64)
    for row in range(rows):
        for group in range(n_groups):
            members = groups == group
            values = weight[row, members]
            if symmetric:
                scale, zero = np.abs(values).max() / (top / 2), 1 << (bits - 1)
            else:
                low, high = min(values.min(), 0.0), max(values.max(), 0.0)
                scale = (high - low) / top
                zero = max(1, round(float(-low / scale)))
            scale = float(torch.tensor(scale).to(scale_dtype).float())
            scales[row, group], zeros[row, group] = scale, zero
            codes[row, members] = np.clip(np.round(values / scale) + zero, 0, top)
    return codes, scales, zeros


def _meaning(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return ((codes - zeros[:, groups]) * scales[:, groups].astype(np.float64)).astype(np.float32, "C")


def gptq(
    weight: np.ndarray,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    order: int = 0,
    v2: bool = False,
) -> Layer:
    """``order``: which of the orders of this many columns it is, with ``act_order``."""
    rows, columns = weight.shape
    groups = np.arange(columns) // group_size
    if act_order:
        groups = np.random.default_rng([order, columns] if order else [rows, columns]).permutation(groups)
    codes, scales, zeros = _grouped(weight, groups, bits, symmetric, torch.float16)
    per_word, stored = 32 // bits, zeros if v2 else zeros - 1
    tensors = {
        "qweight": _int32(
            [
                [_word(list(codes[n, k : k + per_word]), bits) for n in range(rows)]
                for k in range(0, columns, per_word)
            ]
        ),
        "qzeros": _int32(
            [
                [_word(list(stored[n : n + per_word, group]), bits) for n in range(0, rows, per_word)]
                for group in range(scales.shape[1])
            ]
        ),
        "scales": torch.from_numpy(np.ascontiguousarray(scales.T)).half(),
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    return tensors, _meaning(codes, scales, zeros, groups)


def awq(weight: np.ndarray, *, group_size: int = 32) -> Layer:
    rows, columns = weight.shape
    groups = np.arange(columns) // group_size
    codes, scales, zeros = _grouped(weight, groups, 4, False, torch.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(matrix: np.ndarray) -> torch.Tensor:  # [K or G, N]
        return _int32([[_word([row[n + i] for i in order], 4) for n in range(0, rows, 8)] for row in matrix])

    tensors = {
        "qweight": words(codes.T),
        "qzeros": words(zeros.T),
        "scales": torch.from_numpy(np.ascontiguousarray(scales.T)).half(),
    }
    return tensors, _meaning(codes, scales, zeros, groups)


def packed(
    weight: np.ndarray,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
) -> Layer:
    """compressed-tensors, pack-quantized."""
    rows, columns = weight.shape
    groups = np.arange(columns) // (group_size or columns)
    if act_order:
        groups = np.random.default_rng([rows, columns]).permutation(groups)
    codes, scales, zeros = _grouped(weight, groups, bits, symmetric, torch.bfloat16)
    per_word = 32 // bits
    tensors = {
        "weight_packed": _int32(
            [[_word(list(row[k : k + per_word]), bits) for k in range(0, columns, per_word)] for row in codes]
        ),
        "weight_shape": torch.tensor([rows, columns]),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _int32(
            [
                [_word(list(zeros[n : n + per_word, group]), bits) for group in range(scales.shape[1])]
                for n in range(0, rows, per_word)
            ]
        )
    if act_order:
        tensors["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return tensors, _meaning(codes, scales, zeros, groups)


def int8(weight: np.ndarray, *, whole: bool = False, symmetric: bool = True) -> Layer:
    """compressed-tensors, int-quantized: a scale per output channel, or one for the whole tensor."""
    rows, columns = weight.shape
    groups = np.zeros(columns, np.int64)
    if whole:
        codes, scales, zeros = _grouped(
            weight.reshape(1, -1), np.zeros(weight.size, np.int64), 8, True, torch.float32
        )
        codes, scales = codes.reshape(weight.shape), scales.repeat(rows, 0)
        zeros = zeros.repeat(rows, 0)
    else:
        codes, scales, zeros = _grouped(weight, groups, 8, symmetric, torch.bfloat16)
    tensors = {
        "weight": torch.from_numpy(codes - 128).to(torch.int8),
        "weight_scale": torch.from_numpy(scales[0] if whole else scales).to(
            torch.float32 if whole else torch.bfloat16
        ),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(zeros - 128).to(torch.int8)
    return tensors, _meaning(codes, scales, zeros, groups)


def fp8(weight: np.ndarray, *, block: tuple[int, int] | None, name: str = "weight_scale") -> Layer:
    """e4m3 with a scale for each ``block`` (0: that whole side; None: one scale of shape [1])."""
    rows, columns = weight.shape
    height, width = block or (0, 0)
    height, width = height or rows, width or columns
    scales = np.zeros((-(-rows // height), -(-columns // width)), np.float32)
    codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    meaning = np.zeros(weight.shape, np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scales[i, j] = np.abs(weight[part]).max() / 448
            codes[part] = torch.from_numpy(weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            meaning[part] = codes[part].float().numpy() * scales[i, j]
    stored = torch.from_numpy(scales)
    return {"weight": codes, name: stored.reshape(1) if block is None else stored}, meaning


def quantize_folder(
    source: Path,
    target: Path,
    config: Mapping[str, Any],
    quantize: Callable[[np.ndarray], Layer],
    *,
    skip: tuple[str, ...] = (),
    key: str = "quantization_config",
    suffix: str | tuple[str, ...] = "proj.weight",
) -> dict[str, np.ndarray]:
    """Quantize the linear layers of a saved model, but those named in ``skip``; the float weights that result.

    ``target`` gets a folder whose config.json has ``key``.
    """
    shutil.copytree(source, target)
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | {key: dict(config)}))
    stored, meanings = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not name.endswith(suffix) or module.rsplit(".", 1)[-1] in skip:
            stored[name] = tensor
            meanings[name] = tensor.float().numpy()
            continue
        parts, meanings[name] = quantize(tensor.float().numpy())
        stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(stored, target / "model.safetensors")
    return meanings
