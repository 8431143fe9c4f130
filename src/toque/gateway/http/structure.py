"""What a request says about the form of its answer: response_format, structured_outputs, tools."""

from __future__ import annotations

from typing import Any

from toque.errors import RequestError
from toque.gateway.http.openai_types import (
    ChatCompletionBody,
    FunctionDefinition,
    NamedToolChoice,
    SamplingFields,
    Tool,
)
from toque.gateway.requests import ToolUse
from toque.text.grammar import structured
from toque.text.grammar.schema import checked_schema
from toque.text.grammar.spec import MAX_TOOLS, GrammarKind, GrammarSpec, ToolSpec

_NAME = 64  # characters of a function's name
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(body: SamplingFields) -> GrammarSpec | None:
    """The grammar of the answer; None where any text will do."""
    wanted, outputs = body.response_format, body.structured_outputs
    if wanted is not None and wanted.type != "text" and outputs is not None:
        raise RequestError(
            "response_format and structured_outputs exclude each other", param="structured_outputs"
        )
    if outputs is not None:
        return structured.StructuredOutputs(
            outputs.json, outputs.regex, outputs.choice, outputs.grammar, outputs.json_object
        ).spec()
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSpec.json_object()
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise RequestError(
                "response_format of type json_schema needs a json_schema", param="response_format.json_schema"
            )
        schema = wanted.json_schema.schema
        if schema is None:
            raise RequestError("json_schema needs a schema", param="response_format.json_schema.schema")
        return GrammarSpec.json_schema(schema)
    raise RequestError(
        f"response_format.type must be text, json_object or json_schema, got {wanted.type[:40]!r}",
        param="response_format",
    )


def form_field(body: SamplingFields) -> str | None:
    """The field that gave the answer its grammar; None where there is none."""
    outputs = body.structured_outputs
    if outputs is not None:
        return next(
            (f"structured_outputs.{name}" for name in outputs.__struct_fields__ if getattr(outputs, name)),
            "structured_outputs",
        )
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    if isinstance(body, ChatCompletionBody) and body.tools:
        return "tools"
    return "bad_words" if body.bad_words else None


def tool_use(body: ChatCompletionBody, grammar: GrammarSpec | None) -> ToolUse | None:
    """The functions that the answer may call; None where it may call none."""
    tools = body.tools or []
    choice = body.tool_choice
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools takes at most {MAX_TOOLS}, got {len(tools)}", param="tools")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise RequestError("tools must have different names", param="tools")
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise RequestError(
            f"tool_choice must be none, auto, required or a function, got {choice[:40]!r}",
            param="tool_choice",
        )
    named = _named(choice, names) if isinstance(choice, NamedToolChoice) else None
    if choice == "required" and not tools:
        raise RequestError("tool_choice required needs tools", param="tool_choice")
    if not tools or choice == "none":
        return None
    forced = choice == "required" or named is not None
    if grammar is not None:
        if grammar.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
            raise RequestError(
                "structured_outputs other than JSON cannot be combined with tools", param="structured_outputs"
            )
        if forced:
            raise RequestError(
                "response_format says what an answer without a call looks like, but tool_choice demands a call",
                param="response_format",
            )
    specs = []
    for i, function in enumerate(functions):
        if named is not None and function.name != named:
            continue
        enforced = forced or function.strict or False
        where = f"tools[{i}].function.parameters"
        given = _NOTHING if function.parameters is None else function.parameters
        parameters = checked_schema(given, param=where) if enforced else {}
        if parameters.get("type", "object") != "object":
            raise RequestError(f"{where}: type must be object", param=where)
        specs.append(ToolSpec(function.name, parameters))
    return ToolUse(
        definitions=tuple(_definition(function) for function in functions),
        specs=tuple(specs),
        names=frozenset(names),
        forced=forced,
        strict=any(function.strict for function in functions),
        parallel=body.parallel_tool_calls is not False and named is None,
    )


def _function(tool: Tool, where: str) -> FunctionDefinition:
    if tool.type != "function":
        raise RequestError(f"{where}.type must be function, got {tool.type[:40]!r}", param=f"{where}.type")
    if tool.function is None:
        raise RequestError(
            f"{where}.function is required", param=f"{where}.function", code="missing_required_parameter"
        )
    name = tool.function.name
    plain = name.replace("_", "").replace("-", "").replace(".", "")
    if not (plain.isascii() and plain.isalnum() and len(name) <= _NAME):
        raise RequestError(
            f"{where}.function.name must have 1 to {_NAME} letters, digits, _, - and ., got {name[:40]!r}",
            param=f"{where}.function.name",
        )
    return tool.function


def _named(choice: NamedToolChoice, names: list[str]) -> str:
    if choice.type != "function" or choice.function is None:
        raise RequestError(
            f"tool_choice as an object must be of type function, got {choice.type[:40]!r}",
            param="tool_choice",
        )
    if choice.function.name not in names:
        raise RequestError(
            f"tool_choice names {choice.function.name[:64]!r}, which is not among tools", param="tool_choice"
        )
    return choice.function.name


def _definition(function: FunctionDefinition) -> dict[str, Any]:
    """As chat templates know it."""
    known: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        known["description"] = function.description
    known["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": known}
