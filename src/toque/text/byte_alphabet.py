"""The byte alphabet of byte-level BPE vocabularies, and how a token's text becomes bytes.

GPT-2's vocabulary writes each of the 256 bytes as one printable character, so that every token is a valid string:
printable Latin-1 characters stand for themselves, the rest is numbered from U+0100 on in byte order.
SentencePiece vocabularies write a space as ``▁`` and a byte without a token of its own as ``<0xNN>``.
"""

from __future__ import annotations

import re
from collections.abc import Container
from enum import Enum

SPACE = "\u2581"  # ▁
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteCoding(Enum):
    """How a vocabulary spells bytes. It decides how tokens become text again."""

    BYTE_LEVEL = "byte-level"
    BYTE_FALLBACK = "byte-fallback"
    OTHER = "other"  # WordPiece, Unigram …: text only comes from the backend's own decoder


def _alphabet() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in set(plain)]
    characters.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return characters


BYTE_OF: dict[str, int] = _alphabet()
CHARACTER_OF: dict[int, str] = {byte: character for character, byte in BYTE_OF.items()}


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. A token with any character outside the alphabet is plain text."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


def fallback_byte(token: str) -> int | None:
    """The byte that a SentencePiece byte token stands for, or None for any other token."""
    match = BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


def sentencepiece_bytes(token: str) -> bytes:
    byte = fallback_byte(token)
    if byte is not None:
        return bytes([byte])
    return token.replace(SPACE, " ").encode("utf-8", "surrogatepass")


def coverage(vocab: Container[str]) -> tuple[bool, str]:
    """Whether every character gives a byte-level token, and the ASCII characters that give none.

    A vocabulary may lack bytes that its training text never had; the library drops those. All other characters end in
    a byte of 0x80 to 0xBF, so with these present each gives something.
    """
    complete = all(CHARACTER_OF[byte] in vocab for byte in range(0x80, 0xC0))
    return complete, "".join(chr(byte) for byte in range(0x80) if CHARACTER_OF[byte] not in vocab)
