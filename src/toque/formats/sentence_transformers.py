"""What a sentence-transformers folder adds to a model: how token vectors become one vector for a text.

``modules.json`` lists the steps: the transformer itself, pooling (whose settings are in a folder of its own), and
perhaps normalisation. ``sentence_bert_config.json`` may say how many tokens of a text count.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.fields import Fields
from toque.formats.folder import exists, inside, parse_value, read_bytes, read_json
from toque.types import ModelConfig

MODULES = "modules.json"
_LENGTH = "sentence_bert_config.json"

_POOLINGS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}


def embedding_config(folder: Path, config: ModelConfig) -> ModelConfig:
    """``config`` with the folder's pooling, where it has a modules.json; unchanged otherwise.

    Raises UnsupportedModelError naming a step that Toque does not have, FormatError for damaged files.
    """
    if not exists(folder, MODULES):
        return config
    pooling, normalize = "", False
    for position, module in enumerate(_modules(folder)):
        field = f"{MODULES}[{position}].type"
        kind = module.text("type").rpartition(".")[2]
        if kind == "Transformer" and position == 0:
            continue
        if kind == "Pooling" and position == 1:
            pooling = _pooling(folder, module.text("path", "1_Pooling"))
        elif kind == "Normalize" and pooling:
            normalize = True
        else:
            raise UnsupportedModelError(
                f"{field}: {kind[:40]!a} as step {position + 1} is not supported; Toque runs Transformer, Pooling, "
                "Normalize"
            )
    if not pooling:
        raise UnsupportedModelError(f"{MODULES}: a model without a Pooling step is not supported")
    length = config.context_length
    if exists(folder, _LENGTH):
        length = min(length, Fields(read_json(folder, _LENGTH), _LENGTH).integer("max_seq_length", length))
    if length < 1:
        raise FormatError(f"must be at least 1, got {length}", field=f"{_LENGTH}.max_seq_length")
    return replace(config, pooling=pooling, normalize_embeddings=normalize, context_length=length)


def _modules(folder: Path) -> list[Fields]:
    value: Any = parse_value(read_bytes(folder, MODULES), MODULES)
    if not isinstance(value, list) or len(value) > 16 or not all(isinstance(item, dict) for item in value):
        raise FormatError("must be a list of at most 16 objects", field=MODULES)
    return [Fields(item, f"{MODULES}[{position}]") for position, item in enumerate(value)]


def _pooling(folder: Path, name: str) -> str:
    where = f"{name}/config.json"
    path = inside(folder, name, f"{MODULES}.path")
    if not path.is_dir():
        raise FormatError("the folder is missing", field=name)
    fields = Fields(read_json(path, "config.json"), where)
    chosen = [key for key in fields.true_keys() if key.startswith("pooling_mode_")]
    if len(chosen) != 1 or chosen[0].removeprefix("pooling_mode_") not in _POOLINGS:
        known = ", ".join(f"pooling_mode_{name}" for name in _POOLINGS)
        raise UnsupportedModelError(
            f"{where}: {', '.join(chosen)[:80] or 'no pooling mode'} is not supported; Toque runs one of {known}"
        )
    return _POOLINGS[chosen[0].removeprefix("pooling_mode_")]
