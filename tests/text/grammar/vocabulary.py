"""A vocabulary of single bytes, and ways to walk through a grammar with it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from toque.text.grammar.compiler import Compiler, Matcher
from toque.text.grammar.spec import GrammarSpec

EOS, CONTROL, TOOL_CALLS = 256, 257, 258
SIZE = 259
TEXTS = {EOS: b"<|end|>", CONTROL: b"<|im_start|>", TOOL_CALLS: b"[TOOL_CALLS]"}
PADDED = 320  # rows of the model's head: more than the tokenizer knows


class ByteTokenizer:
    vocab_size = SIZE
    eos_ids = frozenset({EOS})
    bos_id = None

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else TEXTS[token]

    def is_special(self, token: int) -> bool:
        return token >= 256

    def token_id(self, text: str) -> int | None:
        return next((token for token, spelled in TEXTS.items() if spelled.decode() == text), None)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return list(text.encode())


def compiler() -> Compiler:
    tokenizer: Any = ByteTokenizer()
    return Compiler(lambda: tokenizer, PADDED)


SHARED = compiler()


def start(spec: GrammarSpec) -> Matcher:
    return SHARED.compile(spec.encode())


def allowed(matcher: Matcher) -> list[int]:
    """Ids that the mask allows, of a row that was full of ones before."""
    row = np.full(PADDED // 32, 0xFFFFFFFF, np.uint32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def accepts(spec: GrammarSpec, text: str) -> bool:
    """The whole text, as an answer that may end there. Masks and acceptance must agree on the way."""
    matcher = start(spec)
    for byte in text.encode("utf-8", "surrogatepass"):
        if byte not in allowed(matcher):
            assert not matcher.accept(byte)
            return False
        assert matcher.accept(byte), matcher.error
    return matcher.may_end


def walk(spec: GrammarSpec, choose: Callable[[Sequence[int]], int], longest: int = 4000) -> str:
    """An answer made by choosing among the allowed tokens until the grammar is complete or EOS is chosen."""
    matcher = start(spec)
    answer = bytearray()
    while not matcher.complete:
        assert len(answer) < longest, f"no end after {bytes(answer[:200])!r}"
        token = choose(allowed(matcher))
        if token == EOS:
            break
        assert token < 256, "a control token is allowed"
        assert matcher.accept(token), matcher.error
        answer.append(token)
    assert matcher.may_end
    return answer.decode()


def random_choice(seed: int) -> Callable[[Sequence[int]], int]:
    """Any allowed byte, but fond of ends: quotes, brackets and EOS, so that walks stay short."""
    source = random.Random(seed)
    ends = [*b'"}],', EOS]

    def choose(tokens: Sequence[int]) -> int:
        closing = [token for token in ends if token in tokens]
        if closing and source.random() < 0.5:
            return source.choice(closing)
        # The high bytes of UTF-8 would drown everything else.
        plain = [token for token in tokens if token < 0x80 or token == EOS]
        return source.choice(plain if plain and source.random() < 0.95 else list(tokens))

    return choose


def whitespace_choice(tokens: Sequence[int]) -> int:
    """A model that would rather write line breaks than anything else, and ends only when made to."""
    for wish in (*b"\n \t\r", *b'}]1"'):
        if wish in tokens:
            return wish
    return tokens[0]


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def strict_loads(text: str) -> Any:
    """JSON without repeated keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), f"a key comes twice in {text!r}"
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)
