"""Chat templates: messages to the prompt text a model was trained on, the same as Hugging Face renders it.

The template comes with the model (GGUF metadata, ``chat_template.jinja`` or ``tokenizer_config.json``) and is treated
as hostile: see `template_sandbox` and `template_budget` for what it can and cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toque.errors import TemplateError
from toque.text.compiled_template import CompiledTemplate, TemplateLimits
from toque.text.messages import Message, normal_messages, plain_data

if TYPE_CHECKING:
    from toque.formats.checkpoint import Checkpoint
    from toque.text.tokenizer import Tokenizer

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # Hugging Face's; a template may trim its space


class ChatTemplate:
    """A model's template, or several by name (``default``, ``tool_use``). Immutable; safe to share between threads.

    ``render`` never changes what it is given, and ends in a :class:`TemplateError` (400) whatever the template does:
    its own ``raise_exception`` message, code ``chat_template_limit`` where it would run too long or write too much,
    code ``chat_template_security`` where it reaches for what it must not.
    """

    def __init__(
        self,
        sources: str | Mapping[str, str],
        *,
        special_texts: Mapping[str, str] | None = None,
        limits: TemplateLimits | None = None,
        field: str = "chat_template",
    ) -> None:
        named = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.special_texts = dict(special_texts or {})
        self.limits = limits or TemplateLimits()
        self._named = {name: CompiledTemplate(source, field) for name, source in named.items()}

    def source(self, *, tools: bool = False) -> str:
        return self._choose(tools).source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. ``extra`` are further variables for the template (``enable_thinking`` …).

        ``continue_final_message`` leaves the last message open, so that the model goes on writing it; it excludes
        ``add_generation_prompt``. ``tools`` are OpenAI tool definitions; None where there are none.
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        compiled = self._choose(tools is not None)
        chat = normal_messages(messages, compiled.habits)
        final = None
        if continue_final_message:
            if not messages or messages[-1].get("content") is None:
                raise TemplateError(
                    "continue_final_message needs a last message with content", param="messages"
                )
            final = _open_final(chat, compiled.source)
        variables = {
            **self.special_texts,
            **plain_data(dict(extra or {})),
            "messages": chat,
            "tools": plain_data(list(tools)) if tools is not None else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = compiled.render(variables, self.limits)
        return text if final is None else _cut_open(text, final)

    def _choose(self, tools: bool) -> CompiledTemplate:
        if tools and "tool_use" in self._named:
            return self._named["tool_use"]
        if "default" in self._named:
            return self._named["default"]
        raise TemplateError(
            f"the model has several chat templates ({', '.join(sorted(self._named)[:8])}) and no default",
            param="messages",
        )


def load_template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The checkpoint's template, or None where it has none: then chatting is for the caller to refuse.

    In a folder ``chat_template.jinja`` comes before ``tokenizer_config.json``. Raises FormatError for one that is
    too large or does not compile.
    """
    from toque.text.template_sources import template_sources

    sources, field = template_sources(checkpoint)
    if not sources:
        return None
    return ChatTemplate(sources, special_texts=tokenizer.special_texts, field=field)


def _open_final(chat: list[Message], source: str) -> str:
    """Mark the end of the last message's text, so that what the template puts after it can be cut off again."""
    last = chat[-1]
    content = last["content"]
    if "content" not in source:
        raise TemplateError(
            "the chat template writes no content, so nothing can be continued", param="messages"
        )
    if isinstance(content, str):
        last["content"] = content + CONTINUE_TAG
        return content
    for part in reversed(content):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + CONTINUE_TAG
            return text
    raise TemplateError("continue_final_message needs text in the last message", param="messages")


def _cut_open(text: str, final: str) -> str:
    tag = CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise TemplateError(
            "the chat template drops the last message's text, so it cannot be continued",
            param="continue_final_message",
        )
    start = text.rindex(tag)
    if text[start : start + len(CONTINUE_TAG)] == CONTINUE_TAG:
        return text[:start]
    return text[:start].rstrip()  # the template trims messages; so must what is continued
