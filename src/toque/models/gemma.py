"""Gemma 1, 2 and 3.

Embeddings scaled by sqrt(hidden) (on the input's side only, although the output matrix is the same table), GELU
gates. Gemma 2 and 3 also norm what attention and ffn return before adding it, and let most layers see a sliding
window only; every ``sliding_window_pattern``-th layer sees everything. Gemma 2 caps attention scores and logits;
Gemma 3 norms the heads of q and k instead and rotates its windowed layers by another theta.
"""

from __future__ import annotations

from toque.graph.ir import Graph
from toque.graph.recorder import Recorder
from toque.graph.rope import rope_spec
from toque.models import blocks
from toque.types import ModelConfig

ARCHITECTURES = ("gemma", "gemma2", "gemma3")


def build(config: ModelConfig, rec: Recorder) -> Graph:
    if config.architecture == "gemma":
        return blocks.decoder(config, rec)
    head_norms = config.architecture == "gemma3"
    eps = config.norm_eps
    rope = local_rope = blocks.model_rope(config, rec)
    if config.rope_local_theta:
        local_rope = rope_spec(config.rope_local_theta, config.rope_dim or config.head_dim)
    x = rec.embed("token_embd.weight", config.hidden_size, scale=config.embedding_scale)
    for layer in range(config.n_layers):
        name = f"blk.{layer}"
        everything = config.sliding_window_pattern and (layer + 1) % config.sliding_window_pattern == 0
        normed = rec.rms_norm(x, f"{name}.attn_norm.weight", eps=eps)
        attended = blocks.self_attention(
            rec,
            config,
            name,
            normed,
            rope if everything else local_rope,
            window=0 if everything else config.sliding_window,
            head_norms=head_norms,
        )
        x = rec.add(x, rec.rms_norm(attended, f"{name}.post_attention_norm.weight", eps=eps))
        normed = rec.rms_norm(x, f"{name}.ffn_norm.weight", eps=eps)
        hidden = blocks.gated_ffn(rec, config, name, normed)
        x = rec.add(x, rec.rms_norm(hidden, f"{name}.post_ffw_norm.weight", eps=eps))
    return rec.finish(blocks.lm_head(rec, config, x))
