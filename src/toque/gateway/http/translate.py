"""From OpenAI bodies to the internal request: ranges, combinations, and what is not supported yet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from toque.errors import RequestError
from toque.gateway.http.fields import refuse_declared
from toque.gateway.http.openai_types import (
    ChatCompletionBody,
    CompletionBody,
    ContentPart,
    Message,
    SamplingFields,
)
from toque.gateway.http.structure import grammar_of, tool_use
from toque.gateway.requests import (
    MAX_BAD_WORDS,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from toque.text.stop import parse_stop
from toque.types import MAX_LOGPROBS, SamplingParams

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128
MAX_TEMPLATE_VARIABLES = 64
MAX_DEPTH = 32  # of tool arguments and template variables
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat runs to the end of the context
MAX_BAD_WORD_CHARS = 256
MAX_TIMEOUT_S = 86_400
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")

_DEFAULTS = SamplingParams()


def chat_request(
    body: ChatCompletionBody, request_id: str, tenant: str, max_choices: int
) -> GenerationRequest:
    """``max_completion_tokens`` is the successor of ``max_tokens`` and wins when both are given."""
    _refuse_unsupported_chat(body)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit: int | None = getattr(body, limit_name)
    if limit is not None and limit < 1:
        raise RequestError(f"{limit_name} must be 1 or more, got {brief(limit)}", param=limit_name)
    logprobs: int | None = None
    if body.top_logprobs is not None:
        bounded("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
        if not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.logprobs:
        logprobs = body.top_logprobs or 0
    common = _common(body, 1, max_choices)
    tools = tool_use(body, common["grammar"])
    prompt = chat_prompt(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message or False,
        template_extra=body.chat_template_kwargs or {},
        tools=() if tools is None else tools.definitions,
    )
    return GenerationRequest(
        request_id=request_id,
        model=body.model,
        prompts=(prompt,),
        sampling=_sampling(body, limit, logprobs, None),
        echo=(body.echo or False) and prompt.continue_final_message,
        tenant=tenant,
        tools=tools,
        **common,
    )


def completion_request(
    body: CompletionBody, request_id: str, tenant: str, max_choices: int
) -> GenerationRequest:
    if body.suffix:
        raise RequestError(
            "suffix is not supported: models here continue text, they do not fill in", param="suffix"
        )
    if body.logprobs is not None:
        bounded("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    echo = body.echo or False
    if limit < 0 or (limit == 0 and not echo):
        raise RequestError(
            f"max_tokens must be 1 or more (0 only with echo), got {brief(limit)}", param="max_tokens"
        )
    add_special = True if body.add_special_tokens is None else body.add_special_tokens
    prompts = completion_prompts(body.prompt, max_choices, add_special)
    return GenerationRequest(
        request_id=request_id,
        model=body.model,
        prompts=prompts,
        sampling=_sampling(body, limit, body.logprobs, body.logprobs if echo else None),
        echo=echo,
        tenant=tenant,
        **_common(body, len(prompts), max_choices),
    )


def completion_prompts(
    prompt: str | Sequence[str | int | list[int]], most: int, add_special: bool, name: str = "prompt"
) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of either. Ids are used untouched."""
    if isinstance(prompt, str):
        return (TextPrompt(prompt, add_special),)
    if not prompt:
        raise RequestError(f"{name} must not be an empty list", param=name)
    kind = type(prompt[0])
    if kind is not int and len(prompt) > most:
        raise RequestError(f"{name} takes at most {most} at once, got {len(prompt)}", param=name)
    for position, item in enumerate(prompt):
        if type(item) is not kind:
            raise RequestError(
                f"{name} must hold texts, token ids or lists of token ids, not a mixture: item {position} differs "
                f"from item 0",
                param=f"{name}[{position}]",
            )
    if kind is int:
        return (TokenPrompt(_token_ids(prompt, name)),)
    if kind is str:
        return tuple(TextPrompt(str(text), add_special) for text in prompt)
    return tuple(TokenPrompt(_token_ids(ids, f"{name}[{i}]")) for i, ids in enumerate(prompt))


def chat_prompt(
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    template_extra: dict[str, Any] | None = None,
    tools: tuple[Mapping[str, Any], ...] = (),
) -> ChatPrompt:
    if not messages:
        raise RequestError("messages must hold at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages takes at most {MAX_MESSAGES}, got {len(messages)}", param="messages")
    if continue_final_message:
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true: the one continues the last "
                "message, the other opens a new one",
                param="continue_final_message",
            )
        if messages[-1].role != "assistant" or messages[-1].content is None:
            raise RequestError(
                "continue_final_message needs the last message to be the assistant's, with content",
                param="continue_final_message",
            )
    extra = template_extra or {}
    if len(extra) > MAX_TEMPLATE_VARIABLES:
        raise RequestError(
            f"chat_template_kwargs takes at most {MAX_TEMPLATE_VARIABLES} entries, got {len(extra)}",
            param="chat_template_kwargs",
        )
    check_depth(extra, "chat_template_kwargs")
    for i, tool in enumerate(tools):
        check_depth(tool, f"tools[{i}]")
    return ChatPrompt(
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages)),
        add_generation_prompt=not continue_final_message
        if add_generation_prompt is None
        else add_generation_prompt,
        continue_final_message=continue_final_message,
        template_extra=extra,
        tools=tools,
    )


