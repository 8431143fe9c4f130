"""Phi 3, 3.5 and 4-mini: the plain decoder. Readers split the fused qkv and gate/up matrices.

The long-context ones (128k) state two sets of rotary factors. Which one holds is decided by the context that is
served, not by the length of each prompt: keys that are cached once stay right.
"""

from __future__ import annotations

from toque.errors import UnsupportedModelError
from toque.graph.ir import Graph
from toque.graph.recorder import Recorder
from toque.models.blocks import decoder
from toque.types import ModelConfig

ARCHITECTURES = ("phi3",)


def build(config: ModelConfig, rec: Recorder) -> Graph:
    scaling = config.rope_scaling
    if rec.has("rope_factors_long.weight") and (scaling is None or scaling.kind != "longrope"):
        raise UnsupportedModelError(
            "rope_factors_long.weight: the file scales its rotary frequencies with a tensor whose values were not read",
            param="rope_factors_long.weight",
        )
    return decoder(config, rec)
