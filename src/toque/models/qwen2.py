"""Qwen 2 and 2.5: the plain decoder with biases on q, k and v."""

from __future__ import annotations

from toque.graph.ir import Graph
from toque.graph.recorder import Recorder
from toque.models.blocks import decoder
from toque.types import ModelConfig

ARCHITECTURES = ("qwen2",)


def build(config: ModelConfig, rec: Recorder) -> Graph:
    return decoder(config, rec)
