"""What a checkpoint of each architecture must contain, and the bounds of its hyper-parameters.

Both readers end here, so that whatever is loaded later may rely on it: sizes are positive and fit together, every
needed tensor is present, and every tensor has the shape that the configuration says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.bert import bert_tensors
from toque.formats.blocks import RUNNABLE
from toque.formats.checkpoint import TensorData
from toque.types import ModelConfig

ARCHITECTURES: tuple[str, ...] = (
    "bert",
    "gemma",
    "gemma2",
    "gemma3",
    "llama",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3moe",
)
"""Those whose checkpoints can be read; `toque.models.supported()` says which of them can run."""

_POST_NORMS = frozenset({"gemma2", "gemma3"})
_HEAD_NORMS = frozenset({"gemma3", "qwen3", "qwen3moe"})
_QKV_BIAS = frozenset({"qwen2"})
_PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})

_BOUNDS: Mapping[str, tuple[int, int]] = {
    "n_layers": (1, 1024),
    "hidden_size": (1, 1 << 17),
    "n_heads": (1, 1024),
    "n_kv_heads": (1, 1024),
    "head_dim": (2, 1024),
    "ffn_size": (1, 1 << 19),
    "vocab_size": (1, 1 << 22),
    "context_length": (1, 1 << 26),
    "rope_dim": (0, 1024),
    "sliding_window": (0, 1 << 26),
    "sliding_window_pattern": (0, 1024),
    "n_experts": (0, 4096),
    "n_experts_used": (0, 4096),
    "expert_ffn_size": (0, 1 << 19),
    "n_positions": (0, 1 << 20),
    "n_token_types": (0, 1 << 10),
}


def check_architecture(name: str, source: str) -> None:
    """Raise UnsupportedModelError, listing what can be read, before anything else of the file matters."""
    if name not in ARCHITECTURES:
        shown = name if len(name) <= 60 else name[:57] + "..."
        raise UnsupportedModelError(
            f"{source}: architecture {shown!a} is not supported; Toque reads {', '.join(ARCHITECTURES)}"
        )


def check_config(config: ModelConfig, field_of: Callable[[str], str]) -> ModelConfig:
    """The configuration itself, once every size is in bounds. ``field_of`` names the source's key for a field."""
    for name, (low, high) in _BOUNDS.items():
        value = getattr(config, name)
        if not low <= value <= high:
            raise FormatError(f"must be between {low} and {high}, got {value}", field=field_of(name))
    if config.n_heads % config.n_kv_heads:
        raise FormatError(
            f"{config.n_kv_heads} does not divide the {config.n_heads} query heads",
            field=field_of("n_kv_heads"),
        )
    if bool(config.n_experts) != bool(config.n_experts_used) or config.n_experts_used > config.n_experts:
        raise FormatError(
            f"must be between 1 and the {config.n_experts} experts, got {config.n_experts_used}",
            field=field_of("n_experts_used"),
        )
    if config.n_positions and config.context_length > config.n_positions:
        raise FormatError(
            f"{config.context_length} tokens, but only {config.n_positions} positions were learned",
            field=field_of("context_length"),
        )
    if config.head_dim % 2:
        raise FormatError(f"must be even, got {config.head_dim}", field=field_of("head_dim"))
    if config.rope_dim > config.head_dim or config.rope_dim % 2:
        raise FormatError(
            f"must be even and at most the head's {config.head_dim}, got {config.rope_dim}",
            field=field_of("rope_dim"),
        )
    for name, top in (("norm_eps", 1.0), ("rope_theta", 1e12)):
        value = getattr(config, name)
        if not (math.isfinite(value) and 0.0 <= value <= top) or (name == "rope_theta" and value <= 0):
            raise FormatError(f"must be between 0 and {top:g}, got {value}", field=field_of(name))
    scaling = config.rope_scaling
    if scaling is not None and not (math.isfinite(scaling.factor) and 0 < scaling.factor <= 1e6):
        raise FormatError(
            f"factor must be between 0 and 1e6, got {scaling.factor}", field=field_of("rope_scaling")
        )
    return config


@dataclass(frozen=True, slots=True)
class _Expected:
    name: str
    shape: tuple[int, ...]
    required: bool = True


