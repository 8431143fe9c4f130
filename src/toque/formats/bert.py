"""BERT-style encoders in Hugging Face's spelling: tensor names and config.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from toque.errors import UnsupportedModelError
from toque.formats.fields import Fields

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_OUTER: Mapping[str, str] = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
_LAYER: Mapping[str, str] = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_HF_OUTER = {ours: hf for hf, ours in _OUTER.items()}
_HF_LAYER = {ours: hf for hf, ours in _LAYER.items()}
_NAME = re.compile(r"(?:bert\.)?encoder\.layer\.(\d{1,5})\.(.+)\.(weight|bias)")


class BertNames:
    """The two spellings of every tensor of a BERT encoder. The pooler and heads for other tasks have none."""

    def canonical(self, name: str) -> str | None:
        match = _NAME.fullmatch(name)
        if match is not None:
            ours = _LAYER.get(match[2])
            return None if ours is None else f"blk.{int(match[1])}.{ours}.{match[3]}"
        stem, _, kind = name.removeprefix("bert.").rpartition(".")
        ours = _OUTER.get(stem)
        return None if ours is None or kind not in ("weight", "bias") else f"{ours}.{kind}"

    def hf(self, name: str) -> str:
        parts = name.split(".")
        if parts[0] == "blk" and len(parts) == 4:
            return f"encoder.layer.{parts[1]}.{_HF_LAYER.get(parts[2], parts[2])}.{parts[3]}"
        return f"{_HF_OUTER.get(parts[0], parts[0])}.{parts[-1]}"


def bert_config(fields: Fields) -> dict[str, Any]:
    """ModelConfig's fields from config.json. Raises UnsupportedModelError for what is not a plain encoder."""
    heads = [
        name for name in fields.strings("architectures") or [] if name.endswith("SequenceClassification")
    ]
    if heads:
        raise UnsupportedModelError(
            f"{fields.field('architectures')}: {heads[0][:60]} scores pairs of texts (a cross-encoder); Toque runs "
            "encoders that make embeddings"
        )
    positions = fields.text("position_embedding_type", "absolute")
    if positions != "absolute":
        raise UnsupportedModelError(
            f"{fields.field('position_embedding_type')}: {positions[:40]!a} is not supported; Toque runs absolute"
        )
    if fields.boolean("is_decoder", False):
        raise UnsupportedModelError(f"{fields.field('is_decoder')}: BERT as a decoder is not supported")
    activation = fields.text("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.field('hidden_act')}: {activation[:40]!a} is not one of {', '.join(ACTIVATIONS)}"
        )
    n_positions = fields.integer("max_position_embeddings", 512)
    return {
        "context_length": n_positions,
        "n_positions": n_positions,
        "n_token_types": fields.integer("type_vocab_size", 2),
        "norm_eps": fields.number("layer_norm_eps", 1e-12),
        "hidden_act": ACTIVATIONS[activation],
        "pooling": "mean",  # of a bare encoder, as sentence-transformers does; a folder may say otherwise
        "normalize_embeddings": False,
    }


def bert_tensors(n_layers: int, hidden: int, ffn: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor besides the three embedding tables; all are needed."""
    for kind in ("weight", "bias"):
        yield f"token_embd_norm.{kind}", (hidden,)
    for layer in range(n_layers):
        prefix = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"{prefix}{name}.weight", (hidden, hidden)
            yield f"{prefix}{name}.bias", (hidden,)
        yield f"{prefix}ffn_up.weight", (ffn, hidden)
        yield f"{prefix}ffn_up.bias", (ffn,)
        yield f"{prefix}ffn_down.weight", (hidden, ffn)
        yield f"{prefix}ffn_down.bias", (hidden,)
        for name in ("attn_output_norm", "layer_output_norm"):
            for kind in ("weight", "bias"):
                yield f"{prefix}{name}.{kind}", (hidden,)
