"""Token ids to text while they arrive, never showing a part of a character.

The pieces add up to exactly what decoding all ids at once gives:

* Byte-level vocabularies: the bytes of all tokens are one UTF-8 string; an unfinished character waits for its rest, and
  an invalid sequence becomes U+FFFD as soon as it is certain.
* SentencePiece vocabularies: neighbouring byte tokens (``<0xNN>``) are decoded together, and if the run is not valid
  UTF-8 every byte of it becomes U+FFFD. So a run waits for its end. The first space of a text is dropped where the
  vocabulary adds one when encoding.
* Others: the text so far is decoded anew each time.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from toque.text.byte_alphabet import ByteCoding
from toque.text.tokenizer import TokenCodec

REPLACEMENT = "\ufffd"
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Feed tokens one at a time with :meth:`push`; :meth:`finish` gives what is still held back.

    With a ``context`` (the last ids of the prompt), the text continues the prompt: a first space is kept, and a
    character begun there is finished here. Without one it is a text of its own.
    """

    def __init__(self, codec: TokenCodec, *, skip_special: bool = True, context: Sequence[int] = ()) -> None:
        self._codec = codec
        self._skip_special = skip_special
        self._utf8 = _utf8_decoder("replace")
        self._run = bytearray()
        self._strip = codec.strip_first_space
        self._ids: list[int] = []
        self._shown = ""
        self.push = {
            ByteCoding.BYTE_LEVEL: self._push_bytes,
            ByteCoding.BYTE_FALLBACK: self._push_fallback,
            ByteCoding.OTHER: self._push_any,
        }[codec.coding]
        for token in context:
            self.push(token)
        if context:
            self._strip = False
            # Of a run of byte tokens that ends the prompt, only an unfinished character is continued.
            pending = _utf8_decoder("replace")
            pending.decode(bytes(self._run))
            self._run = bytearray(pending.getstate()[0])

    def finish(self) -> str:
        """The rest of the text: an unfinished character becomes U+FFFD."""
        if self._codec.coding is ByteCoding.BYTE_LEVEL:
            return self._utf8.decode(b"", True)
        if self._codec.coding is ByteCoding.BYTE_FALLBACK:
            return self._first(self._flush_run())
        text = self._codec.decode(self._ids, skip_special=self._skip_special)
        rest, self._shown = text[len(self._shown) :], text
        return rest

    def _push_bytes(self, token: int) -> str:
        if self._skip_special and self._codec.is_special(token):
            return ""
        return self._utf8.decode(self._codec.token_bytes(token))

    def _push_fallback(self, token: int) -> str:
        codec = self._codec
        if self._skip_special and codec.is_special(token):
            return ""
        byte = codec.fallback_byte(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        piece = codec.token_bytes(token)
        if not piece:
            return ""
        text = piece.decode("utf-8", "replace")
        if self._run:
            text = self._flush_run() + text
        return self._first(text) if self._strip else text

    def _flush_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _push_any(self, token: int) -> str:
        self._ids.append(token)
        text = self._codec.decode(self._ids, skip_special=self._skip_special)
        if text.endswith(REPLACEMENT) or not text.startswith(self._shown):
            return ""
        rest, self._shown = text[len(self._shown) :], text
        return rest
