"""A folder's tokenizer as GGUF metadata, for the byte-level BPE vocabularies whose splitting GGUF has a name for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from toque.errors import UnsupportedModelError
from toque.formats.gguf import ValueType
from toque.text.hf_files import read_json
from toque.text.pre_tokenizers import SPLITTINGS, Splitting

_MAX_JSON = 256 << 20
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
_KEY = "tokenizer.ggml."

Metadata = dict[str, tuple[ValueType, Any]]


def gguf_tokenizer(folder: Path, vocab_size: int) -> Metadata:
    """``tokenizer.ggml.*`` and the chat template. Raises UnsupportedModelError for what has no place in GGUF."""
    tokenizer = read_json(folder / "tokenizer.json", _MAX_JSON)
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UnsupportedModelError(
            f"{folder.name}: only byte-level BPE tokenizers are written to GGUF files"
        )
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = np.full(vocab_size, _UNUSED, np.int32)
    for text, number in model["vocab"].items():
        tokens[number], types[number] = text, _NORMAL
    for added in tokenizer.get("added_tokens") or ():
        number = added["id"]
        tokens[number], types[number] = added["content"], _CONTROL if added.get("special") else _USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    config = read_json(folder / "tokenizer_config.json", _MAX_JSON)
    metadata: Metadata = {
        f"{_KEY}model": (ValueType.STRING, "gpt2"),
        f"{_KEY}pre": (ValueType.STRING, _pre(tokenizer, folder)),
        f"{_KEY}tokens": (ValueType.STRING, tokens),
        f"{_KEY}token_type": (ValueType.INT32, types),
        f"{_KEY}merges": (ValueType.STRING, merges),
        f"{_KEY}add_bos_token": (ValueType.BOOL, bool(config.get("add_bos_token", False))),
    }
    for name in ("bos", "eos", "pad", "unk"):
        token = config.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content in tokens:
            key = {"pad": "padding", "unk": "unknown"}.get(name, name)
            metadata[f"{_KEY}{key}_token_id"] = (ValueType.UINT32, tokens.index(content))
    template = config.get("chat_template")
    file = folder / "chat_template.jinja"
    if file.is_file():
        template = file.read_text(encoding="utf-8")
    if isinstance(template, str):
        metadata["tokenizer.chat_template"] = (ValueType.STRING, template)
    return metadata


def _pre(tokenizer: dict[str, Any], folder: Path) -> str:
    """The name of the splitting that tokenizer.json spells out."""
    found = tokenizer.get("pre_tokenizer") or {}
    steps = found.get("pretokenizers", [found])
    patterns, gpt2, single = [], False, False
    for step in steps:
        kind = step.get("type")
        if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            patterns.append((step.get("pattern") or {}).get("Regex"))
        elif kind == "Digits" and step.get("individual_digits"):
            single = True
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            gpt2 = bool(step.get("use_regex", True))
        else:
            patterns.append(None)  # a step that no splitting has
    normal = tokenizer.get("normalizer") or {}
    wanted = (
        tuple(patterns),
        gpt2,
        single,
        normal.get("type") == "NFC",
        bool(tokenizer["model"].get("ignore_merges")),
    )
    for name, splitting in SPLITTINGS.items():
        if _shape(splitting) == wanted:
            return name
    raise UnsupportedModelError(
        f"{folder.name}: GGUF has no name that Toque knows for how its tokenizer splits words"
    )


def _shape(splitting: Splitting) -> tuple[tuple[str, ...], bool, bool, bool, bool]:
    return splitting.patterns, splitting.gpt2, splitting.single_digits, splitting.nfc, splitting.ignore_merges
