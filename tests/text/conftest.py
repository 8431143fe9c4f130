"""The real models' tokenizers, read once, and small ones that tests build from nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from toque.formats import load_checkpoint
from toque.formats.checkpoint import Checkpoint
from toque.text.gguf_tokenizer import tokenizer_from_gguf
from toque.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm2_checkpoint(smollm2: Path) -> Checkpoint:
    return load_checkpoint(smollm2)


@pytest.fixture(scope="session")
def qwen_checkpoint(qwen: Path) -> Checkpoint:
    return load_checkpoint(qwen)


@pytest.fixture(scope="session")
def gemma3_checkpoint(gemma3: Path) -> Checkpoint:
    return load_checkpoint(gemma3)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(smollm2_checkpoint)


@pytest.fixture(scope="session")
def qwen_tokenizer(qwen_checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(qwen_checkpoint)


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3_checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(gemma3_checkpoint)


@pytest.fixture(scope="session")
def byte_level_metadata() -> Callable[..., dict[str, Any]]:
    return tiny_byte_level


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """Byte-level: <eos>, <bos>, all bytes, and a few words."""
    return tokenizer_from_gguf(tiny_byte_level())


def tiny_byte_level(words: Mapping[str, tuple[str, str]] | None = None, **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level vocabulary: ``words`` maps each further token to the two parts it is merged from.

    ``changes`` set ``tokenizer.ggml.*`` keys; None removes one.
    """
    from toque.text.byte_alphabet import CHARACTER_OF

    words = words or {"th": ("t", "h"), "the": ("th", "e"), "Ġthe": ("Ġ", "the"), "he": ("h", "e")}
    tokens = ["<eos>", "<bos>", *(CHARACTER_OF[byte] for byte in range(256)), *words]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "merges": [f"{left} {right}" for left, right in words.values()],
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    values.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
