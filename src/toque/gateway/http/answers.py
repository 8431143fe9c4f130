"""The bodies of answers as types: what /openapi.json promises, and what tests hold the answers to.

Answers are not built from these (a streamed token is spelled from prepared bytes), so every field here must be found
in a real answer, and the other way round: a test compares both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType


class ErrorDetail(Struct):
    message: Annotated[str, Meta(description="For people: names the bound, the value, and what to do.")]
    type: Annotated[str, Meta(description="invalid_request_error, rate_limit_error, server_error …")]
    param: str | None
    code: str | None


class ErrorAnswer(Struct):
    """Every answer with a status of 400 or more."""

    error: ErrorDetail


class PromptTokensDetails(Struct):
    cached_tokens: Annotated[int, Meta(ge=0, description="Found in the prefix cache.")]


class CompletionTokensDetails(Struct):
    reasoning_tokens: Annotated[int, Meta(ge=0)]


class UsageAnswer(Struct):
    prompt_tokens: Annotated[int, Meta(ge=0, description="Each prompt once, however many choices.")]
    completion_tokens: Annotated[int, Meta(ge=0)]
    total_tokens: Annotated[int, Meta(ge=0)]
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Struct):
    token: Annotated[str, Meta(description="A part of a character shows as `bytes:\\xe6`.")]
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ContentLogprob]
    refusal: None


FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class AnsweredMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET


class ChatChoice(Struct):
    index: Annotated[int, Meta(ge=0)]
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET


class ChatChunkChoice(Struct):
    index: Annotated[int, Meta(ge=0)]
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Struct):
    """The data of one server-sent event. The last event's data is `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | UnsetType | None = UNSET


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    index: Annotated[int, Meta(ge=0)]
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(Struct):
    """Also the data of each event when streamed; the last event's data is `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer | UnsetType | None = UNSET


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    architecture: str
    quantization: str
    parameters: int
    version: Annotated[str, Meta(description="Also the header x-toque-model-version of every answer.")]


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class Tokens(Struct):
    count: Annotated[int, Meta(ge=0)]
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Text(Struct):
    prompt: str


class ServingStatus(Struct):
    status: str


class ModelHealth(Struct):
    name: str
    state: Literal["starting", "ready", "degraded", "draining", "dead", "asleep"]
    reason: str


class Degradation(Struct):
    part: str
    reason: str


class Health(Struct):
    status: Literal["ok", "degraded", "draining", "unhealthy"]
    version: str
    models: list[ModelHealth]
    degraded: list[Degradation]
