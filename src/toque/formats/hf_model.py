"""A Hugging Face folder (config.json and safetensors) as a Checkpoint with GGUF's tensor names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.bert import BertNames
from toque.formats.checkpoint import Checkpoint, TensorData
from toque.formats.dequant import dequantize
from toque.formats.fields import FILE, Fields
from toque.formats.folder import read_json
from toque.formats.fused import settle_column_orders, split_rows, stack_experts
from toque.formats.hf_config import model_config
from toque.formats.layout import check_tensors, dominant_type
from toque.formats.safetensors import StoredTensor, read_folder
from toque.formats.schemes import Layer, Scheme, read_scheme
from toque.formats.sentence_transformers import embedding_config
from toque.types import ModelConfig

_WEIGHT_TYPES = ("F32", "F16", "BF16")

_OUTER: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_gate_up",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d{1,4})\.(\w+)")
_EXPERT_PARTS: Mapping[str, str] = {
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "w1": "ffn_gate",
    "w2": "ffn_down",
    "w3": "ffn_up",
}
# Gemma 2 and 3 put a norm on both sides of attention and of the ffn.
_FOUR_NORMS: Mapping[str, str] = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NAME = re.compile(r"(?:model\.)?layers\.(\d{1,5})\.(.+)\.(weight|bias)")


class _Names:
    """The two spellings of every tensor name of one architecture."""

    def __init__(self, architecture: str) -> None:
        four = architecture in ("gemma2", "gemma3")
        self._layer = {**_LAYER, **_FOUR_NORMS} if four else dict(_LAYER)
        self._hf_layer = {ours: hf for hf, ours in self._layer.items()}
        self._hf_outer = {ours: hf for hf, ours in _OUTER.items()}

    def canonical(self, name: str) -> str | None:
        """GGUF's name, or None for a tensor that the architecture does not have."""
        match = _NAME.fullmatch(name)
        if match is not None:
            ours = self._layer.get(match[2]) or _expert(match[2])
            return None if ours is None else f"blk.{int(match[1])}.{ours}.{match[3]}"
        stem, _, kind = name.rpartition(".")
        ours = _OUTER.get(stem) or _OUTER.get(f"model.{stem}")
        return None if ours is None or kind != "weight" else f"{ours}.{kind}"

    def hf(self, name: str) -> str:
        """Hugging Face's name of a canonical one, for messages."""
        parts = name.split(".")
        if parts[0] == "blk" and len(parts) == 4:
            return f"model.layers.{parts[1]}.{self._hf_layer.get(parts[2], parts[2])}.{parts[3]}"
        return f"{self._hf_outer.get(parts[0], parts[0])}.{parts[-1]}"


def _expert(name: str) -> str | None:
    """``mlp.experts.3.up_proj`` → ``ffn_up.3``, Mixtral's ``block_sparse_moe.experts.3.w3`` as well."""
    match = _EXPERT.fullmatch(name)
    part = None if match is None else _EXPERT_PARTS.get(match[2])
    return None if match is None or part is None else f"{part}.{int(match[1])}"


def load_folder(folder: Path, architectures: Collection[str] | None = None) -> Checkpoint:
    """Open a checkpoint folder: config.json, then the safetensors file or shards, described but not read.

    Weights keep their type (F32, F16 or BF16). Raises FormatError naming the file, key or tensor that is wrong, or
    UnsupportedModelError.
    """
    values = read_json(folder, FILE)
    config = embedding_config(folder, model_config(values, architectures))
    scheme = read_scheme(Fields(values))
    names = BertNames() if config.architecture == "bert" else _Names(config.architecture)
    fields = Fields(values)
    biases = _stated_biases(config, fields)
    tensors: dict[str, TensorData] = {}
    for tensor in _stored_tensors(read_folder(folder), names, scheme):
        name = tensor.name
        if not _used(name, config, biases):
            continue
        if config.architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = _plus_one(tensor)
        tensors[name] = tensor
    tensors = _unfused(tensors, config)
    if config.n_experts:
        tensors = stack_experts(tensors, config.n_experts)
    check_tensors(config, tensors, names.hf, required=biases)
    tensors = settle_column_orders(tensors, config.n_layers)  # whose shapes are known to fit now
    layers = {name: tensor for name, tensor in tensors.items() if name not in _NEVER_QUANTIZED}
    return Checkpoint(
        path=folder,
        format="safetensors",
        config=config,
        tensors=tensors,
        quantization=_label(scheme, dominant_type(tensors if scheme is None else layers)),
        folder=folder,
    )


