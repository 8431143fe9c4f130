"""The table of everything that the gateway answers: routing, keys, /openapi.json and docs/api.md read it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec import Struct

from toque.gateway.gateway import Gateway
from toque.gateway.http import (
    answers,
    embedding_types,
    embeddings,
    generate,
    models,
    openai_types,
    ops,
    tokens,
)
from toque.gateway.http.exchange import Exchange
from toque.gateway.http.parameters import IDEMPOTENCY_KEY, REQUEST_TIMEOUT, TRACEPARENT, Parameter

Handler = Callable[[Exchange, Gateway], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    ``answer`` is the body of a 200 (bytes: of ``content_type``), ``events`` the data of each event of a stream.
    ``statuses`` are those besides 200 and the ones that every operation has. ``needs_key`` is false where
    orchestrators and browsers ask, who have none. ``once``: an ``Idempotency-Key`` is honoured. ``parameters``: of the
    query, and headers. ``other_content``: what else a 200 may be, as text.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    answer: type[Struct] | None = None
    content_type: str = "application/json"
    body: type[Struct] | None = None
    document: type[Struct] | None = None
    events: type[Struct] | None = None
    statuses: tuple[int, ...] = ()
    needs_key: bool = True
    once: bool = False
    parameters: tuple[Parameter, ...] = ()
    other_content: tuple[str, ...] = ()

    @property
    def pattern(self) -> str:
        """The path as metrics and people write it."""
        return self.path.replace(":path", "")


# Why an operation with a body may fail: bad input, no such model, too large; its Idempotency-Key is being answered or
# was used for something else; limits, our fault, no replica, deadline.
_WITH_BODY = (400, 404, 413)
_WITH_ENGINE = (*_WITH_BODY, 409, 422, 429, 500, 503, 504)
_HEADERS = (REQUEST_TIMEOUT, IDEMPOTENCY_KEY, TRACEPARENT)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        generate.chat_completions,
        "The next message of a conversation, streamed or whole.",
        answer=answers.ChatCompletion,
        body=openai_types.ChatCompletionBody,
        events=answers.ChatCompletionChunk,
        statuses=_WITH_ENGINE,
        once=True,
        parameters=_HEADERS,
    ),
    Operation(
        "POST",
        "/v1/completions",
        generate.completions,
        "The continuation of texts or token ids, streamed or whole.",
        answer=answers.Completion,
        body=openai_types.CompletionBody,
        events=answers.Completion,
        statuses=_WITH_ENGINE,
        once=True,
        parameters=_HEADERS,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        embeddings.embeddings,
        "Texts or token ids as vectors.",
        answer=embedding_types.EmbeddingList,
        body=embedding_types.EmbeddingBody,
        statuses=_WITH_ENGINE,
        once=True,
        parameters=_HEADERS,
    ),
    Operation(
        "POST",
        "/v1/rerank",
        embeddings.rerank,
        "Documents ordered by how near they are to a query.",
        answer=embedding_types.Ranking,
        body=embedding_types.RerankBody,
        statuses=_WITH_ENGINE,
        once=True,
        parameters=_HEADERS,
    ),
    Operation(
        "GET",
        "/v1/models",
        models.list_models,
        "The models that can answer now.",
        answer=answers.ModelList,
    ),
    Operation(
        "GET",
        "/v1/models/{id:path}",
        models.show_model,
        "One model.",
        answer=answers.Model,
        statuses=(404, 503),
    ),
    Operation(
        "POST",
        "/tokenize",
        tokens.tokenize_text,
        "A text or a conversation as token ids.",
        answer=answers.Tokens,
        body=openai_types.TokenizeBody,
        statuses=_WITH_BODY,
    ),
    Operation(
        "POST",
        "/detokenize",
        tokens.detokenize_ids,
        "Token ids as text.",
        answer=answers.Text,
        body=openai_types.DetokenizeBody,
        statuses=_WITH_BODY,
    ),
    Operation(
        "GET", "/live", ops.live, "The process answers.", answer=answers.ServingStatus, needs_key=False
    ),
    Operation(
        "GET",
        "/ready",
        ops.ready,
        "New requests may come here (200), or not (503).",
        answer=answers.ServingStatus,
        statuses=(503,),
        needs_key=False,
    ),
    Operation(
        "GET",
        "/health",
        ops.health,
        "As /ready, with each model's state.",
        answer=answers.Health,
        statuses=(503,),
        needs_key=False,
    ),
    Operation("GET", "/metrics", ops.metrics, "Measurements for Prometheus.", content_type="text/plain"),
)
