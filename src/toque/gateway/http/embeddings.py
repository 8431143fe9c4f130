"""``/v1/embeddings`` and ``/v1/rerank``."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from toque.errors import DeadlineError, RequestError, VersionGoneError
from toque.gateway.deployment import Deployment, find_deployment
from toque.gateway.embedding import (
    EmbeddingRequest,
    check_dimensions,
    embed,
    shortened,
    tokenize_all,
)
from toque.gateway.gateway import Gateway
from toque.gateway.http.body import decode
from toque.gateway.http.embedding_types import Document, EmbeddingBody, RerankBody
from toque.gateway.http.exchange import Exchange
from toque.gateway.http.fields import refuse_declared
from toque.gateway.http.generate import deadline_s, priority_of, receive_json
from toque.gateway.http.metered import check_budget, metered
from toque.gateway.http.respond import cancelled_when_client_leaves, say_version
from toque.gateway.http.translate import bounded, brief, completion_prompts
from toque.gateway.outcomes import Pace
from toque.gateway.prepare import prompt_size
from toque.gateway.requests import GenerationRequest, Prompt, TextPrompt
from toque.types import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from toque.monitor.metering import Meter

MAX_INPUTS = 2048
MAX_DOCUMENTS = 1024


async def embeddings(exchange: Exchange, gateway: Gateway) -> None:
    body = decode(await receive_json(exchange, gateway), EmbeddingBody)
    deployment = find_deployment(gateway.deployments, body.model)
    deployment.check_embeds("/v1/embeddings")
    refuse_declared(body)
    if body.encoding_format not in (None, "float", "base64"):
        raise RequestError(
            f"encoding_format must be float or base64, got {brief(body.encoding_format)}",
            param="encoding_format",
        )
    check_dimensions(body.dimensions, deployment.profile or (await deployment.known_face()).profile)
    prompts = completion_prompts(body.input, MAX_INPUTS, True, "input")
    single = isinstance(body.input, str) or isinstance(body.input[0], int)
    names = ("input",) if single else tuple(f"input[{i}]" for i in range(len(prompts)))
    asked = _request("embd", exchange, body, prompts, names)
    done = await _embedded(exchange, gateway, deployment, asked)
    vectors = shortened(done.vectors, body.dimensions)

    def spell() -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(_numbers(vectors, body.encoding_format == "base64"))
        ]
        usage = {"prompt_tokens": done.tokens, "total_tokens": done.tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": deployment.name, "usage": usage})

    await exchange.answer(200, await gateway.pool.run(vectors.size, spell))


async def rerank(exchange: Exchange, gateway: Gateway) -> None:
    """Documents in the order of how near they are to a query: the cosine between their vectors."""
    body = decode(await receive_json(exchange, gateway), RerankBody)
    deployment = find_deployment(gateway.deployments, body.model)
    deployment.check_embeds("/v1/rerank")
    refuse_declared(body)
    if not 1 <= len(body.documents) <= MAX_DOCUMENTS:
        raise RequestError(
            f"documents takes 1 to {MAX_DOCUMENTS} documents, got {len(body.documents)}", param="documents"
        )
    if body.top_n is not None:
        bounded("top_n", body.top_n, 1, 2**31 - 1)
    texts = [document.text if isinstance(document, Document) else document for document in body.documents]
    names = ("query", *(f"documents[{i}]" for i in range(len(texts))))
    prompts = tuple(TextPrompt(text) for text in (body.query, *texts))
    done = await _embedded(exchange, gateway, deployment, _request("rerank", exchange, body, prompts, names))
    scores = _cosines(done.vectors)
    order = sorted(range(len(texts)), key=lambda i: (-scores[i], i))[: body.top_n]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    answer = {
        "id": done.request_id,
        "model": deployment.name,
        "method": "embedding",  # not a cross-encoder: each text was read alone
        "results": results,
        "usage": {"prompt_tokens": done.tokens, "total_tokens": done.tokens},
    }
    await exchange.answer(200, msgspec.json.encode(answer))


@dataclass(frozen=True, slots=True)
class Embedded:
    request_id: str
    vectors: NDArray[np.float32]
    tokens: int


def _request(
    prefix: str,
    exchange: Exchange,
    body: EmbeddingBody | RerankBody,
    prompts: Sequence[Prompt],
    names: tuple[str, ...],
) -> EmbeddingRequest:
    timeout = deadline_s(exchange, body.timeout)
    priority = priority_of(exchange, body.priority)
    request = GenerationRequest(
        request_id=f"{prefix}-{uuid.uuid4().hex}",
        model=body.model,
        prompts=tuple(prompts),
        sampling=SamplingParams(max_tokens=0),
        timeout_s=timeout,
        tenant=exchange.caller.tenant,
        priority=priority,
    )
    return EmbeddingRequest(request, names)


async def _embedded(
    exchange: Exchange, gateway: Gateway, deployment: Deployment, asked: EmbeddingRequest
) -> Embedded:
    """The vectors, with everything around them that a generation has: limits, queue, deadline, books."""
    request = asked.request
    exchange.model = deployment.name
    timeout = request.timeout_s or deployment.limits.request_timeout_s
    check_budget(exchange, gateway)
    with _admitted(exchange, deployment, request) as used:
        try:
            with (
                deployment.visit(),
                metered(exchange, gateway, deployment, request) as record,
                cancelled_when_client_leaves(exchange),
            ):
                async with asyncio.timeout(timeout):
                    vectors = None
                    while vectors is None:
                        vectors = await _attempt(exchange, gateway, deployment, asked, used, record)
                    record.completed(time.perf_counter())
        except TimeoutError:
            raise DeadlineError(f"the request did not finish within {timeout:g} s", param="timeout") from None
    return Embedded(request.request_id, vectors, used.tokens)


async def _attempt(
    exchange: Exchange,
    gateway: Gateway,
    deployment: Deployment,
    asked: EmbeddingRequest,
    used: _Used,
    record: Meter,
) -> NDArray[np.float32] | None:
    """The vectors of one version; None: it went away, and another has to begin anew."""
    name = asked.request.request_id
    now = deployment.choose(name)
    known = now or deployment.current
    texts = None if known is None else await tokenize_all(asked, known, gateway.pool)
    face = now or await deployment.face(name)
    face.check_embeds(exchange.endpoint)
    if texts is None or face is not known:
        texts = await tokenize_all(asked, face, gateway.pool)
    say_version(exchange, face.version)
    record.served_by(face.version)
    used.tokens = sum(len(ids) for ids in texts)
    record.prepared(used.tokens)
    pace = Pace()
    try:
        with deployment.outcomes.attempt(face.key, pace):
            vectors = await embed(asked, texts, face, record)
            pace.completed = True
    except VersionGoneError:
        return None
    return vectors


@dataclass(slots=True)
class _Used:
    tokens: int = 0


@contextmanager
def _admitted(exchange: Exchange, deployment: Deployment, request: GenerationRequest) -> Iterator[_Used]:
    estimate = sum(prompt_size(prompt) for prompt in request.prompts) // 4
    used = _Used()
    charge = exchange.charge(estimate)
    try:
        ticket = deployment.admission.enter(1, estimate, deployment.client.stats(), request.tenant)
        try:
            yield used
        finally:
            ticket.release()
    finally:
        charge.close(used.tokens)


def _numbers(vectors: NDArray[np.float32], as_base64: bool) -> list[Any]:
    if as_base64:
        return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    return list(vectors.tolist())


def _cosines(vectors: NDArray[np.float32]) -> list[float]:
    """The first vector with each of the others."""
    import numpy as np

    wide = vectors.astype(np.float64)
    wide /= np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    # Row by row the same sums, so that equal texts have equal scores; a matrix product does not promise that.
    return list((wide[1:] * wide[0]).sum(axis=1).tolist())