def _message(message: Message, where: str) -> dict[str, Any]:
    """One message as templates know it. ``developer`` is what newer clients call ``system``."""
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {brief(message.role)}",
            param=f"{where}.role",
        )
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    refuse_declared(message, f"{where}.")
    if isinstance(message.content, list):
        plain["content"] = "\n".join(
            _part(part, f"{where}.content[{j}]") for j, part in enumerate(message.content)
        )
    else:
        plain["content"] = message.content or message.refusal or ""
    if message.content is None and not message.tool_calls and message.role != "assistant":
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if len(message.tool_calls) > MAX_TOOL_CALLS:
            raise RequestError(
                f"{where}.tool_calls takes at most {MAX_TOOL_CALLS}, got {len(message.tool_calls)}",
                param=f"{where}.tool_calls",
            )
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        call.function.arguments, f"{where}.tool_calls[{j}].function.arguments"
                    ),
                },
            }
            for j, call in enumerate(message.tool_calls)
        ]
    return plain


def _part(part: ContentPart, where: str) -> str:
    text = part.refusal if part.type == "refusal" and part.text is None else part.text
    if part.type not in _TEXT_PARTS:
        kind = next((word for word in ("image", "audio", "video", "file") if word in part.type), None)
        why = f"models here take no {kind} input" if kind else "only parts of type text are supported"
        raise RequestError(f"{where}: {why}, got a part of type {brief(part.type)}", param=f"{where}.type")
    if text is None:
        raise RequestError(f"{where}.text is required in a part of type {part.type}", param=f"{where}.text")
    return text


def _arguments(arguments: str | dict[str, Any], where: str) -> dict[str, Any]:
    """A replayed call's arguments as the mapping that Hugging Face templates expect; "" is none."""
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            arguments = msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise RequestError(f"{where} must be a JSON object as text, or an object", param=where) from None
    check_depth(arguments, where)
    return arguments


def _sampling(
    body: SamplingFields, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    d = _DEFAULTS
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens must be at most max_tokens ({brief(max_tokens)}), got {brief(min_tokens)}",
            param="min_tokens",
        )
    return SamplingParams(
        temperature=d.temperature if body.temperature is None else body.temperature,
        top_k=d.top_k if body.top_k is None else body.top_k,
        top_p=d.top_p if body.top_p is None else body.top_p,
        min_p=d.min_p if body.min_p is None else body.min_p,
        repetition_penalty=d.repetition_penalty
        if body.repetition_penalty is None
        else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias),
        seed=body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        # More than any context holds means "as much as there is room for"; the sampler's field is 32 bits wide.
        max_tokens=max_tokens if max_tokens is None else min(max_tokens, 2**31 - 1),
        min_tokens=min_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos or False,
    )


def _common(body: SamplingFields, prompts: int, max_choices: int) -> dict[str, Any]:
    refuse_declared(body)
    n = 1 if body.n is None else body.n
    if not 1 <= n * prompts <= max_choices or n < 1:
        most = max(1, max_choices // prompts)
        raise RequestError(f"n must be between 1 and {most} here, got {brief(n)}", param="n")
    if body.best_of is not None and body.best_of != n:
        raise RequestError(
            f"best_of is not supported: it must equal n ({n}) when given, got {brief(body.best_of)}",
            param="best_of",
        )
    stream = body.stream or False
    if body.stream_options is not None and not stream:
        raise RequestError("stream_options is only for stream: true", param="stream_options")
    if body.cache_salt is not None and len(body.cache_salt) > 256:
        raise RequestError(
            f"cache_salt takes at most 256 characters, got {len(body.cache_salt)}", param="cache_salt"
        )
    return {
        "n": n,
        "stop": parse_stop(body.stop),
        "bad_words": _bad_words(body.bad_words),
        "include_stop": body.include_stop_str_in_output or False,
        "skip_special": True if body.skip_special_tokens is None else body.skip_special_tokens,
        "stream": stream,
        "include_usage": bool(stream and body.stream_options and body.stream_options.include_usage),
        "timeout_s": body.timeout,
        "cache_salt": body.cache_salt or "",
        "priority": body.priority or 0,
        "grammar": grammar_of(body),
    }


def _logit_bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(f"logit_bias keys must be token ids, got {brief(key)}", param="logit_bias")
        pairs[int(key)] = value
    return tuple(pairs.items())


def _refuse_unsupported_chat(body: ChatCompletionBody) -> None:
    if body.chat_template is not None:
        raise RequestError(
            "chat_template is the model's own here: requests may not bring one", param="chat_template"
        )
    if body.modalities is not None and body.modalities != ["text"]:
        raise RequestError('modalities: only ["text"] is supported', param="modalities")


def _bad_words(words: list[str] | None) -> tuple[str, ...]:
    if words is None:
        return ()
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words takes at most {MAX_BAD_WORDS} words, got {len(words)}", param="bad_words"
        )
    for i, word in enumerate(words):
        if not word or len(word) > MAX_BAD_WORD_CHARS:
            raise RequestError(
                f"a bad word has 1 to {MAX_BAD_WORD_CHARS} characters, item {i} has {len(word)}",
                param="bad_words",
            )
    return tuple(words)


def _token_ids(ids: Any, where: str) -> tuple[int, ...]:
    if not ids:
        raise RequestError(f"{where} must not be an empty list of token ids", param=where)
    if min(ids) < 0 or max(ids) >= 2**31:
        raise RequestError(f"{where} must hold token ids of 0 or more", param=where)
    return tuple(ids)


def bounded(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {brief(value)}", param=name)


def check_depth(value: object, where: str, depth: int = 0) -> None:
    """Nested values go to the template, which walks them recursively."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} may be nested at most {MAX_DEPTH} levels deep", param=where)
    if isinstance(value, dict):
        for item in value.values():
            check_depth(item, where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_depth(item, where, depth + 1)


def brief(value: object) -> str:
    """A given value for a message: short, whatever it was."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"a number of about {int(math.log10(abs(value))) + 1} digits"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