_NEVER_QUANTIZED = ("token_embd.weight", "output.weight")  # by the usual tools


def _label(scheme: Scheme | None, kind: str) -> str:
    """What the weights are, for people; of a scheme without kernels, that they are held in 16 bits."""
    if scheme is None:
        return kind
    return f"{scheme.name}, held as F16" if kind == "F16" else scheme.name


def _stored_tensors(
    stored: Mapping[str, StoredTensor], names: _Names | BertNames, scheme: Scheme | None
) -> Iterator[TensorData]:
    """Everything that has a canonical name, under it; quantized layers as the scheme reads them."""
    layers: dict[str, dict[str, StoredTensor]] = {}
    for tensor in stored.values():
        module, _, part = tensor.name.rpartition(".")
        part = {"gamma": "weight", "beta": "bias"}.get(part, part)  # BERT's first layer norms
        layers.setdefault(module, {})[part] = tensor
    for module, parts in layers.items():
        name = names.canonical(f"{module}.weight")
        if name is None:
            continue
        sortable = name != "token_embd.weight"
        matrix = None if scheme is None else scheme.matrix(Layer(module, parts, sortable=sortable))
        if matrix is not None:
            yield TensorData(name, matrix.dtype, matrix.shape, matrix.rows, column_order=matrix.column_order)
        elif "weight" in parts:
            yield _tensor(name, parts["weight"])
        elif scheme is None and "qweight" in parts:
            raise FormatError(
                f"is missing, but {module}.qweight is quantized", field=f"{FILE}.quantization_config"
            )
        bias = names.canonical(f"{module}.bias")
        if bias is not None and "bias" in parts:
            yield _tensor(bias, parts["bias"])


def _used(name: str, config: ModelConfig, biases: frozenset[str]) -> bool:
    """What transformers would not load is left out: a tied model's own head, a bias that the config denies."""
    if name == "output.weight":
        return not (config.tied_embeddings or config.pooling)
    if config.architecture == "bert":
        return True
    if name.endswith(".bias"):
        if config.architecture == "qwen2":
            return name.split(".")[2] in ("attn_q", "attn_k", "attn_v")
        return name in biases
    return True


def _stated_biases(config: ModelConfig, fields: Fields) -> frozenset[str]:
    """The biases that ``attention_bias`` and ``mlp_bias`` promise."""
    parts: list[str] = []
    if fields.boolean("attention_bias", False):
        parts += ["attn_q", "attn_k", "attn_v", "attn_output"]
    if fields.boolean("mlp_bias", False):
        parts += ["ffn_gate", "ffn_up", "ffn_down"]
    return frozenset(f"blk.{layer}.{part}.bias" for layer in range(config.n_layers) for part in parts)


def _tensor(name: str, stored: StoredTensor) -> TensorData:
    if stored.dtype not in _WEIGHT_TYPES:
        raise UnsupportedModelError(
            f"tensor {stored.name} in {stored.file} has type {stored.dtype}; Toque reads {', '.join(_WEIGHT_TYPES)}"
        )
    if 0 in stored.shape:
        raise FormatError(f"a dimension is 0 in {list(stored.shape)}", field=stored.name)
    return TensorData(name, stored.dtype, stored.shape, stored.raw())


def _plus_one(tensor: TensorData) -> TensorData:
    """Gemma stores its norms' gains minus one; GGUF files and everything after us hold the gains."""
    gains = dequantize(tensor) + np.float32(1)
    return TensorData(tensor.name, "F32", tensor.shape, gains.view(np.uint8).reshape(1, -1))


def _unfused(tensors: Mapping[str, TensorData], config: ModelConfig) -> dict[str, TensorData]:
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    result: dict[str, TensorData] = {}
    for name, tensor in tensors.items():
        prefix = name.rsplit(".", 2)[0]
        if name.endswith(".attn_qkv.weight"):
            result.update(split_rows(tensor, prefix, {"attn_q": q, "attn_k": kv, "attn_v": kv}))
        elif name.endswith(".ffn_gate_up.weight"):
            result.update(
                split_rows(tensor, prefix, {"ffn_gate": config.ffn_size, "ffn_up": config.ffn_size})
            )
        else:
            result[name] = tensor
    return result
