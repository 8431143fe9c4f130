"""The pieces that most decoders share, written once against the recorder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from toque.errors import FormatError, UnsupportedModelError
from toque.graph.ir import Graph, RopeSpec, Value
from toque.graph.recorder import Recorder
from toque.graph.rope import rope_spec
from toque.types import ModelConfig


def decoder(config: ModelConfig, rec: Recorder, *, head_norms: bool = False) -> Graph:
    """The pre-norm decoder: ``x += attention(norm(x))``, ``x += ffn(norm(x))``, final norm, output matrix."""
    rope = model_rope(config, rec)
    x = rec.embed("token_embd.weight", config.hidden_size, scale=config.embedding_scale)
    for layer in range(config.n_layers):
        name = f"blk.{layer}"
        normed = rec.rms_norm(x, f"{name}.attn_norm.weight", eps=config.norm_eps)
        window = config.sliding_window
        x = rec.add(x, self_attention(rec, config, name, normed, rope, window=window, head_norms=head_norms))
        normed = rec.rms_norm(x, f"{name}.ffn_norm.weight", eps=config.norm_eps)
        ffn = experts_ffn if config.n_experts else gated_ffn
        x = rec.add(x, ffn(rec, config, name, normed))
    return rec.finish(lm_head(rec, config, x))


def model_rope(config: ModelConfig, rec: Recorder) -> RopeSpec:
    """The rotation of the model's (global) attention layers.

    ``extra["rope_factors"]`` holds the values of a GGUF file's ``rope_freqs.weight``, where it has one.
    """
    factors = cast("Sequence[float] | None", config.extra.get("rope_factors"))
    if factors is None and rec.has("rope_freqs.weight"):
        raise UnsupportedModelError(
            "rope_freqs.weight: the file scales its rotary frequencies with a tensor whose values were not read",
            param="rope_freqs.weight",
        )
    dim = config.rope_dim or config.head_dim
    return rope_spec(config.rope_theta, dim, config.rope_scaling, factors, config.context_length)


def self_attention(
    rec: Recorder,
    config: ModelConfig,
    prefix: str,
    x: Value,
    rope: RopeSpec | None,
    *,
    window: int = 0,
    head_norms: bool = False,
    causal: bool = True,
) -> Value:
    """q/k/v, optional head-wise norms, rotation, attention and the output projection.

    Biases where the file has them.
    """
    n_heads, n_kv_heads, head_dim = config.n_heads, config.n_kv_heads, config.head_dim
    q = projection(rec, x, f"{prefix}.attn_q", n_heads * head_dim)
    k = projection(rec, x, f"{prefix}.attn_k", n_kv_heads * head_dim)
    v = projection(rec, x, f"{prefix}.attn_v", n_kv_heads * head_dim)
    if head_norms:
        q = rec.rms_norm(q, f"{prefix}.attn_q_norm.weight", eps=config.norm_eps, group=head_dim)
        k = rec.rms_norm(k, f"{prefix}.attn_k_norm.weight", eps=config.norm_eps, group=head_dim)
    if rope is not None:
        q = rec.rope(q, head_dim=head_dim, rope=rope)
        k = rec.rope(k, head_dim=head_dim, rope=rope)
    attended = rec.attention(
        q,
        k,
        v,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        scale=config.attention_scale,
        window=window,
        softcap=config.attention_softcap,
        causal=causal,
    )
    return projection(rec, attended, f"{prefix}.attn_output", config.hidden_size)


def experts_ffn(rec: Recorder, config: ModelConfig, prefix: str, x: Value) -> Value:
    return rec.moe(
        x,
        router=f"{prefix}.ffn_gate_inp.weight",
        gate=f"{prefix}.ffn_gate_exps.weight",
        up=f"{prefix}.ffn_up_exps.weight",
        down=f"{prefix}.ffn_down_exps.weight",
        n_experts=config.n_experts,
        n_used=config.n_experts_used,
        ffn_size=config.expert_ffn_size or config.ffn_size,
        act=config.hidden_act,
        norm=config.norm_expert_weights,
    )


def gated_ffn(rec: Recorder, config: ModelConfig, prefix: str, x: Value) -> Value:
    gate = projection(rec, x, f"{prefix}.ffn_gate", config.ffn_size)
    up = projection(rec, x, f"{prefix}.ffn_up", config.ffn_size)
    return projection(
        rec, rec.act_mul(gate, up, act=config.hidden_act), f"{prefix}.ffn_down", config.hidden_size
    )


def projection(rec: Recorder, x: Value, name: str, width: int) -> Value:
    return rec.linear(x, f"{name}.weight", width, bias=rec.optional(f"{name}.bias"))


def lm_head(rec: Recorder, config: ModelConfig, x: Value) -> Value:
    """Final norm and logits of the wanted rows only; the output matrix is the embedding table when they are tied.

    Of a model made for embeddings: the pooled final norms.
    """
    if config.pooling:
        return rec.pool(rec.rms_norm(x, "output_norm.weight", eps=config.norm_eps), kind=config.pooling)
    x = rec.rms_norm(rec.select_rows(x), "output_norm.weight", eps=config.norm_eps)
    if config.tied_embeddings:
        head = "token_embd.weight"
    elif rec.has("output.weight"):
        head = "output.weight"
    else:
        raise FormatError(
            "the checkpoint has no output matrix (lm_head.weight) and does not tie it to the embeddings",
            field="output.weight",
        )
    logits = rec.linear(x, head, config.vocab_size)
    return rec.softcap(logits, cap=config.final_softcap) if config.final_softcap else logits
