"""A folder's tokenizer as GGUF metadata.

Byte-level BPE becomes ``gpt2``, where GGUF has a name for how it splits words; BPE with byte fallback over ``▁`` for
spaces (SentencePiece's, in Hugging Face's form) becomes ``llama``, whose scores are the order of the merges.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toque.errors import UnsupportedModelError
from toque.formats.gguf import ValueType
from toque.text.byte_alphabet import SPACE
from toque.text.gguf_tokenizer import tokenizer_from_gguf
from toque.text.hf_files import read_json
from toque.text.hf_tokenizer import tokenizer_from_folder
from toque.text.pre_tokenizers import SPLITTINGS, Splitting

_MAX_JSON = 256 << 20
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BYTES = re.compile(r"<0x[0-9A-F]{2}>")
_KEY = "tokenizer.ggml."
# What a written SentencePiece tokenizer must encode as its source does.
_SAMPLE = """def main(args: list[str]) -> int:
    return 42  # The quick brown fox, didn't it?\n\n\n    Très bien! Größe, Ελλάδα, Москва, 東京, 한국, 😀 🤷🏽

It's 1,234.56 on 2024-12-31;   three   spaces,\ttabs, http://example.com/a_b?c=d&e=%20 and CamelCaseWords.
"""

Metadata = dict[str, tuple[ValueType, Any]]


def gguf_tokenizer(folder: Path, vocab_size: int) -> Metadata:
    """``tokenizer.ggml.*`` and the chat template. Raises UnsupportedModelError for what has no place in GGUF."""
    tokenizer = read_json(folder / "tokenizer.json", _MAX_JSON)
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise UnsupportedModelError(f"{folder.name}: only BPE tokenizers are written to GGUF files")
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = np.full(vocab_size, _UNUSED, np.int32)
    for text, number in model["vocab"].items():
        tokens[number], types[number] = text, _NORMAL
    for added in tokenizer.get("added_tokens") or ():
        number = added["id"]
        tokens[number], types[number] = added["content"], _CONTROL if added.get("special") else _USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    config = read_json(folder / "tokenizer_config.json", _MAX_JSON)
    source = tokenizer_from_folder(folder)
    spm = bool(model.get("byte_fallback"))
    metadata: Metadata = {
        f"{_KEY}model": (ValueType.STRING, "llama" if spm else "gpt2"),
        f"{_KEY}tokens": (ValueType.STRING, tokens),
        f"{_KEY}token_type": (ValueType.INT32, types),
        f"{_KEY}add_bos_token": (ValueType.BOOL, source.add_bos),
    }
    if spm:
        types[[number for number, text in enumerate(tokens) if _BYTES.fullmatch(text)]] = _BYTE
        metadata[f"{_KEY}scores"] = (ValueType.FLOAT32, _scores(tokens, merges))
        metadata[f"{_KEY}add_space_prefix"] = (ValueType.BOOL, _space_prefix(tokenizer, folder))
    else:
        metadata[f"{_KEY}pre"] = (ValueType.STRING, _pre(tokenizer, folder))
        metadata[f"{_KEY}merges"] = (ValueType.STRING, merges)
    for name in ("bos", "eos", "pad", "unk"):
        token = config.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content in tokens:
            key = {"pad": "padding", "unk": "unknown"}.get(name, name)
            metadata[f"{_KEY}{key}_token_id"] = (ValueType.UINT32, tokens.index(content))
    if spm:
        unknown = model.get("unk_token")
        if unknown in tokens:
            types[tokens.index(unknown)] = _UNKNOWN
            metadata[f"{_KEY}unknown_token_id"] = (ValueType.UINT32, tokens.index(unknown))
        written = tokenizer_from_gguf({key: value for key, (_, value) in metadata.items()})
        if written.encode(_SAMPLE, add_special=False) != source.encode(_SAMPLE, add_special=False):
            raise UnsupportedModelError(
                f"{folder.name}: as a GGUF file its tokenizer would encode otherwise: merges follow from scores there"
            )
    template = config.get("chat_template")
    file = folder / "chat_template.jinja"
    if file.is_file():
        template = file.read_text(encoding="utf-8")
    if isinstance(template, str):
        metadata["tokenizer.chat_template"] = (ValueType.STRING, template)
    return metadata


def _scores(tokens: list[str], merges: list[str]) -> npt.NDArray[np.float32]:
    """The later a token is merged the lower; what no merge makes is lower still."""
    ranks: dict[str, int] = {}
    for merge in merges:
        ranks.setdefault(merge.replace(" ", "", 1), len(ranks))
    return np.array([-ranks.get(text, len(ranks) + number) for number, text in enumerate(tokens)], np.float32)


def _space_prefix(tokenizer: dict[str, Any], folder: Path) -> bool:
    """Whether a ``▁`` is put before the text. Raises UnsupportedModelError for other preparations of a text."""
    normalizer, splitter = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    prefix, replaced = False, False
    for step in steps:
        if step.get("type") == "Prepend" and step.get("prepend") == SPACE:
            prefix = True
        elif step.get("type") == "Replace" and step.get("pattern") == {"String": " "}:
            replaced = step.get("content") == SPACE
        else:
            raise UnsupportedModelError(f"{folder.name}: GGUF has no name for its normalizer")
    if splitter.get("type") == "Metaspace" and not splitter.get("split", True):
        return prefix or splitter.get("prepend_scheme", "always") != "never"
    # Gemma splits at spaces, of which its normalizer leaves none.
    if not replaced or splitter.get("type") not in (None, "Split"):
        raise UnsupportedModelError(f"{folder.name}: GGUF has no name for how its tokenizer splits words")
    return prefix


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