def _expected(config: ModelConfig, names: Collection[str]) -> Iterator[_Expected]:
    hidden, ffn, head = config.hidden_size, config.ffn_size, config.head_dim
    q, kv = config.n_heads * head, config.n_kv_heads * head
    yield _Expected("token_embd.weight", (config.vocab_size, hidden))
    if config.architecture == "bert":
        yield _Expected("position_embd.weight", (config.n_positions, hidden))
        yield _Expected("token_types.weight", (config.n_token_types, hidden))
        yield from (_Expected(*each) for each in bert_tensors(config.n_layers, hidden, ffn))
        return
    yield _Expected("output_norm.weight", (hidden,))
    has_head = not (config.tied_embeddings or config.pooling)
    yield _Expected("output.weight", (config.vocab_size, hidden), has_head)
    rotated = (config.rope_dim or head) // 2
    yield _Expected("rope_freqs.weight", (rotated,), False)
    architecture = config.architecture
    if architecture == "phi3":
        yield _Expected("rope_factors_long.weight", (rotated,), "rope_factors_short.weight" in names)
        yield _Expected("rope_factors_short.weight", (rotated,), "rope_factors_long.weight" in names)
    for layer in range(config.n_layers):
        prefix = f"blk.{layer}."
        yield _Expected(f"{prefix}attn_norm.weight", (hidden,))
        for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            yield _Expected(f"{prefix}{name}.weight", (rows, hidden))
            yield _Expected(f"{prefix}{name}.bias", (rows,), architecture in _QKV_BIAS)
        yield _Expected(f"{prefix}attn_output.weight", (hidden, q))
        yield _Expected(f"{prefix}attn_output.bias", (hidden,), False)
        yield _Expected(f"{prefix}attn_q_norm.weight", (head,), architecture in _HEAD_NORMS)
        yield _Expected(f"{prefix}attn_k_norm.weight", (head,), architecture in _HEAD_NORMS)
        yield _Expected(f"{prefix}post_attention_norm.weight", (hidden,), architecture in _POST_NORMS)
        yield _Expected(f"{prefix}ffn_norm.weight", (hidden,))
        if config.n_experts:
            yield from _experts(config, prefix)
            continue
        for name in ("ffn_gate", "ffn_up"):
            yield _Expected(f"{prefix}{name}.weight", (ffn, hidden))
            yield _Expected(f"{prefix}{name}.bias", (ffn,), False)
        yield _Expected(f"{prefix}ffn_down.weight", (hidden, ffn))
        yield _Expected(f"{prefix}ffn_down.bias", (hidden,), False)
        yield _Expected(f"{prefix}post_ffw_norm.weight", (hidden,), architecture in _POST_NORMS)


def _experts(config: ModelConfig, prefix: str) -> Iterator[_Expected]:
    experts, hidden, ffn = config.n_experts, config.hidden_size, config.expert_ffn_size or config.ffn_size
    yield _Expected(f"{prefix}ffn_gate_inp.weight", (experts, hidden))
    yield _Expected(f"{prefix}ffn_gate_exps.weight", (experts, ffn, hidden))
    yield _Expected(f"{prefix}ffn_up_exps.weight", (experts, ffn, hidden))
    yield _Expected(f"{prefix}ffn_down_exps.weight", (experts, hidden, ffn))


def check_tensors(
    config: ModelConfig,
    tensors: Mapping[str, TensorData],
    source_name: Callable[[str], str] = str,
    *,
    required: Collection[str] = (),
) -> None:
    """Every needed tensor is there, in the right shape and of a type that can run.

    ``source_name`` turns a canonical name into the one that the file's author would recognise; ``required`` adds to
    what the architecture needs.
    """
    for expected in _expected(config, tensors.keys()):
        tensor = tensors.get(expected.name)
        if tensor is None:
            if expected.required or expected.name in required:
                raise FormatError("the tensor is missing", field=source_name(expected.name))
            continue
        if tensor.shape != expected.shape:
            raise FormatError(
                f"shape {list(tensor.shape)} should be {list(expected.shape)}",
                field=source_name(expected.name),
            )
        if len(tensor.shape) == 1 and tensor.dtype not in _PLAIN_TYPES:
            raise FormatError(
                f"a vector must be F32, F16 or BF16, got {tensor.dtype}", field=source_name(expected.name)
            )
    for tensor in tensors.values():
        if tensor.dtype not in RUNNABLE:
            raise UnsupportedModelError(
                f"tensor {source_name(tensor.name)} has type {tensor.dtype}, which Toque cannot run; it runs "
                + ", ".join(sorted(RUNNABLE))
            )


def dominant_type(tensors: Mapping[str, TensorData]) -> str:
    """The type that holds the most weights."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return max(sizes, key=lambda kind: sizes[kind]) if sizes else "none"
