"""A checkpoint from a safetensors folder as the metadata and tensors of a GGUF file: `gguf_model` the other way round.

What a GGUF file of a family does not state, because every reader knows it (gemma's embedding scale, every sixth layer
global), must be what they know; a model that differs is refused by the name of the setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from toque.errors import UnsupportedModelError
from toque.formats.checkpoint import Bytes, Checkpoint, ConvertedRows, TensorData
from toque.formats.dequant import dequantize
from toque.formats.gguf import ValueType
from toque.formats.gguf_writer import Metadata
from toque.formats.quantize import as_type
from toque.types import ModelConfig, RopeScaling

ARCHITECTURES = ("gemma", "gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3", "qwen3moe")

_PATTERNS: Mapping[str, int] = {"gemma2": 2, "gemma3": 6}  # every n-th layer sees everything
_WIDE: Mapping[str, int] = {"gemma2": 46, "gemma3": 62}  # layers of the model that scales by its hidden size
_CAPS: Mapping[str, tuple[str, str]] = {  # of attention, of the logits
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("", "final_logit_softcapping"),
}
_SCALINGS: Mapping[str, tuple[str, ...]] = {
    "llama": ("linear", "llama3", "yarn"),
    "phi3": ("longrope",),
    "gemma3": ("linear",),
    "qwen2": ("linear", "yarn"),
    "qwen3": ("linear", "yarn"),
    "qwen3moe": ("linear", "yarn"),
}
_FUSED: Mapping[str, tuple[str, ...]] = {  # of phi3
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_up": ("ffn_gate", "ffn_up"),
}


def export_metadata(checkpoint: Checkpoint) -> Metadata:
    """The hyper-parameters. Raises UnsupportedModelError naming what a GGUF file of this family cannot state."""
    config = checkpoint.config
    _check(checkpoint.path.name, config)
    whole = {
        "block_count": config.n_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.rope_dim or config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if (
        _window(config) or config.architecture in _PATTERNS
    ):  # whose readers have a window of their own for none
        whole["attention.sliding_window"] = config.sliding_window or config.context_length
    if config.n_experts:
        whole |= {"expert_count": config.n_experts, "expert_used_count": config.n_experts_used}
    if config.expert_ffn_size:
        whole["expert_feed_forward_length"] = config.expert_ffn_size
    real = {
        "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }
    if config.rope_local_theta:
        real["rope.freq_base_swa"] = config.rope_local_theta
    caps = (config.attention_softcap, config.final_softcap)
    real |= {key: cap for key, cap in zip(_CAPS.get(config.architecture, ()), caps, strict=False) if key}
    prefix = f"{config.architecture}."
    stated: dict[str, tuple[ValueType, Any]] = {
        "general.architecture": (ValueType.STRING, config.architecture),
        "general.name": (ValueType.STRING, checkpoint.path.name),
        **{prefix + key: (ValueType.UINT32, value) for key, value in whole.items()},
        **{prefix + key: (ValueType.FLOAT32, value) for key, value in real.items()},
    }
    scaling = _scaling(config.rope_scaling)
    return stated | {f"{prefix}rope.scaling.{key}": value for key, value in scaling.items()}


def _check(name: str, config: ModelConfig) -> None:
    kind = config.architecture
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{name}: {kind} is not written to GGUF files; {', '.join(ARCHITECTURES)} are"
        )
    gemma = kind.startswith("gemma")
    wide = config.n_layers == _WIDE.get(kind)
    scale = 1 / math.sqrt(config.hidden_size // config.n_heads if wide else config.head_dim)
    scaling = config.rope_scaling
    fits = {
        "pooling": not config.pooling,
        "hidden_act": config.hidden_act == ("gelu_tanh" if gemma else "silu"),
        "sliding_window": not _window(config) or kind == "phi3" or kind in _PATTERNS,
        # gemma3's layers with a window rotate by another base, whether or not it hides anything.
        "sliding_window_pattern": not (_window(config) or config.rope_local_theta)
        or config.sliding_window_pattern == _PATTERNS.get(kind, 0),
        "attention_scale": math.isclose(config.attention_scale or scale, scale, rel_tol=1e-6),
        "attention_softcap": not config.attention_softcap or kind == "gemma2",
        "final_softcap": not config.final_softcap or kind in _CAPS,
        "norm_expert_weights": not config.n_experts or config.norm_expert_weights,
        f"rope_scaling {scaling.kind if scaling else ''}": not scaling
        or scaling.kind in _SCALINGS.get(kind, ()),
    }
    for setting, fit in fits.items():
        if not fit:
            raise UnsupportedModelError(
                f"{name}: a GGUF file of a {kind} model cannot state its {setting}, so that others would read "
                "another model"
            )


def _window(config: ModelConfig) -> bool:
    """Whether its window is one that a sequence can outgrow."""
    return 0 < config.sliding_window < config.context_length


def _scaling(scaling: RopeScaling | None) -> dict[str, tuple[ValueType, Any]]:
    """The keys below ``rope.scaling``. llama3 is stated by ``rope_freqs``, longrope by two tensors and a factor."""
    if scaling is None or scaling.kind == "llama3":
        return {}
    original = (ValueType.UINT32, scaling.original_context)
    if scaling.kind == "longrope":
        factor = (ValueType.FLOAT32, scaling.attention_factor or 1.0)
        return {"original_context_length": original, "attn_factor": factor}
    keys = {"type": (ValueType.STRING, scaling.kind), "factor": (ValueType.FLOAT32, scaling.factor)}
    if scaling.kind == "yarn":
        keys |= {
            "original_context_length": original,
            "yarn_beta_fast": (ValueType.FLOAT32, scaling.beta_fast),
            "yarn_beta_slow": (ValueType.FLOAT32, scaling.beta_slow),
        }
        if scaling.attention_factor is not None:  # multiplies yarn's own in GGUF
            own = 1.0 + 0.1 * math.log(max(scaling.factor, 1.0))
            keys["attn_factor"] = (ValueType.FLOAT32, scaling.attention_factor / own)
    return keys


def export_tensors(checkpoint: Checkpoint) -> Iterator[TensorData]:
    """Vectors and routers as F32; llamas' q and k with the halves of each head interleaved; phi3's fused again."""
    config = checkpoint.config
    yield from _rope_factors(config)
    tensors, whole = dict(checkpoint.tensors), _Whole()
    if config.architecture == "phi3":
        tensors = _fused(tensors, config.n_layers, whole)
    for name, tensor in tensors.items():
        if len(tensor.shape) == 1 or name.endswith("gate_inp.weight"):
            tensor = as_type(tensor, "F32")
        if tensor.parts:
            tensor = replace(tensor, parts=tuple(_in_order(part, whole) for part in tensor.parts))
        order = tensor.row_order
        if config.architecture == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            order = _interleaved(tensor.shape[0], config.head_dim)
        yield tensor if order is None else _rows_by(tensor, order, whole)


def _rope_factors(config: ModelConfig) -> Iterator[TensorData]:
    """What each rotary frequency is divided by, where a file states it so."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "longrope":
        yield _vector("rope_factors_long.weight", scaling.long_factors)
        yield _vector("rope_factors_short.weight", scaling.short_factors)
    if scaling is not None and scaling.kind == "llama3":
        dim = config.rope_dim or config.head_dim
        plain = config.rope_theta ** (-np.arange(0, dim, 2) / dim)
        turns = scaling.original_context * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        yield _vector("rope_freqs.weight", 1 / (kept + (1 - kept) / scaling.factor))


