"""One chat template, compiled, with what its source tells about the messages it expects."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toque.errors import FormatError, TemplateError
from toque.text.messages import Habits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jinja2 import nodes

MAX_SOURCE = 1_000_000  # characters
_MAX_MESSAGE = 500  # characters of a template's error message that are passed on


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    seconds: float = 0.5  # of CPU time
    rendered: int = 8_000_000  # characters of the result
    built: int = 64_000_000  # characters built on the way


class CompiledTemplate:
    """Compiles at once: a source that is too large or wrong raises FormatError naming ``field``."""

    def __init__(self, source: str, field: str) -> None:
        from jinja2.exceptions import TemplateError as JinjaError

        from toque.text.template_sandbox import ChatEnvironment

        if len(source) > MAX_SOURCE:
            raise FormatError(f"has {len(source)} characters; at most {MAX_SOURCE} are read", field=field)
        self.source = source
        environment = ChatEnvironment()
        try:
            self._template = environment.from_string(source)
            self._tree = environment.parse(source)
        except JinjaError as error:
            raise FormatError(f"the template is not valid jinja2: {_brief(error)}", field=field) from error
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise FormatError(
                f"the template cannot be compiled ({type(error).__name__})", field=field
            ) from error

    def render(self, variables: Mapping[str, Any], limits: TemplateLimits) -> str:
        """Raises TemplateError for everything that can go wrong."""
        from toque.text.template_budget import Budget, current

        token = current.set(Budget(limits.seconds, limits.built))
        pieces: list[str] = []
        size = 0
        try:
            with _errors():
                for piece in self._template.generate(variables):
                    size += len(piece)
                    if size > limits.rendered:
                        raise TemplateError(
                            f"the chat template writes more than {limits.rendered} characters",
                            param="messages",
                            code="chat_template_limit",
                        )
                    pieces.append(piece)
        finally:
            current.reset(token)
        return "".join(pieces)

    @cached_property
    def habits(self) -> Habits:
        """How this template reads messages: found out from its source and from two trial renderings."""
        return Habits(
            content_parts=_iterates_content(self._tree),
            content_none=_tests_content_none(self._tree),
            arguments_text=self._wants_arguments_as_text(),
        )

    def _wants_arguments_as_text(self) -> bool:
        """Whether tool-call arguments must be the JSON text: where a dictionary fails or prints as Python's repr."""
        if "arguments" not in self.source:
            return False
        name, value = "tqk", "tqv"
        text = f'{{"{name}": "{value}"}}'
        as_dict = self._try_arguments({name: value})
        if (
            as_dict is not None
            and str({name: value}) not in as_dict
            and (name in as_dict or value in as_dict)
        ):
            return False
        as_text = self._try_arguments(text)
        return as_text is not None and text in as_text

    def _try_arguments(self, arguments: Any) -> str | None:
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        user = {"role": "user", "content": "u"}
        result = {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "r"}
        tool = {
            "type": "function",
            "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
        }
        for content in ({"content": ""}, {}, {"content": None}):
            messages = [user, {"role": "assistant", **content, "tool_calls": [call]}, result]
            variables = {
                "messages": messages,
                "tools": [tool],
                "add_generation_prompt": False,
                "bos_token": "",
                "eos_token": "",
            }
            try:
                text = self.render(variables, TemplateLimits(seconds=0.2, rendered=100_000, built=1_000_000))
            except TemplateError:
                continue
            if "tqk" in text or "tqv" in text:
                return text
        return None


@contextmanager
def _errors() -> Iterator[None]:
    """Whatever a template raises, as a TemplateError. Messages quote the template, never the caller's data."""
    from jinja2.exceptions import SecurityError, UndefinedError
    from jinja2.exceptions import TemplateError as JinjaError

    from toque.text.template_sandbox import TemplateRefusal

    try:
        yield
    except TemplateError:
        raise
    except TemplateRefusal as refusal:
        raise TemplateError(_brief(refusal), param="messages") from refusal
    except SecurityError as error:
        raise TemplateError(
            f"the chat template tried something unsafe: {_brief(error)}",
            param="messages",
            code="chat_template_security",
        ) from error
    except UndefinedError as error:
        raise TemplateError(
            f"the chat template needs something that the messages lack: {_brief(error)}", param="messages"
        ) from error
    except (RecursionError, MemoryError) as error:
        raise TemplateError(
            f"the chat template goes too deep or too far ({type(error).__name__})",
            param="messages",
            code="chat_template_limit",
        ) from error
    except JinjaError as error:
        raise TemplateError(f"the chat template failed: {_brief(error)}", param="messages") from error
    except Exception as error:  # anything that an expression of the template can raise
        raise TemplateError(
            f"the chat template cannot render these messages ({type(error).__name__}: {_brief(error)})",
            param="messages",
        ) from error


def _brief(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."


def _is_content(node: nodes.Node) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether the template walks over content parts itself (also through a variable that content was put into)."""
    from jinja2 import nodes

    names = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node)
    }
    names |= {
        parameter.name
        for macro in tree.find_all(nodes.Macro)
        for parameter in macro.args
        if parameter.name in ("content", "message_content")
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in names)
        for loop in tree.find_all(nodes.For)
    )


def _tests_content_none(tree: nodes.Template) -> bool:
    from jinja2 import nodes

    if any(test.name == "none" and _is_content(test.node) for test in tree.find_all(nodes.Test)):
        return True
    return any(
        _is_content(compare.expr)
        and any(isinstance(op.expr, nodes.Const) and op.expr.value is None for op in compare.ops)
        for compare in tree.find_all(nodes.Compare)
    )
