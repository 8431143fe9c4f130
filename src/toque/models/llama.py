"""Llama 1-3, Mistral, Mixtral, SmolLM, TinyLlama, Yi and every other checkpoint that calls itself ``llama``.

The plain pre-norm decoder: rotary positions, grouped-query attention, SwiGLU (Mixtral: eight of it, two per token);
biases where the file has them. Mistral's sliding window applies to every layer.
"""

from __future__ import annotations

from toque.graph.ir import Graph
from toque.graph.recorder import Recorder
from toque.models.blocks import decoder
from toque.types import ModelConfig

ARCHITECTURES = ("llama", "mistral")


def build(config: ModelConfig, rec: Recorder) -> Graph:
    return decoder(config, rec)
