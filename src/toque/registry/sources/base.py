"""What every source gives back: files of one model, lying in a working folder, ready to be stored."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from toque.errors import DownloadError
from toque.registry.version import NO_ORIGIN, Origin

MODEL_FILES = frozenset(
    {
        "adapter_config.json",
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "preprocessor_config.json",
    }
)
"""What a safetensors model consists of beside its weights. Code and pickles are never taken."""


LINEAGE_FILES = frozenset(
    {
        "README.md",
        "trainer_state.json",
        "all_results.json",
        "train_results.json",
        "eval_results.json",
        "adapter_config.json",
        "config.json",
    }
)
"""What `toque.registry.training` reads of a model's making; small, and no part of the model itself."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One file: ``path`` where it lies now, ``name`` its place in the model (one plain name, or folder/name)."""

    name: str
    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """All files of a model and what its source says about it. ``revision`` pins what was fetched.

    ``resolved`` is the source's URI with everything in it that pins, where that differs from what was asked for.
    """

    files: tuple[Fetched, ...]
    revision: str = ""
    license: str = ""
    origin: Origin = NO_ORIGIN
    resolved: str = ""


def wanted(name: str) -> bool:
    """Whether a file of a model folder is worth having: weights in safe formats, configuration, tokenizer."""
    folder, _, base = name.rpartition("/")
    if folder.count("/") or not plain(name):
        return False
    if folder:  # sentence-transformers keep one small file in a folder for each module
        return base == "config.json"
    return base in MODEL_FILES or base.endswith(".safetensors")


def plain(name: str) -> bool:
    """Whether a relative path consists of plain, visible file names only."""
    return (
        bool(name)
        and len(name) <= 255
        and name.isprintable()
        and all(part not in ("", ".", "..") and not set(part) & set('\\:*?"<>|') for part in name.split("/"))
    )


def chosen_files(names: list[str], where: str) -> list[str]:
    """The files of a folder's model: a safetensors model if it is one, else its usual GGUF file.

    Raises DownloadError that lists what there is.
    """
    if any(name in names for name in ("config.json", "adapter_config.json")) and any(
        name.endswith(".safetensors") and "/" not in name for name in names
    ):
        return sorted(name for name in names if wanted(name))
    return quantized_choice(names, "", where)


def quantized_choice(names: list[str], selector: str, where: str) -> list[str]:
    """The GGUF file (or the parts of one) that ``selector`` means: a name, a quantization, or "" for the usual one.

    Raises DownloadError that lists what there is.
    """
    ggufs = sorted(name for name in names if name.lower().endswith(".gguf") and plain(name))
    models: dict[str, list[str]] = {}
    for name in ggufs:
        stem = os.path.basename(name)
        key = stem[: -len("-00001-of-00001.gguf")] if _is_part(stem) else stem.removesuffix(".gguf")
        models.setdefault(key, []).append(name)
    if selector in names:
        return next((parts for parts in models.values() if selector in parts), [selector])
    tokens = [selector.lower()] if selector else ["q4_k_m"]
    matches = [
        parts for key, parts in models.items() if any(_ends_with(key.lower(), token) for token in tokens)
    ]
    if len(matches) == 1:
        return matches[0]
    if not selector and len(models) == 1:
        return next(iter(models.values()))
    listed = ", ".join(sorted(models)[:20]) or "no GGUF file"
    what = f"{selector!a} does not name one file" if selector else "there are several models"
    raise DownloadError(f"{where}: {what}; it has {listed}")


def _is_part(name: str) -> bool:
    tail = name[-len("-00001-of-00001.gguf") :]
    return tail[0:1] == "-" and tail[1:6].isdecimal() and tail[6:10] == "-of-" and tail[10:15].isdecimal()


def _ends_with(key: str, token: str) -> bool:
    """Whether a file's stem ends in a quantization, set off by a separator: ``model-Q4_K_M``, ``model.q4_k_m``."""
    return key == token or (key.endswith(token) and key[-len(token) - 1] in "-._")
