"""Llama 1-3, Mistral, SmolLM, TinyLlama, Yi and every other checkpoint that calls itself ``llama``.

The plain pre-norm decoder: rotary positions, grouped-query attention, SwiGLU; biases where the file has them.
Mistral's sliding window applies to every layer.
"""

from __future__ import annotations

from toque.errors import UnsupportedModelError
from toque.graph.ir import Graph
from toque.graph.recorder import Recorder
from toque.models.blocks import decoder
from toque.types import ModelConfig

ARCHITECTURES = ("llama", "mistral")


def build(config: ModelConfig, rec: Recorder) -> Graph:
    if config.n_experts:
        raise UnsupportedModelError(
            f"{config.architecture} with {config.n_experts} experts is not supported yet", param="n_experts"
        )
    return decoder(config, rec)
