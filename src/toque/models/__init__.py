"""The architectures. Each file records its forward pass once, against `toque.graph` only."""

from __future__ import annotations

from collections.abc import Callable, Collection

from toque.errors import UnsupportedModelError
from toque.graph.ir import Graph
from toque.graph.recorder import Recorder
from toque.models import bert, gemma, llama, phi3, qwen2, qwen3
from toque.types import ModelConfig

_MODELS = (bert, gemma, llama, phi3, qwen2, qwen3)
_BUILDERS: dict[str, Callable[[ModelConfig, Recorder], Graph]] = {
    name: model.build for model in _MODELS for name in model.ARCHITECTURES
}


def supported() -> tuple[str, ...]:
    """The architecture names that `build_graph` accepts, sorted."""
    return tuple(sorted(_BUILDERS))


def build_graph(config: ModelConfig, tensor_names: Collection[str]) -> Graph:
    """The recorded graph of a checkpoint.

    Raises `UnsupportedModelError` for an architecture or setting that Toque does not run, and `FormatError`
    naming a tensor that the architecture needs and the checkpoint lacks.
    """
    build = _BUILDERS.get(config.architecture)
    if build is None:
        raise UnsupportedModelError(
            f"architecture {config.architecture!r} is not supported; Toque runs {', '.join(supported())}",
            param="architecture",
        )
    return build(config, Recorder(tensor_names))
