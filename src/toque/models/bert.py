"""BERT encoders (MiniLM, BGE, E5, GTE …): a vector for a text.

Learned positions, every token sees every other, layer norms after each addition, a plain GELU ffn; then the tokens'
vectors are pooled into one. A text is always the first of the two segments that token types tell apart.
"""

from __future__ import annotations

from toque.graph.ir import Graph, Value
from toque.graph.recorder import Recorder
from toque.models.blocks import projection, self_attention
from toque.types import ModelConfig

ARCHITECTURES = ("bert",)


def build(config: ModelConfig, rec: Recorder) -> Graph:
    def norm(x: Value, name: str) -> Value:
        return rec.layer_norm(x, f"{name}.weight", f"{name}.bias", eps=config.norm_eps)

    hidden = config.hidden_size
    x = rec.embed("token_embd.weight", hidden)
    x = rec.add(x, rec.embed("token_types.weight", hidden, ids="first"))
    x = rec.add(x, rec.embed("position_embd.weight", hidden, ids="positions"))
    x = norm(x, "token_embd_norm")
    for layer in range(config.n_layers):
        name = f"blk.{layer}"
        attended = self_attention(rec, config, name, x, None, causal=False)
        x = norm(rec.add(x, attended), f"{name}.attn_output_norm")
        h = rec.gelu(
            projection(rec, x, f"{name}.ffn_up", config.ffn_size), tanh=config.hidden_act == "gelu_tanh"
        )
        x = norm(rec.add(x, projection(rec, h, f"{name}.ffn_down", hidden)), f"{name}.layer_output_norm")
    return rec.finish(rec.pool(x, kind=config.pooling))
