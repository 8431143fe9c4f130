"""Hugging Face's config.json as a ModelConfig, with the defaults that its own classes have."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.bert import bert_config
from toque.formats.fields import FILE, Fields, shown
from toque.formats.layout import ARCHITECTURES, check_architecture, check_config
from toque.types import ModelConfig, RopeScaling

MODEL_TYPES: Mapping[str, str] = {name: name for name in ARCHITECTURES if name != "gemma3"} | {
    "mistral": "llama",  # the same architecture; its window is a number like any other
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
_CONTEXT: Mapping[str, int] = {
    "llama": 2048,
    "mistral": 131_072,
    "mixtral": 131_072,
    "qwen2": 32_768,
    "qwen3": 32_768,
    "qwen3_moe": 32_768,
    "gemma": 8192,
    "gemma2": 8192,
    "gemma3_text": 131_072,
    "phi3": 4096,
}
_HEAD_DIM: Mapping[str, int] = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256}
_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_KEYS: Mapping[str, str] = {
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "context_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_dim": "partial_rotary_factor",
    "n_experts": "num_local_experts",
    "n_experts_used": "num_experts_per_tok",
    "expert_ffn_size": "moe_intermediate_size",
}


def model_config(values: Mapping[str, Any], architectures: Collection[str] | None = None) -> ModelConfig:
    """The ModelConfig of a parsed config.json. Raises FormatError naming the key, or UnsupportedModelError."""
    fields = Fields(values)
    model_type = fields.text("model_type")
    architecture = MODEL_TYPES.get(model_type, model_type)
    check_architecture(architecture, FILE)
    if architectures is not None and architecture not in architectures:
        raise UnsupportedModelError(
            f"{FILE}: architecture {architecture} cannot run yet; supported: {', '.join(sorted(architectures))}"
        )
    hidden, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if not 1 <= n_heads <= 1024:
        raise FormatError(
            f"must be between 1 and 1024, got {n_heads}", field=fields.field("num_attention_heads")
        )
    if model_type == "bert":
        return check_config(_bert(fields, hidden, n_heads), fields.field)
    head_dim = fields.integer("head_dim", _HEAD_DIM.get(model_type, hidden // n_heads))
    n_layers = fields.integer("num_hidden_layers")
    context = fields.integer("max_position_embeddings", _CONTEXT[model_type])
    gemma = architecture.startswith("gemma")
    theta, local_theta, scaling = _rope(fields, model_type, context)
    return check_config(
        ModelConfig(
            architecture=architecture,
            n_layers=n_layers,
            hidden_size=hidden,
            n_heads=n_heads,
            n_kv_heads=fields.integer("num_key_value_heads", n_heads),
            head_dim=head_dim,
            ffn_size=fields.integer("intermediate_size"),
            vocab_size=fields.integer("vocab_size"),
            context_length=context,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_dim=_rope_dim(fields, head_dim),
            rope_scaling=scaling,
            rope_local_theta=local_theta,
            tied_embeddings=fields.boolean("tie_word_embeddings", gemma),
            hidden_act=_activation(fields, gemma),
            embedding_scale=math.sqrt(hidden) if gemma else 1.0,
            **_family(fields, model_type, n_layers, head_dim),
        ),
        lambda name: fields.field(_KEYS.get(name, name)),
    )


def _bert(fields: Fields, hidden: int, n_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="bert",
        n_layers=fields.integer("num_hidden_layers", 12),
        hidden_size=hidden,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=hidden // n_heads,
        ffn_size=fields.integer("intermediate_size", 3072),
        vocab_size=fields.integer("vocab_size", 30522),
        **bert_config(fields),
    )


def _activation(fields: Fields, gemma: bool) -> str:
    if gemma:
        # hidden_act in gemma's first files says "gelu" and means the tanh form; the newer key is exact.
        key, name = "hidden_activation", fields.text("hidden_activation", "gelu_pytorch_tanh")
    else:
        key, name = "hidden_act", fields.text("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.field(key)}: {shown(name)} is not one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _rope_dim(fields: Fields, head_dim: int) -> int:
    """0 for the whole head, else the rotated width."""
    rope = fields.object("rope_parameters")
    share = fields.number("partial_rotary_factor", 1.0)
    if rope is not None:
        share = rope.number("partial_rotary_factor", share)
    rotated = int(head_dim * share)
    return 0 if rotated == head_dim else rotated


def _family(fields: Fields, model_type: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """What differs by family: windows, soft caps, attention scale."""
    if model_type == "gemma2":
        return {
            **_windows(fields, n_layers, fields.integer("sliding_window", 4096), 2),
            "attention_softcap": _softcap(fields, "attn_logit_softcapping", 50.0),
            "final_softcap": _softcap(fields, "final_logit_softcapping", 30.0),
            "attention_scale": _query_scale(fields),
        }
    if model_type == "gemma3_text":
        pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
        return {
            **_windows(fields, n_layers, fields.integer("sliding_window", 4096), pattern),
            "attention_softcap": _softcap(fields, "attn_logit_softcapping", 0.0),
            "final_softcap": _softcap(fields, "final_logit_softcapping", 0.0),
            "attention_scale": _query_scale(fields),
        }
    if model_type == "mistral":
        return {
            "sliding_window": fields.integer("sliding_window", 0 if fields.null("sliding_window") else 4096)
        }
    if model_type == "mixtral":
        return {
            "sliding_window": fields.integer("sliding_window", 0),
            "n_experts": fields.integer("num_local_experts", 8),
            "n_experts_used": fields.integer("num_experts_per_tok", 2),
        }
    if model_type == "phi3":
        return {"sliding_window": fields.integer("sliding_window", 0)}
    if model_type in ("qwen2", "qwen3", "qwen3_moe") and fields.boolean("use_sliding_window", False):
        first = fields.integer("max_window_layers", n_layers)
        if first < n_layers:
            raise UnsupportedModelError(
                f"{fields.field('max_window_layers')}: windows from layer {first} on are not supported"
            )
    return _qwen3_experts(fields) if model_type == "qwen3_moe" else {}


def _qwen3_experts(fields: Fields) -> dict[str, Any]:
    if fields.integer("decoder_sparse_step", 1) != 1 or not fields.empty("mlp_only_layers"):
        raise UnsupportedModelError(
            f"{fields.field('mlp_only_layers')}: a model that has experts in some layers only is not supported"
        )
    # "num_experts" became "num_local_experts"; files of both ages are about.
    return {
        "n_experts": fields.integer("num_local_experts", fields.integer("num_experts", 128)),
        "n_experts_used": fields.integer("num_experts_per_tok", 8),
        "expert_ffn_size": fields.integer("moe_intermediate_size", 768),
        "norm_expert_weights": fields.boolean("norm_topk_prob", False),
    }


def _query_scale(fields: Fields) -> float:
    scalar = fields.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise FormatError(f"must be above 0, got {scalar}", field=fields.field("query_pre_attn_scalar"))
    return 1.0 / math.sqrt(scalar)


def _softcap(fields: Fields, key: str, default: float) -> float:
    return 0.0 if fields.null(key) else fields.number(key, default)


def _windows(fields: Fields, n_layers: int, window: int, pattern: int) -> dict[str, int]:
    """Window and pattern; ``layer_types``, where given, must be a pattern of "every n-th layer is global"."""
    types = fields.strings("layer_types")
    if types is not None:
        where = fields.field("layer_types")
        if len(types) != n_layers:
            raise FormatError(f"has {len(types)} entries for {n_layers} layers", field=where)
        unknown = next((kind for kind in types if kind not in ("sliding_attention", "full_attention")), None)
        if unknown is not None:
            raise UnsupportedModelError(
                f"{where}: {shown(unknown)} is not sliding_attention or full_attention"
            )
        full = [kind == "full_attention" for kind in types]
        pattern = full.index(True) + 1 if True in full else n_layers + 1
        if full != [(layer + 1) % pattern == 0 for layer in range(n_layers)]:
            raise UnsupportedModelError(f"{where}: only 'every n-th layer is global' is supported")
    return {"sliding_window": window, "sliding_window_pattern": pattern}


def _rope(fields: Fields, model_type: str, context: int) -> tuple[float, float, RopeScaling | None]:
    """(theta, theta of windowed layers or 0, scaling) from the older keys or from ``rope_parameters``."""
    theta = fields.number("rope_theta", 1e6 if model_type == "gemma3_text" else 1e4)
    local = fields.number("rope_local_base_freq", 1e4) if model_type == "gemma3_text" else 0.0
    rope = fields.object("rope_parameters")
    if rope is not None:
        windowed, whole = rope.object("sliding_attention"), rope.object("full_attention")
        if windowed is not None:
            if _scaling(windowed, context, context) is not None:
                raise UnsupportedModelError(
                    f"{windowed.field('rope_type')}: scaled windowed layers are not supported"
                )
            local = windowed.number("rope_theta", local)
        rope = whole if whole is not None else rope
        theta = rope.number("rope_theta", theta)
    else:
        rope = fields.object("rope_scaling")
    original = fields.integer("original_max_position_embeddings", context)
    return theta, local, None if rope is None else _scaling(rope, original, context)


def _scaling(rope: Fields, original: int, served: int) -> RopeScaling | None:
    # "rope_type" replaced "type"; files of both ages are about, and some state both.
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=rope.number("factor"),
            original_context=rope.integer("original_max_position_embeddings"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        factor = rope.number("factor")
        return RopeScaling(
            "yarn",
            factor=factor,
            original_context=rope.integer("original_max_position_embeddings", original),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=_yarn_attention(rope, factor),
        )
    if kind in ("longrope", "su"):  # its name while it was new
        return _longrope(rope, original, served)
    key = "rope_type" if "rope_type" in rope else "type"
    raise UnsupportedModelError(
        f"{rope.field(key)}: {shown(kind)} is not supported; Toque runs default, linear, llama3, yarn, longrope"
    )


def _longrope(rope: Fields, original: int, served: int) -> RopeScaling:
    original = rope.integer("original_max_position_embeddings", original)
    if original < 2:
        raise FormatError(
            f"must be at least 2, got {original}", field=rope.field("original_max_position_embeddings")
        )
    scale = served / original
    own = math.sqrt(1.0 + math.log(scale) / math.log(original)) if scale > 1.0 else 1.0
    return RopeScaling(
        "longrope",
        original_context=original,
        attention_factor=rope.number("attention_factor", own),
        long_factors=rope.numbers("long_factor"),
        short_factors=rope.numbers("short_factor"),
    )


def _yarn_attention(rope: Fields, factor: float) -> float | None:
    """The stated factor, or the ratio of the two ``mscale`` values, or None for yarn's own."""
    if "attention_factor" in rope:
        return rope.number("attention_factor")
    if "mscale" in rope and "mscale_all_dim" in rope:
        log = 0.1 * math.log(factor) if factor > 1 else 0.0
        return (rope.number("mscale") * log + 1.0) / (rope.number("mscale_all_dim") * log + 1.0)
    return None
