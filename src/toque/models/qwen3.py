"""Qwen 3: the plain decoder with an RMS norm over each head of q and k, before the rotation.

``qwen3moe`` has many small experts (128, eight per token) in place of each ffn.
"""

from __future__ import annotations

from toque.graph.ir import Graph
from toque.graph.recorder import Recorder
from toque.models.blocks import decoder
from toque.types import ModelConfig

ARCHITECTURES = ("qwen3", "qwen3moe")


def build(config: ModelConfig, rec: Recorder) -> Graph:
    return decoder(config, rec, head_norms=True)
