"""Llama 1-3, Mistral, SmolLM, TinyLlama, Yi and every other checkpoint that calls itself ``llama``.

Pre-norm decoder: ``x += attention(norm(x))``, ``x += ffn(norm(x))``, rotary positions, grouped-query
attention, SwiGLU. Mistral's sliding window applies to every layer.
"""

from __future__ import annotations

from toque.errors import UnsupportedModelError
from toque.graph.ir import Graph
from toque.graph.recorder import Recorder
from toque.models import blocks
from toque.types import ModelConfig

ARCHITECTURES = ("llama", "mistral")


def build(config: ModelConfig, rec: Recorder) -> Graph:
    if config.n_experts:
        raise UnsupportedModelError(
            f"{config.architecture} with {config.n_experts} experts is not supported yet",
            param="n_experts",
        )
    rope = blocks.model_rope(config)
    x = rec.embed("token_embd.weight", config.hidden_size)
    for layer in range(config.n_layers):
        prefix = f"blk.{layer}"
        normed = rec.rms_norm(x, f"{prefix}.attn_norm.weight", eps=config.norm_eps)
        attended = blocks.self_attention(rec, config, prefix, normed, rope, window=config.sliding_window)
        x = rec.add(x, attended)
        normed = rec.rms_norm(x, f"{prefix}.ffn_norm.weight", eps=config.norm_eps)
        x = rec.add(x, blocks.gated_ffn(rec, config, prefix, normed, act=config.hidden_act))
    return rec.finish(blocks.lm_head(rec, config, x))
