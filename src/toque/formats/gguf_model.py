"""A GGUF file (or all the parts of a split one) as a Checkpoint: metadata to ModelConfig, tensors to views."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.checkpoint import Checkpoint, TensorData
from toque.formats.dequant import dequantize
from toque.formats.fused import split_rows, stack_experts
from toque.formats.gguf import GGUFFile, TensorEntry, ValueType, read_gguf
from toque.formats.layout import check_architecture, check_config, check_tensors, dominant_type
from toque.formats.strings import StringArray
from toque.types import ModelConfig, RopeScaling

_INTEGERS = frozenset(ValueType) - {
    ValueType.FLOAT32,
    ValueType.FLOAT64,
    ValueType.BOOL,
    ValueType.STRING,
    ValueType.ARRAY,
}
_FLOATS = frozenset({ValueType.FLOAT32, ValueType.FLOAT64})

# general.file_type: the recipe a file was quantized with, which the types of its tensors alone do not tell.
_RECIPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 25: "IQ4_NL",
    30: "IQ4_XS", 32: "BF16", 38: "MXFP4",
}  # fmt: skip

_KEYS: Mapping[str, str] = {
    "n_layers": "block_count",
    "hidden_size": "embedding_length",
    "n_heads": "attention.head_count",
    "n_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "ffn_size": "feed_forward_length",
    "vocab_size": "vocab_size",
    "context_length": "context_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_dim": "rope.dimension_count",
    "rope_scaling": "rope.scaling.factor",
    "sliding_window": "attention.sliding_window",
    "n_experts": "expert_count",
    "n_experts_used": "expert_used_count",
    "expert_ffn_size": "expert_feed_forward_length",
}

_PART = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

# Set by the model family, not by the file, in every published conversion.
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA3_PATTERN = 6
_GEMMA2_PATTERN = 2

_POOLINGS = ("", "mean", "cls", "last")  # by number


def load_gguf(path: Path, architectures: Collection[str] | None = None) -> Checkpoint:
    """Open a GGUF model. Any part of a split file stands for all of them; each must be beside it.

    ``architectures`` narrows what is accepted (default: everything this module can read). Raises FormatError or
    UnsupportedModelError; no weight has been read by then.
    """
    files = read_parts(path)
    first = files[0]
    metadata = _Metadata(first.metadata, first.types)
    architecture = metadata.text("general.architecture")
    check_architecture(architecture, path.name)
    if architectures is not None and architecture not in architectures:
        raise UnsupportedModelError(
            f"{path.name}: architecture {architecture} cannot run yet; supported: {', '.join(sorted(architectures))}"
        )
    entries = merge_parts(files)
    _check_tokenizer(metadata, entries)
    config = _config(architecture, metadata, entries)
    tensors = {name: _tensor(file, entry) for name, (file, entry) in entries.items()}
    if architecture == "phi3":
        tensors = _split_fused(tensors, config)
    if architecture == "llama":
        tensors = {name: _uninterleaved(tensor, config) for name, tensor in tensors.items()}
    if config.n_experts:
        tensors = stack_experts(tensors, config.n_experts)  # the first Mixtral files have a tensor per expert
    check_tensors(config, tensors)
    if "rope_freqs.weight" in tensors:
        factors = tuple(dequantize(tensors["rope_freqs.weight"]).tolist())
        config = replace(config, extra={**config.extra, "rope_factors": factors})
    if "rope_factors_long.weight" in tensors:
        config = replace(config, rope_scaling=_longrope(metadata, architecture, tensors))
    recipe = first.metadata.get("general.file_type")
    quantization = _RECIPES.get(recipe, "") if isinstance(recipe, int) else ""
    return Checkpoint(
        path=path,
        format="gguf",
        config=config,
        tensors=tensors,
        quantization=quantization or dominant_type(tensors),
        metadata=first.metadata,
    )


class _Metadata:
    """Typed reads of the key/value table; a wrong type or an impossible number names its key."""

    def __init__(self, values: Mapping[str, Any], types: Mapping[str, ValueType]) -> None:
        self._values = values
        self._types = types

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, {ValueType.STRING}, str, default, "a string"))

    def integer(self, key: str, default: int | None = None) -> int:
        value = int(self._get(key, _INTEGERS, int, default, "an integer"))
        if value < 0:
            raise FormatError(f"must not be negative, got {value}", field=f"metadata[{key}]")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self._get(key, _FLOATS, float, default, "a float"))
        if not math.isfinite(value):
            raise FormatError(f"must be finite, got {value}", field=f"metadata[{key}]")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        return bool(self._get(key, {ValueType.BOOL}, bool, default, "true or false"))

    def array(self, key: str, kind: ValueType) -> StringArray | npt.NDArray[Any] | None:
        if key not in self._values:
            return None
        value = self._values[key]
        if self._types[key] is not kind or not isinstance(value, StringArray | np.ndarray):
            shown = "an array of " if isinstance(value, StringArray | np.ndarray) else ""
            raise FormatError(
                f"must be an array of {kind.name}, got {shown}{self._types[key].name}",
                field=f"metadata[{key}]",
            )
        return value

    def _get(self, key: str, kinds: Collection[ValueType], python: type, default: Any, what: str) -> Any:
        if key not in self._values:
            if default is None:
                raise FormatError("is missing", field=f"metadata[{key}]")
            return default
        value = self._values[key]
        if self._types[key] not in kinds or not isinstance(value, python):
            shown = self._types[key].name
            if isinstance(value, StringArray | np.ndarray):
                shown = f"an array of {shown}"
            raise FormatError(f"must be {what}, got {shown}", field=f"metadata[{key}]")
        return value


def read_parts(path: Path) -> list[GGUFFile]:
    match = _PART.fullmatch(path.name)
    if match is None:
        file = read_gguf(path)
        count = _Metadata(file.metadata, file.types).integer("split.count", 0)
        if count > 1:
            raise FormatError(
                f"is one of {count} parts, but is not named NAME-00001-of-{count:05}.gguf", field=path.name
            )
        return [file]
    total = int(match["count"])
    if not 1 <= int(match["no"]) <= total:
        raise FormatError(f"there is no part {match['no']} of {match['count']}", field=path.name)
    files: list[GGUFFile] = []
    for number in range(1, total + 1):
        part = path.with_name(f"{match['stem']}-{number:05}-of-{total:05}.gguf")
        if not part.exists():
            raise FormatError(f"part {number} of {total} is missing", field=part.name)
        file = read_gguf(part)
        metadata = _Metadata(file.metadata, file.types)
        for key, expected in (("split.no", number - 1), ("split.count", total)):
            value = metadata.integer(key)
            if value != expected:
                raise FormatError(f"{part.name}: should be {expected}, got {value}", field=f"metadata[{key}]")
        files.append(file)
    return files


def merge_parts(files: list[GGUFFile]) -> dict[str, tuple[GGUFFile, TensorEntry]]:
    entries: dict[str, tuple[GGUFFile, TensorEntry]] = {}
    for file in files:
        for name, entry in file.tensors.items():
            if name in entries:
                raise FormatError(f"is in {entries[name][0].path.name} and in {file.path.name}", field=name)
            entries[name] = (file, entry)
    if len(files) > 1:
        first = files[0]
        total = _Metadata(first.metadata, first.types).integer("split.tensors.count", len(entries))
        if total != len(entries):
            raise FormatError(
                f"{total} tensors were split, the parts hold {len(entries)}",
                field="metadata[split.tensors.count]",
            )
    return entries


def _check_tokenizer(metadata: _Metadata, entries: Mapping[str, tuple[GGUFFile, TensorEntry]]) -> None:
    """The vocabulary's arrays have the right types, belong together and fit the embedding. Absence is not judged."""
    prefix = "tokenizer.ggml."
    tokens = metadata.array(f"{prefix}tokens", ValueType.STRING)
    metadata.array(f"{prefix}merges", ValueType.STRING)
    for name, kind in (("scores", ValueType.FLOAT32), ("token_type", ValueType.INT32)):
        values = metadata.array(f"{prefix}{name}", kind)
        if values is not None and len(values) != (0 if tokens is None else len(tokens)):
            raise FormatError(
                f"has {len(values)} entries for {0 if tokens is None else len(tokens)} tokens",
                field=f"metadata[{prefix}{name}]",
            )
    embedding = entries.get("token_embd.weight")
    if tokens is not None and embedding is not None:
        rows = math.prod(embedding[1].dims[1:])
        if len(tokens) > rows:
            raise FormatError(
                f"{len(tokens)} tokens, but token_embd.weight has {rows} rows",
                field=f"metadata[{prefix}tokens]",
            )


