"""A tokenizer from a Hugging Face folder: ``tokenizer.json`` and the small files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.errors import FormatError, UnsupportedModelError
from toque.text.byte_alphabet import ByteCoding, coverage
from toque.text.end_tokens import turn_end_ids
from toque.text.hf_files import read_json, read_text
from toque.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

MAX_TOKENIZER = 256 << 20  # bytes of tokenizer.json
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Build the tokenizer. Raises FormatError naming the file that is damaged, UnsupportedModelError without one."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedModelError(
            f"{folder.name} has no tokenizer.json; convert its tokenizer with transformers' save_pretrained",
            param="tokenizer.json",
        )
    text = read_text(file, MAX_TOKENIZER)
    described = _described(text)
    config = read_json(folder / "tokenizer_config.json")
    named = _named_tokens(config, read_json(folder / "special_tokens_map.json"))
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise FormatError(f"cannot be used ({str(error)[:120]})", field=file.name) from error
    backend.no_truncation()
    backend.no_padding()
    missing = [
        AddedToken(t, special=True, normalized=False)
        for t in named.values()
        if backend.token_to_id(t) is None
    ]
    backend.add_special_tokens(missing)
    _set_bos(backend, config, named)
    added = backend.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}
    special |= {index for index in map(backend.token_to_id, named.values()) if index is not None}
    ends = _end_ids(folder, backend, named)
    template = config.get("chat_template")
    marked = {token.content: index for index, token in added.items()}
    ends |= turn_end_ids(marked, template if isinstance(template, str) else _jinja(folder))
    coding = _coding(described)
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    longest, dropped = _longest(coding, vocab, added.values())
    bos = named.get("bos_token")
    return Tokenizer(
        backend,
        coding=coding,
        vocab_size=size,
        special_ids=frozenset(special),
        eos_ids=frozenset(end for end in ends if end < size),
        bos_id=backend.token_to_id(bos) if bos else None,
        strip_first_space=_strips_first_space(described),
        special_texts=named,
        longest_token=longest,
        dropped=dropped,
    )


def _described(text: str) -> dict[str, Any]:
    try:
        described = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"is not valid JSON ({str(error)[:80]})", field="tokenizer.json") from error
    if not isinstance(described, dict) or not isinstance(described.get("model"), dict):
        raise FormatError("must be an object with a model", field="tokenizer.json")
    for index, token in enumerate(described.get("added_tokens") or ()):
        # An empty token would match between any two characters, without end.
        if not isinstance(token, dict) or not token.get("content"):
            raise FormatError("an added token is empty", field=f"tokenizer.json added_tokens[{index}]")
    return described


def _named_tokens(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMES:
        value = config.get(name, special_map.get(name))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and value:
            named[name] = value
    return named


def _set_bos(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """Follow an explicit ``add_bos_token``, which says more than the post-processor in the file."""
    from tokenizers import processors

    if not isinstance(config.get("add_bos_token"), bool) and not isinstance(
        config.get("add_eos_token"), bool
    ):
        return
    bos, eos = named.get("bos_token"), named.get("eos_token")
    first = [bos] if bos and config.get("add_bos_token") else []
    last = [eos] if eos and config.get("add_eos_token") else []
    tokens = [(token, backend.token_to_id(token)) for token in {*first, *last}]
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last], special_tokens=tokens
    )


def _end_ids(folder: Path, backend: Backend, named: dict[str, str]) -> set[int]:
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        given = read_json(folder / name).get("eos_token_id")
        ids = given if isinstance(given, list) else [given]
        ends |= {
            value for value in ids if isinstance(value, int) and not isinstance(value, bool) and value >= 0
        }
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return ends | ({eos} if eos is not None else set())


def _jinja(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    return read_text(path, 4 << 20) if path.is_file() else ""


def _decoders(described: dict[str, Any]) -> list[dict[str, Any]]:
    decoder = described.get("decoder") or {}
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return [step for step in steps or [] if isinstance(step, dict)]


def _coding(described: dict[str, Any]) -> ByteCoding:
    kinds = [step.get("type") for step in _decoders(described)]
    if kinds == ["ByteLevel"]:
        return ByteCoding.BYTE_LEVEL
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return ByteCoding.BYTE_FALLBACK
    return ByteCoding.OTHER


def _strips_first_space(described: dict[str, Any]) -> bool:
    strip = [step for step in _decoders(described) if step.get("type") == "Strip"]
    return bool(strip) and strip[0].get("content") == " " and strip[0].get("start") == 1


def _longest(coding: ByteCoding, vocab: dict[str, int], added: Any) -> tuple[int, str]:
    if any(token.lstrip or token.rstrip for token in added):  # these take any number of spaces with them
        return 0, ""
    if coding is ByteCoding.OTHER:
        return 0, ""
    complete, dropped = coverage(vocab)
    if coding is ByteCoding.BYTE_FALLBACK:
        complete, dropped = all(f"<0x{byte:02X}>" in vocab for byte in range(256)), ""
    return (max(map(len, vocab)) if complete else 0), dropped
