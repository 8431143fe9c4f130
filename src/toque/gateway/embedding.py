"""From texts to vectors through a deployment's engines: what /v1/embeddings and /v1/rerank share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from toque.errors import ContextLengthError, EngineError, RequestError, VersionGoneError
from toque.gateway.face import Face, Profile
from toque.gateway.generation import engine_error
from toque.gateway.prepare import TextPool, encode, prompt_size
from toque.gateway.requests import GenerationRequest, Prompt
from toque.types import EngineRequest, FinishReason, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from toque.monitor.metering import Meter

IN_FLIGHT = 128  # texts of one request that are in the engines at once: about what a step holds
_NOTHING = SamplingParams(max_tokens=0)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed. ``names`` says how the caller's JSON calls each, for errors."""

    request: GenerationRequest
    names: tuple[str, ...]

    @property
    def inputs(self) -> tuple[Prompt, ...]:
        return self.request.prompts


async def tokenize_all(asked: EmbeddingRequest, face: Face, pool: TextPool) -> list[tuple[int, ...]]:
    """Each input's ids. RequestError or ContextLengthError name the first that cannot be embedded."""
    size = sum(prompt_size(prompt) for prompt in asked.inputs)

    def work() -> list[tuple[int, ...]]:
        return [_ids(prompt, name, face) for prompt, name in zip(asked.inputs, asked.names, strict=True)]

    return await pool.run(size, work)


async def embed(
    asked: EmbeddingRequest, texts: Sequence[tuple[int, ...]], face: Face, record: Meter
) -> NDArray[np.float32]:
    """float32 [inputs, size], in order. What an engine raises comes out, and the others' work ends.

    After VersionGoneError no text counts: all of them are embedded anew, by another version.
    """
    import numpy as np

    request = asked.request
    deadline = time.time() + (request.timeout_s or face.limits.request_timeout_s)
    found: list[bytes] = [b""] * len(texts)
    gone = False
    numbers = iter(range(len(texts)))

    async def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            engine = EngineRequest(
                request_id=f"{request.request_id}-{number}",
                prompt=texts[number],
                sampling=_NOTHING,
                tenant=request.tenant,
                priority=request.priority,
                deadline=deadline,
            )
            found[number] = await _vector(engine, number, face, record)

    tasks = [asyncio.create_task(work(numbers)) for _ in range(min(IN_FLIGHT, len(texts)))]
    try:
        await asyncio.gather(*tasks)
    except VersionGoneError:
        gone = True
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for number, vector in enumerate(found):
            if vector and not gone:
                record.prompt(len(texts[number]), 0, number)
    return np.frombuffer(b"".join(found), "<f4").reshape(len(texts), -1)


def shortened(vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first so many numbers of each vector, its length made 1 again: models are trained for it, or bear it."""
    import numpy as np

    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dimensions].astype(np.float64)
    lengths = np.linalg.norm(kept, axis=1, keepdims=True)
    short: NDArray[np.float32] = (kept / np.maximum(lengths, 1e-12)).astype("<f4")
    return short


def check_dimensions(dimensions: int | None, profile: Profile) -> None:
    size = profile.card.embedding_size
    if dimensions is not None and not 1 <= dimensions <= size:
        raise RequestError(
            f"dimensions must be between 1 and {size} for this model, got {str(dimensions)[:24]}",
            param="dimensions",
        )


async def _vector(request: EngineRequest, number: int, face: Face, record: Meter) -> bytes:
    outputs = face.client.generate(request, partial(record.routed, number))
    try:
        async for output in outputs:
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise engine_error(output)
            if output.embedding is not None:
                record.computed(output.device_us, number)
                record.queued(output.queue_seconds)
                return output.embedding
    finally:
        await outputs.aclose()
    raise EngineError("the engine's answer ended without a vector")


def _ids(prompt: Prompt, name: str, face: Face) -> tuple[int, ...]:
    try:
        ids = encode(prompt, face).ids
    except RequestError as error:
        error.param = name
        raise
    if len(ids) > face.card.context_length:
        raise ContextLengthError(
            f"{name} has {len(ids)} tokens, this model reads at most {face.card.context_length}; shorten it",
            param=name,
        )
    return ids