def _vector(name: str, values: npt.ArrayLike) -> TensorData:
    array = np.asarray(values, "<f4")
    return TensorData(name, "F32", array.shape, array.view(np.uint8).reshape(1, -1))


def _fused(tensors: Mapping[str, TensorData], n_layers: int, whole: _Whole) -> dict[str, TensorData]:
    result = dict(tensors)
    for layer in range(n_layers):
        for fused, names in _FUSED.items():
            parts = tuple(_in_order(result.pop(f"blk.{layer}.{name}.weight"), whole) for name in names)
            shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
            empty = np.empty((0, parts[0].raw.shape[1]), np.uint8)
            name = f"blk.{layer}.{fused}.weight"
            result[name] = TensorData(name, parts[0].dtype, shape, empty, parts=parts)
    return result


def _interleaved(rows: int, head_dim: int) -> npt.NDArray[np.int64]:
    """The order that puts the two halves of each head side by side."""
    return np.arange(rows).reshape(rows // head_dim, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)


class _Whole:
    """A matrix's rows in the file's order, converted once and held until another's are asked for.

    Of a checkpoint quantized before, a few rows in another order may lie anywhere in the matrix.
    """

    def __init__(self) -> None:
        self._of: object = None
        self._rows: Bytes = np.empty((0, 0), np.uint8)

    def rows(self, raw: Bytes | ConvertedRows) -> Bytes:
        if isinstance(raw, ConvertedRows):
            if self._of is not raw:
                self._of = None
                self._rows = np.asarray(raw)
                self._of = raw
            return self._rows
        return raw


def _in_order(tensor: TensorData, whole: _Whole) -> TensorData:
    return tensor if tensor.row_order is None else _rows_by(tensor, tensor.row_order, whole)


def _rows_by(tensor: TensorData, order: npt.NDArray[np.int64], whole: _Whole) -> TensorData:
    if len(tensor.shape) == 1:  # a bias
        return _vector(tensor.name, dequantize(tensor)[order])
    raw = tensor.raw

    def rows(first: int, last: int) -> Bytes:
        wanted: Bytes = whole.rows(raw)[order[first:last]]
        return wanted

    return replace(tensor, raw=ConvertedRows(raw.shape[0], raw.shape[1], rows), row_order=None)
