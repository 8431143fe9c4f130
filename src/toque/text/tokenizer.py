"""Text to token ids and back, the same as Hugging Face does, whichever file the vocabulary came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from toque.errors import FormatError, RequestError
from toque.text.byte_alphabet import ByteCoding, byte_level_bytes, fallback_byte, sentencepiece_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from toque.formats.checkpoint import Checkpoint


class TokenCodec(Protocol):
    """What the detokenizer needs of a tokenizer. :class:`Tokenizer` is one; tests write smaller ones."""

    @property
    def coding(self) -> ByteCoding: ...
    @property
    def strip_first_space(self) -> bool: ...
    def token_bytes(self, token: int) -> bytes: ...
    def fallback_byte(self, token: int) -> int | None: ...
    def is_special(self, token: int) -> bool: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


class Tokenizer:
    """A vocabulary with everything needed to use it. Immutable; safe to share between threads.

    ``encode(text, add_special=True)`` is Hugging Face's ``tokenizer(text)``, ``add_special=False`` its
    ``add_special_tokens=False``; special tokens written out in the text become their ids either way, as there.
    A chat template prints its own BOS, so its output is encoded with ``add_special=False``.
    ``degraded`` is None, or says why encodings may differ from what the model was trained with.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        coding: ByteCoding,
        vocab_size: int,
        special_ids: frozenset[int],
        eos_ids: frozenset[int],
        bos_id: int | None = None,
        prefix: tuple[int, ...] = (),
        strip_first_space: bool = False,
        special_texts: Mapping[str, str] | None = None,
        longest_token: int = 0,
        dropped: str = "",
        degraded: str | None = None,
    ) -> None:
        self._backend = backend
        self._prefix = prefix
        self._bytes: dict[int, bytes] = {}
        self.coding = coding
        self.vocab_size = vocab_size
        self.special_ids = special_ids
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self.strip_first_space = strip_first_space
        self.special_texts = dict(special_texts or {})  # "bos_token", "eos_token" …: what templates may print
        self.degraded = degraded
        self.bos_text = self.special_texts.get("bos_token", "")
        self.add_bos = bos_id is not None and self.encode("", add_special=True)[:1] == [bos_id]
        self._longest_token = longest_token  # characters; 0: unknown
        self._dropped = dropped  # characters that give no token at all

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text. Releases the GIL; time grows with the length. Lone surrogates raise RequestError."""
        try:
            # The batch call is the one that releases the GIL, so that other streams go on meanwhile; "fast" leaves
            # out character offsets, which nobody reads.
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0]
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the text is not valid Unicode: it holds a lone surrogate") from error
        ids: list[int] = encoding.ids
        return [*self._prefix, *ids] if add_special and self._prefix else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of the ids; ids without a token give nothing. Invalid UTF-8 becomes U+FFFD."""
        known = [token for token in ids if 0 <= token < self.vocab_size]
        return str(self._backend.decode(known, skip_special_tokens=skip_special))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token adds to a text; empty for an id without a token."""
        known = self._bytes.get(token)
        if known is None:
            spelled = self._spelling(token)
            if spelled is None:
                known = b""
            elif self.coding is ByteCoding.BYTE_LEVEL:
                known = byte_level_bytes(spelled)
            else:
                known = sentencepiece_bytes(spelled)
            self._bytes[token] = known
        return known

    def token_text(self, token: int) -> str:
        """One token for people to read. A part of a character shows as U+FFFD; ``token_bytes`` has the truth."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def fallback_byte(self, token: int) -> int | None:
        """The byte of a SentencePiece byte token, else None."""
        if self.coding is not ByteCoding.BYTE_FALLBACK:
            return None
        spelled = self._spelling(token)
        return None if spelled is None else fallback_byte(spelled)

    def is_special(self, token: int) -> bool:
        return token in self.special_ids

    def token_id(self, text: str) -> int | None:
        """The id of a token by its exact spelling in the vocabulary."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def at_least_tokens(self, text: str) -> int:
        """A lower bound of ``len(encode(text))`` at no cost, to refuse a prompt that cannot fit before encoding it.

        No token covers more characters than the longest one, and normalisation (NFC) makes at most four characters
        one. 0 where nothing can be promised, as with a vocabulary that makes one token of many unknown characters.
        """
        if not self._longest_token:
            return 0
        kept = len(text) - sum(map(text.count, self._dropped))
        return -(-kept // (4 * self._longest_token))

    def _spelling(self, token: int) -> str | None:
        if not 0 <= token < self.vocab_size:
            return None
        spelled: str | None = self._backend.id_to_token(token)
        return spelled


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint: GGUF metadata, or ``tokenizer.json`` beside safetensors.

    Raises :class:`FormatError` for damaged data and :class:`UnsupportedModelError` for a kind not known here.
    """
    if "tokenizer.ggml.model" in checkpoint.metadata:
        from toque.text.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(checkpoint.metadata)
    folder = checkpoint.folder
    if folder is None and checkpoint.path.is_dir():
        folder = checkpoint.path
    if folder is not None:
        from toque.text.hf_tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(folder)
    raise FormatError("the file holds no tokenizer", field="tokenizer.ggml.model")
