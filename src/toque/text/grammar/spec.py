"""What an answer must match: plain data that travels, checked before it does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from toque.errors import GrammarError, RequestError
from toque.text.grammar.schema import checked_schema
from toque.text.grammar.xml_calls import writable

MAX_SPEC = 256 << 10  # characters of the encoded form
MAX_PATTERN = 16_384
MAX_LARK = 64_000
MAX_CHOICES = 1_000
MAX_TOOLS = 128


_ENFORCED_AS = {"gemma": "hermes", "pythonic": "llama3", "qwen3-coder": "hermes"}


def enforced_dialect(dialect: str, *, otherwise: bool = False) -> str:
    """The dialect in which any call can be enforced: those in Python are written as JSON, and so are those in XML
    whose arguments bare text cannot be held to.

    ``otherwise``: JSON may come in their place; then calls need a tag to be told from it.
    """
    enforced = _ENFORCED_AS.get(dialect, dialect)
    return "hermes" if otherwise and enforced == "llama3" else enforced


class GrammarKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    TOOLS = "tools"
    WITHOUT = "without"


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One function that may be called. ``parameters`` is a checked JSON schema."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """One grammar. Make it with the functions below: they raise RequestError for what cannot be enforced.

    ``value`` by kind: JSON_OBJECT None; JSON_SCHEMA the checked schema; REGEX, LARK the text; CHOICE a list of texts;
    WITHOUT the texts that the answer does not contain; TOOLS what `tools` makes. ``think`` is the text that ends the
    model's reasoning, which comes first and is free; "" where the answer starts at once.
    """

    kind: GrammarKind
    value: Any = None
    think: str = ""

    @classmethod
    def json_object(cls) -> Self:
        return cls(GrammarKind.JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: Any, *, param: str = "response_format") -> Self:
        return cls(GrammarKind.JSON_SCHEMA, checked_schema(schema, param=param))

    @classmethod
    def regex(cls, pattern: str, *, param: str = "structured_outputs.regex") -> Self:
        """The whole answer must match; ``^`` and ``$`` around it change nothing."""
        if not pattern or len(pattern) > MAX_PATTERN:
            raise RequestError(
                f"{param} must have 1 to {MAX_PATTERN} characters, got {len(pattern)}", param=param
            )
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, choices: Sequence[str], *, param: str = "structured_outputs.choice") -> Self:
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise RequestError(f"{param} must hold 1 to {MAX_CHOICES} texts, got {len(choices)}", param=param)
        if not all(choices):
            raise RequestError(f"{param} must not hold an empty text", param=param)
        return cls(GrammarKind.CHOICE, list(choices))

    @classmethod
    def lark(cls, grammar: str, *, param: str = "structured_outputs.grammar") -> Self:
        if not grammar or len(grammar) > MAX_LARK:
            raise RequestError(
                f"{param} must have 1 to {MAX_LARK} characters, got {len(grammar)}", param=param
            )
        return cls(GrammarKind.LARK, grammar)

    @classmethod
    def without(cls, texts: Sequence[str]) -> Self:
        """Any text that contains none of these, the model's reasoning included."""
        return cls(GrammarKind.WITHOUT, list(texts))

    @classmethod
    def tools(
        cls,
        dialect: str,
        tools: Sequence[ToolSpec],
        *,
        parallel: bool,
        free: bool = False,
        otherwise: GrammarSpec | None = None,
    ) -> Self:
        """At least one call of one of ``tools``, in the form that ``dialect``'s parser reads, and nothing else.

        ``free``: any text, in which what begins as a call must go on as one. ``otherwise``: calls, or JSON that
        matches this. A dialect that cannot be enforced is written as one that can: see `enforced_dialect`. Whoever
        reads the answer finds the dialect that was chosen in the value's ``dialect``.
        """
        written = [{"name": tool.name, "parameters": dict(tool.parameters)} for tool in tools]
        chosen = enforced_dialect(dialect, otherwise=otherwise is not None)
        if dialect == "qwen3-coder" and not free and writable(written):
            chosen = dialect
        value = {
            "dialect": chosen,
            "tools": written,
            "parallel": parallel,
            "free": free,
            "otherwise": None,
        }
        if otherwise is not None:
            if otherwise.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
                raise RequestError("only JSON can be an alternative to tool calls", param="response_format")
            value["otherwise"] = otherwise.value or {"type": "object"}
        return cls(GrammarKind.TOOLS, value)

    def after_thinking(self, close: str) -> Self:
        """The same after the model's reasoning, which ``close`` ends. RequestError for a LARK grammar."""
        if self.kind is GrammarKind.WITHOUT:
            return self
        if self.kind is GrammarKind.LARK:
            raise RequestError(
                "this model reasons before it answers, which a grammar of your own cannot follow: turn reasoning off",
                param="structured_outputs.grammar",
            )
        return type(self)(self.kind, self.value, close)

    def encode(self) -> str:
        text = json.dumps(
            {"kind": self.kind.value, "value": self.value, "think": self.think},
            ensure_ascii=False,
            separators=(",", ":"),
        )
        if len(text) > MAX_SPEC:
            raise RequestError(
                f"the grammar takes {len(text)} characters, at most {MAX_SPEC} are allowed",
                param="response_format",
            )
        return text

    @classmethod
    def decode(cls, text: str) -> Self:
        """What `encode` wrote. Raises GrammarError for anything else."""
        try:
            if len(text) > MAX_SPEC:
                raise ValueError("too long")
            data = json.loads(text)
            return cls(GrammarKind(data["kind"]), data["value"], str(data["think"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise GrammarError(
                f"the grammar of the request cannot be read: {error}", param="grammar"
            ) from None
