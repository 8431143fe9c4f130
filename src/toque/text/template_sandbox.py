"""The jinja2 environment chat templates run in: Hugging Face's extensions, a sandbox, and a budget in every loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from types import BuiltinFunctionType, BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from toque.text import template_budget as budget

MAX_STRFTIME = 200


class TemplateRefusal(Exception):
    """``raise_exception('…')`` in the template: it refuses these messages, in its own words."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Rendered like Hugging Face's ``apply_chat_template``; what strangers' templates can do is bounded.

    The template's tree is rewritten before it is compiled: loops and macros step the budget, text joined with ``~`` and
    lists written out go through a size check. Nothing is folded at compile time.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, loopcontrols],
            optimized=False,
            finalize=_printed,
            cache_size=0,
        )
        for name, function in self.filters.items():
            self.filters[name] = _bounded_filter(name, function)
        self.filters["tojson"] = _to_json
        self.globals.pop("lipsum")  # random text is nothing a prompt needs
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _strftime(now)
        self.globals["dict"] = _TemplateDict()
        self.globals["namespace"] = _TemplateNamespace

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_Instrument().visit(source), name, filename, defer_init)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            budget.check_product(left, right)
        elif operator == "**":
            budget.check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            budget.check_format(left)
            budget.current.get().spend(budget.printed_size(right))
        return budget.checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template. Python's own methods get their sizes checked first."""
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        if isinstance(method, BuiltinFunctionType | BuiltinMethodType):
            owner = getattr(method, "__self__", None)
            if isinstance(owner, str):
                _check_string_method(owner, method.__name__, args, kwargs)
            elif isinstance(owner, int | float | bytes):
                budget.check_arguments([*args, *kwargs.values()])
        return budget.checked(super().call(__context, __obj, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """jinja2 would give an undefined value, which prints as nothing; an attempt is an error here."""
        raise SecurityError(f"access to attribute {attribute[:40]!r} of a {type(obj).__name__} is unsafe")

    # Called from the rewritten tree.

    @staticmethod
    def spend_step(characters: int) -> str:
        budget.current.get().step(characters)
        return ""

    @staticmethod
    def join_text(*parts: Any) -> str:
        texts = [_printed_text(part) for part in parts]
        budget.current.get().spend(sum(map(len, texts)))
        return "".join(texts)

    @staticmethod
    def sized(value: Any) -> Any:
        return budget.checked(value)


class GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what the model wrote; for a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Instrument(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._stepped(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._stepped(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._stepped(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._stepped(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join_text", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _call("sized", [node], node.lineno) if node.items else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("sized", [node], node.lineno) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("sized", [node], node.lineno) if node.ctx == "load" and node.items else node

    def _stepped(self, node: Any) -> nodes.Node:
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        step = _call("spend_step", [nodes.Const(size, lineno=node.lineno)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _call(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(target, arguments, [], None, None, lineno=line)


@pass_context  # depends on the running budget, so it must not be applied to constants at compile time
def _printed(context: Context, value: Any) -> Any:
    budget.current.get().spend(budget.printed_size(value))
    return value


def _printed_text(value: Any) -> str:
    if not isinstance(value, str):
        budget.printed_size(value)
    return str(value)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # these get the context or environment first

    @wraps(function)  # also copies jinja2's mark
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, *given = args[skip:]
        given += kwargs.values()
        budget.current.get().step()
        _check_filter(name, value, given)
        return budget.checked(function(*args, **kwargs))

    return bounded


def _check_filter(name: str, value: Any, given: list[Any]) -> None:
    """Sizes, for the filters whose result can be much larger than what they are given."""
    texts = [argument for argument in given if isinstance(argument, str)]
    if name in ("center", "indent", "wordwrap", "batch", "slice", "round"):
        budget.check_arguments(given)
    if name == "format":
        budget.check_format(str(value))
    elif name == "replace" and len(texts) >= 2:
        budget.check_replace(str(value), texts[0], texts[1])
    elif name == "sum" and any(isinstance(argument, list | tuple) for argument in given):
        raise TypeError("sum is for numbers")
    elif name in ("indent", "wordwrap") and isinstance(value, str):
        width = next((n for n in given if isinstance(n, int) and not isinstance(n, bool)), 4)
        inserted = texts[0] if texts else " " * max(width, 0)
        budget.check_replace(value, "\n" if name == "indent" else "", inserted if name == "indent" else "\n")
    elif name in ("join", "string", "pprint", "urlize", "xmlattr", "tojson", "list"):
        size = budget.printed_size(value)
        budget.current.get().spend(size * (1 + sum(map(len, texts))) if name == "join" else size)


def _check_string_method(owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if name not in (
        "format",
        "format_map",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "startswith",
        "endswith",
    ):
        budget.check_arguments([*args, *kwargs.values()])
    if name == "replace" and len(args) >= 2:
        budget.check_replace(owner, args[0], args[1])
    elif name == "join" and args:
        values = args[0] if isinstance(args[0], list | tuple | dict | str) else ()
        budget.current.get().spend(len(owner) * len(values) + budget.printed_size(values))
    elif name in ("format", "format_map"):
        budget.check_format(owner)
        budget.current.get().spend(budget.printed_size([*args, *kwargs.values()]) * (1 + owner.count("{")))
    elif name == "expandtabs":
        size = args[0] if args else kwargs.get("tabsize", 8)
        budget.check_replace(owner, "\t", " " * max(size, 0))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face: neither HTML nor non-ASCII characters are escaped."""
    budget.check_arguments([indent])
    budget.current.get().step(budget.printed_size(value))
    if (isinstance(indent, int) and indent > 64) or (isinstance(indent, str) and len(indent) > 64):
        raise ValueError("tojson takes an indent of at most 64")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: object = "") -> None:
    raise TemplateRefusal(str(message))


def _strftime(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        if len(format) > MAX_STRFTIME or any(part[:1].isdigit() for part in format.split("%")[1:]):
            raise ValueError("the date format is too long or has a width")
        return now().strftime(format)

    return strftime_now


class _TemplateDict:
    """``dict(…)`` without the type behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """``namespace(…)`` that takes no names with an underscore first."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _plain_name(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _plain_name(name)
        super().__setitem__(name, value)


def _plain_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no attribute {name[:40]!r}")
