"""Which dialect a model calls tools in."""

from __future__ import annotations

from collections.abc import Callable

from toque.errors import ConfigError
from toque.text.tools.base import ParserOptions, ToolParser
from toque.text.tools.gemma import GemmaParser
from toque.text.tools.hermes import HermesParser
from toque.text.tools.llama3 import Llama3Parser
from toque.text.tools.mistral import MistralParser
from toque.text.tools.pythonic import PythonicParser
from toque.text.tools.qwen_coder import QwenCoderParser

DIALECTS: dict[str, Callable[[ParserOptions], ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "gemma": GemmaParser,
    "qwen3-coder": QwenCoderParser,
}
# Text of a chat template that gives its dialect away, the most telling first.
_SIGNS = (
    ("<function=", "qwen3-coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ('"parameters"', "llama3"),
    ("tool_code", "gemma"),
    ("<start_of_turn>", "gemma"),
)
# Special tokens that belong to calls or reasoning: shown to the parsers although special tokens are left out of text.
TAG_TOKENS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "<think>", "</think>"),
)


def dialect_of(template: str | None) -> str:
    """The dialect that a chat template shows; ``hermes``, the most common, where it shows none."""
    return next((dialect for sign, dialect in _SIGNS if template and sign in template), "hermes")


def check_dialect(name: str) -> str:
    """Raises ConfigError for an unknown one."""
    if name not in DIALECTS:
        raise ConfigError(
            f"tool_parser must be one of {', '.join(DIALECTS)}, got {name[:60]!r}", param="tool_parser"
        )
    return name


def tool_parser(dialect: str, options: ParserOptions) -> ToolParser:
    return DIALECTS[check_dialect(dialect)](options)
