"""The OpenAI request bodies as types. Decoding refuses wrong types; ranges are checked when translating.

Fields that are not named here are ignored, as OpenAI clients expect of a compatible server. Fields that are named
are honoured, refused with 400, or listed in `ACCEPTED` as having no effect.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct

NOT_GIVEN = Raw(b"null")


class ContentPart(Struct):
    type: str
    text: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct):
    function: FunctionCall
    id: str = ""
    type: str = "function"


class Message(Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(Struct):
    type: str
    json_schema: Raw = NOT_GIVEN


class SamplingFields(Struct, kw_only=True):
    """What chat and text completions share. None is "not given" everywhere."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    # Raw: looked at only to be refused or ignored, so nothing is built from them.
    structured_outputs: Raw = NOT_GIVEN
    bad_words: Raw = NOT_GIVEN


class ChatCompletionBody(SamplingFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Raw = NOT_GIVEN
    tool_choice: Raw = NOT_GIVEN
    functions: Raw = NOT_GIVEN
    function_call: Raw = NOT_GIVEN
    modalities: list[str] | None = None
    audio: Raw = NOT_GIVEN
    web_search_options: Raw = NOT_GIVEN


class CompletionBody(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    suffix: str | None = None


class TokenizeBody(Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeBody(Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
