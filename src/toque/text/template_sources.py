"""Where a checkpoint keeps its chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.errors import FormatError
from toque.text.compiled_template import MAX_SOURCE
from toque.text.hf_files import read_json, read_text

if TYPE_CHECKING:
    from toque.formats.checkpoint import Checkpoint


def template_sources(checkpoint: Checkpoint) -> tuple[dict[str, str], str]:
    """Templates by name (``default`` first of all), and the field or file they came from."""
    named = _from_gguf(checkpoint.metadata)
    if named:
        return named, "tokenizer.chat_template"
    folder = checkpoint.folder
    if folder is None:
        return {}, "chat_template"
    return _from_folder(folder)


def _from_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    default = metadata.get("tokenizer.chat_template")
    if default is not None:
        named["default"] = _text(default, "tokenizer.chat_template")
    for name in list(metadata.get("tokenizer.chat_templates") or ())[:16]:
        key = f"tokenizer.chat_template.{name}"
        if key in metadata:
            named[str(name)] = _text(metadata[key], key)
    return named


def _from_folder(folder: Path) -> tuple[dict[str, str], str]:
    file = folder / "chat_template.jinja"
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))[:16]
    if file.is_file() or more:
        named = {path.stem: read_text(path, 4 * MAX_SOURCE) for path in more}
        if file.is_file():
            named["default"] = read_text(file, 4 * MAX_SOURCE)
        return named, "chat_template.jinja"
    field = "tokenizer_config.json chat_template"
    given = read_json(folder / "tokenizer_config.json").get("chat_template")
    if given is None:
        return {}, field
    if isinstance(given, str):
        return {"default": given}, field
    if not isinstance(given, list):
        raise FormatError("must be a string or a list of named templates", field=field)
    named = {}
    for entry in given[:16]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise FormatError("each entry must have a name and a template", field=field)
        named[entry["name"]] = _text(entry.get("template"), field)
    return named, field


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise FormatError("must be a string", field=field)
    return value