def _config(
    architecture: str, metadata: _Metadata, entries: Mapping[str, tuple[GGUFFile, TensorEntry]]
) -> ModelConfig:
    def key(name: str) -> str:
        return f"{architecture}.{name}"

    def field_of(name: str) -> str:
        return f"metadata[{key(_KEYS.get(name, name))}]"

    n_experts = metadata.integer(key("expert_count"), 0)
    if n_experts and architecture not in ("llama", "qwen3moe"):
        raise UnsupportedModelError(
            f"metadata[{key('expert_count')}]: {architecture} models of {n_experts} experts are not supported"
        )
    if "token_embd.weight" not in entries:
        raise FormatError("the tensor is missing", field="token_embd.weight")
    bert = architecture == "bert"
    hidden = metadata.integer(key("embedding_length"))
    n_heads = metadata.integer(key("attention.head_count"))
    if not 1 <= n_heads <= 1024:
        raise FormatError(f"must be between 1 and 1024, got {n_heads}", field=field_of("n_heads"))
    head_dim = metadata.integer(key("attention.key_length"), hidden // n_heads)
    value_dim = metadata.integer(key("attention.value_length"), head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"metadata[{key('attention.value_length')}]: values of {value_dim} with keys of {head_dim} are not "
            "supported"
        )
    rope_dim = metadata.integer(key("rope.dimension_count"), head_dim)
    gemma = architecture.startswith("gemma")
    return check_config(
        ModelConfig(
            architecture=architecture,
            n_layers=metadata.integer(key("block_count")),
            hidden_size=hidden,
            n_heads=n_heads,
            n_kv_heads=metadata.integer(key("attention.head_count_kv"), n_heads),
            head_dim=head_dim,
            ffn_size=metadata.integer(key("feed_forward_length")),
            # The embedding decides: the tokenizer may know fewer ids, and the key is often absent.
            vocab_size=math.prod(entries["token_embd.weight"][1].dims[1:]),
            context_length=metadata.integer(key("context_length")),
            norm_eps=metadata.number(key(f"attention.layer_norm_{'epsilon' if bert else 'rms_epsilon'}")),
            norm_expert_weights=metadata.boolean(key("expert_weights_norm"), True),
            rope_theta=metadata.number(key("rope.freq_base"), 10_000.0),
            rope_dim=0 if rope_dim == head_dim else rope_dim,
            rope_scaling=_rope_scaling(architecture, metadata),
            tied_embeddings="output.weight" not in entries,
            hidden_act="gelu" if bert else "gelu_tanh" if gemma else "silu",
            n_positions=_rows(entries, "position_embd.weight") if bert else 0,
            n_token_types=_rows(entries, "token_types.weight") if bert else 0,
            pooling=_pooling(architecture, metadata),
            embedding_scale=math.sqrt(hidden) if gemma else 1.0,
            n_experts=n_experts,
            n_experts_used=metadata.integer(key("expert_used_count")) if n_experts else 0,
            expert_ffn_size=metadata.integer(key("expert_feed_forward_length"), 0) if n_experts else 0,
            **_family(architecture, metadata, hidden, n_heads, head_dim),
        ),
        field_of,
    )


def _rows(entries: Mapping[str, tuple[GGUFFile, TensorEntry]], name: str) -> int:
    if name not in entries:
        raise FormatError("the tensor is missing", field=name)
    return math.prod(entries[name][1].dims[1:])


def _pooling(architecture: str, metadata: _Metadata) -> str:
    """How a model made for embeddings pools its tokens; "" for one that generates."""
    key = f"{architecture}.pooling_type"
    number = metadata.integer(key, 0)
    if number >= len(_POOLINGS):
        raise UnsupportedModelError(
            f"metadata[{key}]: pooling {number} is not supported; Toque runs 1 (mean), 2 (cls) and 3 (last)"
        )
    return _POOLINGS[number] or ("mean" if architecture == "bert" else "")


def _family(
    architecture: str, metadata: _Metadata, hidden: int, n_heads: int, head_dim: int
) -> dict[str, Any]:
    """What differs by family: windows, soft caps, attention scale."""
    if architecture == "gemma3":
        # The 27B model divides by the width of a head before it was narrowed; all others by the head's own.
        wide = metadata.integer("gemma3.block_count") == 62
        return {
            "sliding_window": metadata.integer("gemma3.attention.sliding_window", 0),
            "sliding_window_pattern": _GEMMA3_PATTERN,
            "rope_local_theta": metadata.number("gemma3.rope.freq_base_swa", _GEMMA_LOCAL_THETA),
            "final_softcap": metadata.number("gemma3.final_logit_softcapping", 0.0),
            "attention_scale": 1.0 / math.sqrt(hidden // n_heads if wide else head_dim),
        }
    if architecture == "gemma2":
        wide = metadata.integer("gemma2.block_count") == 46
        return {
            "sliding_window": metadata.integer("gemma2.attention.sliding_window", 4096),
            "sliding_window_pattern": _GEMMA2_PATTERN,
            "attention_softcap": metadata.number("gemma2.attn_logit_softcapping", 50.0),
            "final_softcap": metadata.number("gemma2.final_logit_softcapping", 30.0),
            "attention_scale": 1.0 / math.sqrt(hidden // n_heads if wide else head_dim),
        }
    if architecture == "phi3":
        return {"sliding_window": metadata.integer("phi3.attention.sliding_window", 0)}
    if architecture == "bert" and metadata.boolean("bert.attention.causal", False):
        raise UnsupportedModelError("metadata[bert.attention.causal]: BERT as a decoder is not supported")
    return {}


def _rope_scaling(architecture: str, metadata: _Metadata) -> RopeScaling | None:
    prefix = f"{architecture}.rope.scaling."
    kind = metadata.text(f"{prefix}type", "none")
    old = f"{architecture}.rope.scale_linear"  # before scaling had a type
    if kind == "none":
        factor = metadata.number(old, 1.0)
        return RopeScaling("linear", factor=factor) if factor != 1.0 else None
    if kind == "linear":
        return RopeScaling("linear", factor=metadata.number(f"{prefix}factor"))
    if kind == "yarn":
        factor = metadata.number(f"{prefix}factor")
        stated = metadata.number(f"{prefix}attn_factor", 1.0)
        return RopeScaling(
            "yarn",
            factor=factor,
            original_context=metadata.integer(f"{prefix}original_context_length"),
            beta_fast=metadata.number(f"{prefix}yarn_beta_fast", 32.0),
            beta_slow=metadata.number(f"{prefix}yarn_beta_slow", 1.0),
            # GGUF's factor multiplies yarn's own; ModelConfig's replaces it.
            attention_factor=None if stated == 1.0 else stated * (1.0 + 0.1 * math.log(max(factor, 1.0))),
        )
    if kind == "longrope" and architecture == "phi3":
        return None  # stated by tensors: `_longrope`
    raise UnsupportedModelError(
        f"metadata[{prefix}type]: rope scaling {kind[:40]!a} is not supported; Toque runs none, linear, yarn"
    )


def _longrope(metadata: _Metadata, architecture: str, tensors: Mapping[str, TensorData]) -> RopeScaling:
    prefix = f"{architecture}.rope.scaling."
    long, short = (
        tuple(dequantize(tensors[f"rope_factors_{name}.weight"]).tolist()) for name in ("long", "short")
    )
    return RopeScaling(
        "longrope",
        original_context=metadata.integer(f"{prefix}original_context_length"),
        attention_factor=metadata.number(f"{prefix}attn_factor", 1.0),
        long_factors=long,
        short_factors=short,
    )


def _tensor(file: GGUFFile, entry: TensorEntry) -> TensorData:
    dims = entry.dims
    while len(dims) > 1 and dims[-1] == 1:
        dims = dims[:-1]  # GGUF pads with ones; a vector is a vector
    return TensorData(entry.name, entry.type.name, tuple(reversed(dims)), file.bytes_of(entry))


def _uninterleaved(tensor: TensorData, config: ModelConfig) -> TensorData:
    """llama files hold each head's rotary pairs side by side: file row 2i+j is row j·d/2+i of a head of d rows."""
    parts = tensor.name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in ("attn_q", "attn_k"):
        return tensor
    heads = config.n_heads if parts[2] == "attn_q" else config.n_kv_heads
    if tensor.shape[0] != heads * config.head_dim:
        return tensor  # a wrong shape; `check_tensors` reports it
    order = np.arange(tensor.shape[0]).reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
    return TensorData(tensor.name, tensor.dtype, tensor.shape, tensor.raw, row_order=order.astype(np.int64))


def _split_fused(tensors: Mapping[str, TensorData], config: ModelConfig) -> dict[str, TensorData]:
    """phi3 files hold q, k, v as one matrix, and gate and up as one called ``ffn_up``: cut them by rows."""
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    result: dict[str, TensorData] = {}
    for name, tensor in tensors.items():
        if name.endswith(".attn_qkv.weight"):
            rows = {"attn_q": q, "attn_k": kv, "attn_v": kv}
        elif name.endswith(".ffn_up.weight") and name.replace("ffn_up", "ffn_gate") not in tensors:
            rows = {"ffn_gate": config.ffn_size, "ffn_up": config.ffn_size}
        else:
            result[name] = tensor
            continue
        result.update(split_rows(tensor, name.rsplit(".", 2)[0], rows))
    return result
