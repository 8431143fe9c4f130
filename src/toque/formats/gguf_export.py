"""A checkpoint from a safetensors folder as the metadata and tensors of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from toque.errors import UnsupportedModelError
from toque.formats.checkpoint import Bytes, Checkpoint, ConvertedRows, TensorData
from toque.formats.gguf import ValueType
from toque.formats.gguf_writer import Metadata
from toque.formats.quantize import as_type
from toque.types import ModelConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def export_metadata(checkpoint: Checkpoint) -> Metadata:
    """The hyper-parameters. Raises UnsupportedModelError for a model that this does not write to GGUF files yet."""
    config = checkpoint.config
    unwritten = [
        name for name in ("rope_scaling", "sliding_window", "n_experts", "pooling") if getattr(config, name)
    ]
    if config.architecture not in ARCHITECTURES or unwritten:
        raise UnsupportedModelError(
            f"{checkpoint.path.name}: {config.architecture}{' with ' + unwritten[0] if unwritten else ''} is not "
            f"written to GGUF files yet; {', '.join(ARCHITECTURES)} without it are"
        )
    prefix = f"{config.architecture}."
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
    return {
        "general.architecture": (ValueType.STRING, config.architecture),
        "general.name": (ValueType.STRING, checkpoint.path.name),
        **{prefix + key: (ValueType.UINT32, value) for key, value in whole.items()},
        prefix + "rope.freq_base": (ValueType.FLOAT32, config.rope_theta),
        prefix + "attention.layer_norm_rms_epsilon": (ValueType.FLOAT32, config.norm_eps),
    }


def export_tensors(checkpoint: Checkpoint) -> Iterator[TensorData]:
    """Vectors as F32; q and k of llamas with the two halves of each head interleaved, as GGUF has them."""
    config = checkpoint.config
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) == 1:
            yield as_type(tensor, "F32")
        elif config.architecture == "llama" and name.endswith((".attn_q.weight", ".attn_k.weight")):
            yield _interleaved(tensor, config)
        else:
            yield tensor


def _interleaved(tensor: TensorData, config: ModelConfig) -> TensorData:
    heads = tensor.shape[0] // config.head_dim
    logical = np.arange(tensor.shape[0]).reshape(heads, 2, config.head_dim // 2)
    order: npt.NDArray[np.int64] = logical.swapaxes(1, 2).reshape(-1)
    raw = tensor.raw

    def rows(first: int, last: int) -> Bytes:
        whole: Bytes = np.asarray(raw)  # a view of the mapped file: float checkpoints are not converted
        return whole[order[first:last]]

    return replace(tensor, raw=ConvertedRows(raw.shape[0], raw.shape[1], rows))
