"""Phi 3 and 3.5 with their plain (4k) rotation: the plain decoder. Readers split the fused qkv and gate/up matrices."""

from __future__ import annotations

from toque.errors import UnsupportedModelError
from toque.graph.ir import Graph
from toque.graph.recorder import Recorder
from toque.models.blocks import decoder
from toque.types import ModelConfig

ARCHITECTURES = ("phi3",)


def build(config: ModelConfig, rec: Recorder) -> Graph:
    if rec.has("rope_factors_long.weight"):
        raise UnsupportedModelError(
            "rope_factors_long.weight: phi3 with a long-context rotation (128k) is not supported yet",
            param="rope_factors_long.weight",
        )
    return decoder(config, rec)
